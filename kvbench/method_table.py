"""Writes docs/methods.md from the methods themselves: `python -m kvbench.method_table > docs/methods.md`."""

import inspect
import re

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from kvbench import listing
from kvbench.layout import ModelShape, StoreOptions, compile_formats
from kvbench.policy import ALL_QUERIES, Policy

HEAD = """# Methods

Generated from the code by `make docs`; a test keeps it so. Bytes are per token and KV head: codes, metadata and tracked
fields, at head dims 64 / 128 (an FP16 token takes 256 / 512); pages, tables and buffers come on top and are itemised in
every result. Every setting can be changed from the command line: `method.<setting>=<value>`.
"""


def scored(policy: Policy) -> str:
    """Which attention statistics a method uses, in words."""
    spec = policy.score
    if spec.statistic == "key_norm":
        return "none (norms of keys)"
    if not spec.prefill_queries and not spec.decode_update:
        return "none"
    queries = "all queries" if spec.prefill_queries == ALL_QUERIES else f"last {spec.prefill_queries} queries"
    power = ", squared" if spec.power == 2 else ""
    pool = "" if spec.pool == "none" else f", {spec.pool}-pool {spec.pool_kernel}"
    counts = ", how often below 1 / n" if spec.statistic == "below_uniform" else ""
    update = "; replaced in decode" if spec.decode_replace else "; updated in decode" if spec.decode_update else ""
    return f"{queries}{power}{counts}{pool}, group {spec.group_reduce}{update}"


def acts(policy: Policy) -> str:
    """When a method acts."""
    times = []
    if type(policy).plan_prefill is not Policy.plan_prefill:
        times.append("prompt")
    if type(policy).plan_decode is not Policy.plan_decode and policy.acts_in_decode:
        times.append("every step")
    if type(policy).compact_due is not Policy.compact_due:
        times.append("when the budget is full")
    elif policy.compact_every:
        times.append(f"every {policy.compact_every} steps")
    if policy.residual is not None:
        spec = policy.residual
        times.append(f"as tokens leave a 16-bit buffer of {spec.num_tokens}, {spec.when.replace('_', ' ')}")
    return ", ".join(times) or "never (stores every token at its precision)"


def slot_bytes(policy: Policy) -> str:
    """Bytes of one token per tier at head dims 64 and 128."""
    cells = []
    for index, tier in enumerate(policy.tiers):
        sizes = []
        for head_dim in (64, 128):
            shape = ModelShape(
                num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16,
                device=torch.device("cpu"),
            )  # fmt: skip
            sizes.append(f"{compile_formats(policy, shape, StoreOptions())[index].slot.slot_bytes:g}")
        cells.append(f"{tier.name}: {' / '.join(sizes)}")
    return "; ".join(cells)


def section(doc: str, name: str) -> str:
    """The text after `name:` in a docstring, up to the next section, on one line."""
    found = re.search(rf"^{name}:(.*?)(?=^\w+:|\Z)", inspect.cleandoc(doc), re.DOTALL | re.MULTILINE)
    return " ".join(found.group(1).split()) if found else ""


def render() -> str:
    """The whole document."""
    rows, details = [], []
    for name, summary in listing.options("method").items():
        config = OmegaConf.load(listing.conf_folder() / "method" / f"{name}.yaml")
        policy = instantiate(config)
        cells = (f"[{name}](#{name})", acts(policy), policy.scope, scored(policy), slot_bytes(policy))
        rows.append(f"| {' | '.join(cells)} |")
        doc = type(policy).__doc__
        settings = ", ".join(f"`{key}={config[key]}`" for key in config if key != "_target_")
        what = " ".join(inspect.cleandoc(doc).split("\n\nArgs:")[0].split())
        details.append(
            f"## {name}\n\n{summary} {what}\n\n- Settings: {settings or 'none'}\n"
            f"- Source: {section(doc, 'Source')}\n- Differs: {section(doc, 'Differs')}\n"
        )
    table = "| method | acts | scope | attention statistics | precision and bytes |\n|---|---|---|---|---|\n"
    return f"{HEAD}\n{table}" + "\n".join(rows) + "\n\n" + "\n".join(details)


if __name__ == "__main__":
    print(render(), end="")
