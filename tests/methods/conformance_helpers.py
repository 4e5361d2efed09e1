"""What the conformance tests know of a method they have never seen: its YAML, and names with a meaning.

`sinks` first tokens are never evicted; `window`, `recent` or `obs_window` last tokens of a prompt are kept (as far as a
`budget` allows), and a method that evicts while decoding keeps that many last tokens at every step. `floor_tokens` is
the least that a budget means. `protect=prompt` keeps the prompt whole, and the budget is of the answer. A line
`# lossless: key=value ...` in the YAML names settings at which nothing is lost;
without it they follow from the names of the fields. Each line `# also: key=value ...` names settings under which the
method is held to all of this a second time: a *case*, written "name key=value ...".
"""

import copy
import inspect
import os
import re
import sys
from functools import cache
from pathlib import Path

import torch
from omegaconf import OmegaConf
from open_settings import open_settings
from places import CONF

from kvbench.config import files
from kvbench.config.methods import method_settings, read_method
from kvbench.policy import EVICT, Budget, CompactPlan, DecodePlan, Policy, PrefillPlan
from kvbench.rules import declared
from kvbench.runs.parts import policy_class

FOLDER = CONF / "method"
# A folder of somebody's own, or a file, whose methods are held to these tests (`kvbench check`); else kvbench's own.
CHECKED = os.environ.get("KVBENCH_CHECKED", "")
if CHECKED:
    _OWN = files.with_config_dirs([Path(CHECKED)])
    _OWN.__enter__()  # for as long as the tests run
    sys.path += files.import_folders([Path(CHECKED)])
METHODS = sorted(files.options("method", Path(os.path.realpath(CHECKED)) if CHECKED else CONF))
SHAPES = ("mha", "gqa3", "gqa7")  # 1, 3 and 7 query heads per KV head

# Values of fields, by name, at which nothing is lost. A `k8v4` becomes the model's own dtype.
LOSSLESS = {"budget": 1_000_000, "native": True, "alpha_l": 0.0} | dict.fromkeys(
    ("tier", "high", "low", "protect_tier"), "native"
)


@cache
def lines_of(name: str, word: str) -> list[str]:
    """What the lines `# word: ...` of a method's YAML say."""
    return re.findall(rf"^# {word}: (.+)$", files.path_of("method", name).read_text(), re.MULTILINE)


def parsed(settings: str) -> dict:
    """`key=value ...` as settings."""
    return plain(OmegaConf.from_dotlist(settings.split()))


def plain(settings) -> dict:
    """A config as a dict."""
    return {str(key): value for key, value in OmegaConf.to_container(settings).items()}


def settings_of(case: str):
    """The YAML file of a method as a config, with what a case changes of it; a copy of the caller's own."""
    return _settings_of(case).copy()


@cache
def _settings_of(case: str):
    name, _, also = case.partition(" ")
    listed = method_settings(name)
    unknown = set(parsed(also)) - fields_of(name)
    assert not unknown, (
        f"conf/method/{name}.yaml has no setting {sorted(unknown)}, which its line '# also: {also}' changes"
    )
    return OmegaConf.merge(listed, parsed(also))


@cache
def policy_of(case: str, heads: str = "gqa3", **changes) -> Policy:
    """The method at the settings of a case, with some changed; what the file leaves open fits a tiny model."""
    given = plain(_settings_of(case)) | open_settings(case.split()[0], 4 if heads == "mha" else 2) | changes
    return policy_class(given.pop("_target_"))(**given)


@cache
def class_of(name: str) -> type[Policy]:
    """The class of a method."""
    return policy_class(_settings_of(name)["_target_"])


def fields_of(case: str) -> set[str]:
    """The hyper-parameters of a method."""
    return _fields_of(case.split()[0])


@cache
def _fields_of(name: str) -> set[str]:
    listed = read_method(files.path_of("method", name))
    return set(declared(policy_class(listed["_target_"])))


def listed_of(name: str) -> set[str]:
    """Those that its YAML lists."""
    return {str(key) for key in _settings_of(name)} - {"_target_"}


