"""Writes docs/reference/methods.md from the methods themselves: `make docs` redirects its output."""

import inspect
import re
from dataclasses import Field, fields, replace

import torch

from kvbench.cache.layout import ModelShape, compile_formats
from kvbench.cache.options import StoreOptions
from kvbench.config import files as listing
from kvbench.config.files import BY_LAYER, SHARED
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.policy import ALL_QUERIES, ByLayer, Compaction, Policy, Ranked, Scored
from kvbench.runs.parts import make_policy
from kvbench.show.formats import markdown_table

HEAD = """# Methods

Generated from the code by `make docs`. On the command line a setting is `method.KEY=VALUE`; the defaults below are
those of the files in `conf/method/`. `kvbench help NAME` prints a method's settings with their ranges, with `all=true`
inherited ones too. An entry has what the method keeps, its memory, its own settings and its differences from its
source; what several methods inherit stands once.

Memory is per KV head of one layer, in bytes: codes or 16-bit elements, scales and zeros, tracked scores and positions,
a token's share of the bounds of its page. d is the head dim, N the prompt's tokens, T the generated ones, B the budget
in tokens (a mean where heads or layers share it), n0 and n1 the tokens that a method without a budget leaves in its
tiers, R the most tokens in a 16-bit buffer, which is allocated whole, G the query heads of a KV head, of which some
methods keep the last queries. The figures after it are one token's bytes at d
= 64 / 128, where an FP16 token takes 4 d = 256 / 512. Started pages, page tables and the free list come on top; every
result itemises them. With `granularity=q_head`, the repeat-KV behaviour of official code, all of it counts per query
head.
"""


def scored(policy: Policy) -> str:
    """Say in words which attention statistics a method uses."""
    spec = policy.score
    words = spec.statistic.words
    if not words and not spec.statistic.by_queries:  # somebody's own, which says in its docstring what it is
        words = (inspect.getdoc(type(spec.statistic)) or "").partition("\n")[0].rstrip(".")
    if not spec.prefill_queries and not spec.decode_update:
        return f"none ({words})" if words and spec.measures_prompts else "none"
    queries = {ALL_QUERIES: "all queries", 1: "last query"}.get(
        spec.prefill_queries, f"last {spec.prefill_queries} queries"
    )
    power = ", squared" if spec.power == 2 else ""
    pool = "" if spec.pool == "none" else f", {spec.pool}-pool {spec.pool_kernel}"
    counts = f", {words}" if words else ""
    update = "; replaced in decode" if spec.decode_replace else "; updated in decode" if spec.decode_update else ""
    return f"{queries}{power}{counts}{pool}, group {spec.group_reduce}{update}"


def acts(policy: Policy) -> str:
    """Say when a method acts."""
    times = []
    if type(policy).plan_prefill is not Policy.plan_prefill and getattr(policy, "protect", "none") != "prompt":
        times.append("prompt")
    if type(policy).plan_decode is not Policy.plan_decode and policy.acts_in_decode:
        times.append("every step")
    if (bulk := policy.compaction) is not None:
        times.append(f"every {bulk.every} steps" if type(bulk) is Compaction else "when the budget is full")
    if (reading := policy.reading) is not None:
        share = "of the prompt's tokens" if reading.budget.unit == "ratio" else reading.budget.unit
        times.append(f"every step reads {reading.budget.value:g} {share} in pages of {reading.page_tokens}")
    if (buffer := policy.residual) is not None:
        times.append(f"as tokens leave a 16-bit buffer of {buffer.num_tokens}, {buffer.when.replace('_', ' ')}")
    return ", ".join(times) or "never (stores every token at its precision)"


def slots(policy: Policy) -> list[str]:
    """Count the tokens that a head holds in each tier, in the letters of the document's head."""
    plans_prompt = type(policy).plan_prefill is not Policy.plan_prefill
    if len(policy.tiers) > 1:
        return [f"n{tier}" for tier in range(len(policy.tiers))]
    if not plans_prompt:
        return ["(N + T)"]
    if not hasattr(policy, "budget"):
        return ["n0"]
    if getattr(policy, "protect", "none") == "prompt":
        return ["(N + B)"]
    shrinks = policy.acts_in_decode or policy.compaction
    return ["B" if shrinks else "(B + T)"]


def memory(policy: Policy) -> str:
    """Bytes of one KV head as a formula in d, and of one token in figures."""
    shape = ModelShape(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=64, dtype=torch.float16, device=torch.device("cpu")
    )
    terms, figures = [], []
    formats = (compile_formats(policy, each, StoreOptions()) for each in (shape, replace(shape, head_dim=128)))
    for count, *pages in zip(slots(policy), *formats, strict=True):
        # One token, with its share of the bounds of its page.
        small, large = (page.slot.slot_bytes + page.bounds_bytes / page.tokens_per_page for page in pages)
        per_channel = (large - small) / 64
        fixed = small - 64 * per_channel
        if pages[0].slot.k_channels:  # whole channels, which no line through two head dims meets
            per_channel, fixed = round(large / 128, 1), 0
        each = ("d" if per_channel == 1 else f"{per_channel:g} d") + (f" + {fixed:g}" if fixed else "")
        if policy.residual is not None:
            count = count.replace(")", " - R)")
        terms.append(f"{count} ({each})" if fixed else f"{count} {each}")
        figures.append(f"{small:g} / {large:g}")
    if policy.residual is not None:
        terms.append(f"4 R d, R = {policy.residual.num_tokens}")
    if policy.score.slot_queries:
        terms.append(f"{2 * policy.score.slot_queries} G d")
    return f"{' + '.join(terms)}; {', '.join(figures)}"


def section(doc: str, name: str) -> str:
    """The text after `name:` in a clean docstring, up to the next section, on one line."""
    match = re.search(rf"^{name}:(.*?)(?=^\w+:|\Z)", doc, re.DOTALL | re.MULTILINE)
    return " ".join(match.group(1).split()) if match else ""