def own_fields_of(name: str) -> set[str]:
    """Those that the method's own module declares: the others are shared by all methods of a kind."""
    return {
        field
        for kind in type(policy_of(name)).__mro__
        if not kind.__module__.startswith("kvbench.policy.")
        for field in inspect.get_annotations(kind)
    }


def cases() -> list[str]:
    """Every method, without those that are another one under a second name, and every method once more per line
    `# also:` of its YAML."""
    return [f"{name} {also}".strip() for name in distinct() for also in ("", *lines_of(name, "also"))]


def having(*fields: str) -> list[str]:
    """The cases that have all of these settings."""
    return [case for case in cases() if fields_of(case) >= set(fields)]


@cache
def distinct() -> tuple[str, ...]:
    """The methods without those that are another one under a second name."""
    seen: dict[str, str] = {}
    for name in METHODS:
        seen.setdefault(OmegaConf.to_yaml(_settings_of(name), sort_keys=True), name)
    return tuple(seen.values())


def lossless_of(case: str) -> dict:
    """The settings at which a method loses nothing; empty when neither its YAML nor its fields say."""
    said = lines_of(case.split()[0], "lossless")
    return parsed(said[0]) if said else {key: value for key, value in LOSSLESS.items() if key in fields_of(case)}


def protected(policy: Policy, num_prompt_tokens: int, tokens_seen: int) -> set[int]:
    """Positions that the method's own fields promise to keep, by the names in this file's first lines."""
    sinks, length = getattr(policy, "sinks", 0), num_prompt_tokens
    budget = Budget.parse(policy.budget) if getattr(policy, "budget", None) is not None else None
    end = tokens_seen if policy.acts_in_decode or policy.compaction else length
    last = getattr(policy, "window", 0) or getattr(policy, "recent", 0)
    if getattr(policy, "recent_share", 0) and not last:
        last = int(budget.tokens(length, 1, 1.0) * policy.recent_share)
    if hasattr(policy, "obs_window"):  # the incoming token is one of them, which a prompt does not hold yet
        last = (policy.obs_window if policy.variant == "window" else policy.protected) - (end == length)
    last = last if isinstance(last, int) else max(1, int(length * last))
    if budget is not None and (budget.unit == "bytes" or budget.tokens(length, 1, 1.0) < sinks + last):
        return set()  # what yields to so small a budget is the method's own business
    return {*range(min(sinks, tokens_seen)), *range(end - min(last, end), end)}


def keeps_prompts(policy: Policy) -> bool:
    """Whether its settings say that no token of a prompt goes: then a budget is of the answer, in bytes of both."""
    return getattr(policy, "protect", "none") == "prompt"


def watched(policy: Policy, plans: list) -> Policy:
    """The same method, with every plan for a prompt appended to `plans` as (layers, tier_of)."""
    again = copy.copy(policy)

    def plan_prefill(view):
        plan = policy.plan_prefill(view)
        plans.append((view.layers.tolist(), plan.tier_of))
        return plan

    again.plan_prefill = plan_prefill
    return again


def keeping(policy: Policy, count: int | None) -> Policy:
    """A broken copy of a method: of every prompt it keeps the last `count` tokens, or all."""
    broken = copy.copy(policy)

    def plan_prefill(view):
        tier_of = view.filled(0)
        if count is not None:
            tier_of[..., : max(0, view.num_tokens - count)] = EVICT
        return PrefillPlan(tier_of=tier_of)

    broken.plan_prefill = plan_prefill
    return broken


def idle(policy: Policy) -> Policy:
    """A broken copy of a method: it compresses the prompt as it should and never evicts again."""
    still = copy.copy(policy)
    still.plan_decode = lambda view: DecodePlan()
    still.plan_compact = lambda view: CompactPlan(keep=[None] * len(policy.tiers))
    still.cache_positions = lambda view, num_slots: torch.arange(num_slots).expand(len(view.tokens_seen), -1)
    return still