def arguments(doc: str) -> dict[str, str]:
    """Read the `Args` section of a clean docstring: field -> meaning."""
    match = re.search(r"^Args:\n(.*?)(?=^\w+:|\Z)", doc, re.DOTALL | re.MULTILINE)
    parts = re.split(r"^    (\w+): ", match.group(1) if match else "", flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def explained(kind: type[Policy]) -> dict[str, tuple[type, str]]:
    """Setting of a method -> the class whose docstring explains it, and its meaning there."""
    result: dict[str, tuple[type, str]] = {}
    for each in reversed(kind.__mro__):
        texts = arguments(inspect.cleandoc(each.__doc__ or ""))
        result |= {name: (each, text) for name, text in texts.items()}
    return result


def meanings(kind: type[Policy]) -> dict[str, str]:
    """Setting of a method -> its meaning."""
    return {name: text for name, (_, text) in explained(kind).items()}


def settings_of(name: str) -> dict[str, object]:
    """The settings of a method, those aside that all share and its file does not list."""
    return {key: value for key, value in as_dict(method_settings(name)).items() if key != "_target_"}


def yaml_value(value: object) -> str:
    """A setting as the YAML file has it; of a long list its length."""
    if isinstance(value, list) and len(str(value)) > 60:
        return f"[{len(value)} entries]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def shared(kind: type[Policy]) -> dict[str, Field]:
    """The settings of a method that compose: those of all methods that rank a prompt's tokens."""
    names = set(SHARED) - set(BY_LAYER)
    return {item.name: item for item in fields(kind) if item.name in names and issubclass(kind, Ranked)}


def representatives(known: dict[str, Policy]) -> dict[type, str]:
    """Class of methods -> the method whose entry explains it: the one called like its module, or the first."""
    methods: dict[type, str] = {}
    for name, policy in known.items():
        kind = type(policy)
        if kind not in methods or kind.__module__.endswith(f".{name}"):
            methods[kind] = name
    return methods


def inherited(known: dict[str, Policy]) -> str:
    """Explain once the settings that methods have from the classes of `kvbench.policy`, those that compose apart."""
    meaning: dict[str, str] = {}
    composing = shared(Scored)
    for name, policy in known.items():
        listed = settings_of(name)
        for key, (owner, text) in explained(type(policy)).items():
            if key in listed and is_contract(owner) and key not in composing:
                meaning[key] = text
    lines = [f"- `{key}`: {text}" for key, text in sorted(meaning.items())]
    return (
        "## Settings of several methods\n\nAn entry that has one of these names its default.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def is_contract(owner: type) -> bool:
    """True for a class that belongs to the contract and not to a method."""
    return owner.__module__.startswith("kvbench.policy.")


def settings_lines(name: str, kind: type[Policy], entry_of: dict[type, str]) -> list[str]:
    """The settings of a method: its own with their meaning, inherited ones with a link to where they are explained."""
    documented, composing, elsewhere, lines = explained(kind), shared(kind), dict[str, list[str]](), []
    for key, value in settings_of(name).items():
        text = f"`{key}={yaml_value(value)}`"
        owner, meaning = documented.get(key, (kind, ""))
        if is_contract(owner):
            link = "settings-that-compose" if key in composing else "settings-of-several-methods"
            elsewhere.setdefault(link, []).append(text)
        elif entry_of.get(owner, name) != name:
            elsewhere.setdefault(entry_of[owner], []).append(text)
        else:
            lines.append(f"- {text}: {meaning}")
    if composing:
        elsewhere.setdefault("settings-that-compose", [])
    if issubclass(kind, ByLayer):
        elsewhere["precision-by-layer"] = []
    for link, defaults in elsewhere.items():
        what = f"[{link.replace('-', ' ')}](#{link})"
        lines.append(f"- {' '.join(defaults)}: see {what}" if defaults else f"- and {what}")
    return lines


def by_layer() -> str:
    """Explain the settings that give layers a precision of their own."""
    meaning = meanings(ByLayer)
    defaults: dict[str, object] = {item.name: [] if item.default == () else item.default for item in fields(ByLayer)}
    lines = [f"- `{name}={yaml_value(defaults[name])}`: {meaning[name]}" for name in BY_LAYER]
    return (
        "## Precision by layer\n\nMethods of one precision have these: those that quantise every token, and those that "
        "rank a prompt's tokens and evict none while decoding. `method=int4 method.protect_layers=[0,-1]` is int4 with "
        "its first and last layer in 16 bits. New tokens are stored as their layer's are. Bytes follow from each "
        "layer's format, and a budget in bytes is solved for with all of them. `kvbench calibrate what=layers` "
        "searches a table.\n\n" + "\n".join(lines) + "\n"
    )


def composition() -> str:
    """Explain the settings that compose, once for all methods."""
    meaning = meanings(Scored)
    lines = [f"- `{name}={yaml_value(item.default)}`: {meaning[name]}" for name, item in shared(Scored).items()]
    return (
        "## Settings that compose\n\nEvery method that ranks a prompt's tokens has these, whatever it ranks by; "
        "`method=h2o method.allocation=ada` is H2O with Ada-KV's budgets. `protect=prompt` and `answer` need a method "
        "that evicts while decoding: h2o and tova do at every step, others with `decode_every`. The defaults are those "
        "of the methods that set no others.\n\n" + "\n".join(lines) + "\n"
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return markdown_table([head, *([cell.replace("|", "\\|") for cell in row] for row in rows)]) + "\n"


def entry(name: str, policy: Policy, entry_of: dict[type, str]) -> str:
    """All of one method.

    Args:
        name: A choice of `method`.
        policy: The method at its defaults.
        entry_of: Class -> the method whose entry explains it.
    """
    path = listing.conf_folder() / "method" / f"{name}.yaml"
    kind, doc = type(policy), inspect.getdoc(type(policy)) or ""
    whence = re.findall(r"^# source: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)[0]
    facts = {
        "Precision": f"{', '.join(tier.name for tier in policy.tiers)}; lists per {policy.scope}",
        "Acts": acts(policy),
        "Ranks by": scored(policy),
        "Memory": memory(policy),
    }
    about = " ".join(doc.split("\n\nArgs:")[0].split())
    if entry_of[kind] == name:
        end = f"Source: {whence}. {section(doc, 'Source')}\n\nDiffers: {section(doc, 'Differs')}"
    else:
        same = f"[{entry_of[kind]}](#{entry_of[kind]})"
        about = f"{listing.options('method')[name]} {same} with the settings below."
        end = f"Source: {whence}.\n\nDiffers: as {same}."
    lines = [f"- {title}: {text}" for title, text in facts.items()]
    return "\n".join([f"### {name}\n\n{about}\n", *lines, "", *settings_lines(name, kind, entry_of), "", f"{end}\n"])


def render() -> str:
    """The whole document."""
    known = {name: make_policy(method_settings(name)) for name in listing.options("method")}
    entry_of, rows = representatives(known), []
    for name, policy in known.items():
        precision = ", ".join(tier.name for tier in policy.tiers)
        rows.append([f"[{name}](#{name})", listing.options("method")[name], precision, acts(policy), memory(policy)])
    first = table(["method", "keeps", "precision", "acts", "memory"], rows)
    entries = (entry(name, policy, entry_of) for name, policy in known.items())
    return "\n".join([HEAD, first, "## Entries\n", *entries, inherited(known), composition(), by_layer()])


if __name__ == "__main__":
    print(render(), end="")
