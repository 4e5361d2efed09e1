"""A method whose answers hang on earlier calls or on chance is refused by name, in every run; others are not."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from engine_helpers import answers, random_tokens, request
from newcomer import Told
from store_helpers import make_store, read_random, step_random

from kvbench.cache.replay_check import differ
from kvbench.cache.store import CompressedStore
from kvbench.errors import BrokenRule
from kvbench.policy import EVICT, CompactPlan, DecodePlan, LayerTensors, Policy, PrefillPlan, ScoreSpec, Statistic

LAYERS = 3


@dataclass(kw_only=True)
class Cheat(Policy):
    """Answers as a test says, and has a notebook."""

    prompt: Callable = lambda self, view: PrefillPlan(tier_of=view.filled(0))
    step: Callable = lambda self, view: DecodePlan()
    drop: Callable = lambda self, view: CompactPlan(keep=[view.slots(0).pos >= 0])
    due: Callable = lambda self, view: torch.zeros(len(view.tokens_seen), dtype=torch.bool)
    notes: list = field(default_factory=list)
    held: object = None
    score: ClassVar = ScoreSpec(track=("pos",))
    acts_in_decode: bool = True

    def declare(self):
        """Evicts in bulk as told."""
        self.compaction = Told(rule=lambda view: self.due(self, view))

    def plan_prefill(self, view):
        """As told."""
        return self.prompt(self, view)

    def plan_decode(self, view):
        """As told."""
        return self.step(self, view)

    def plan_compact(self, view):
        """As told."""
        return self.drop(self, view)

    def noted(self, what: object = 1) -> int:
        """The number of notes before this one."""
        self.notes.append(what)
        return len(self.notes) - 1


def without(view, token: int) -> PrefillPlan:
    """Everything but a token."""
    tier_of = view.filled(0)
    tier_of[..., token] = EVICT
    return PrefillPlan(tier_of=tier_of)


def after_the_longest(self, view) -> PrefillPlan:
    """Drops a token where an earlier prompt was longer, which the first ones are not."""
    self.notes.append(view.num_tokens)
    return without(view, 3 if max(self.notes) > view.num_tokens else 2)


def always(self, view) -> torch.Tensor:
    """An eviction is due."""
    return torch.ones(len(view.tokens_seen), dtype=torch.bool)


def run(policy: Policy, prompts: tuple[int, ...] = (12, 9, 7), steps: int = 3, late: bool = False) -> CompressedStore:
    """Prompts of such lengths and decode steps of all of them, in a store that asks again."""
    shape = {"num_layers": LAYERS, "num_q_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    store = make_store(policy, **shape, rows=len(prompts), max_tokens=32, new_tokens=32, backend="torch")
    store.pages.counts.is_late = late
    store.enable_replay_check()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    rows = [read_random(store, length, generator) for length in prompts]
    for _ in range(steps):
        step_random(store, rows, generator)
    store.ledger.report(rows[0])
    return store


def drawn(self, view) -> PrefillPlan:
    """Drops a token by chance."""
    return without(view, int(torch.randint(view.num_tokens, ())))


def half(view) -> torch.Tensor:
    """Half of all tokens by chance."""
    return torch.randint(2, view.filled(0).shape, dtype=torch.int8) - 1


def opened(self, view) -> PrefillPlan:
    """As the first layer of each prompt says, in all of them."""
    if int(view.layers[0]) == 0:
        self.held = view.num_tokens // 2
    return without(view, self.held)


def seeded(self, view) -> PrefillPlan:
    """Drops a token by a generator that goes on from prompt to prompt."""
    self.held = self.held or torch.Generator().manual_seed(0)
    return without(view, int(torch.randint(1 << 20, (), generator=self.held) % 7))


CHEATS = {
    "chance in a prompt's plan": ({"prompt": drawn}, r"plan_prefill \(.*\), prompt of 12 tokens, layer"),
    "a count of prompts": (
        {"prompt": lambda self, view: without(view, self.noted() // LAYERS)},
        r"plan_prefill \(.*\), prompt of 9 tokens, layer 0",
    ),
    "the longest prompt so far": ({"prompt": after_the_longest}, r"plan_prefill \(.*\), prompt of 9 tokens, layer 0"),
    "a generator that goes on": ({"prompt": seeded}, r"plan_prefill \(.*\), prompt of 9 tokens, layer 0"),
    "a lock, and chance": (
        {"prompt": drawn, "held": threading.Lock()},
        r"plan_prefill \(.*\), prompt of 12 tokens, layer",
    ),
    "chance in a step": (
        {"step": lambda self, view: DecodePlan(slot=torch.randint(7, view.shape))},
        r"plan_decode \(.*\), decode step at token 12",
    ),
    "a count of steps": (
        {"step": lambda self, view: DecodePlan(slot=torch.full(view.shape, self.noted() - 1))},
        r"plan_decode \(.*\), decode step at token 13",
    ),
    "what a prompt left behind": (
        {
            "prompt": lambda self, view: [setattr(self, "held", view.num_tokens), without(view, 0)][1],
            "step": lambda self, view: DecodePlan(slot=torch.full(view.shape, self.held - 7)),
        },
        r"plan_decode \(.*\), decode step at token 12",
    ),
    "a count of evictions": (
        {"due": always, "drop": lambda self, view: CompactPlan(keep=[view.slots(0).pos != self.noted()])},
        r"plan_compact \(.*\), compaction at token 13",
    ),
    "chance in an eviction": (
        {"due": always, "drop": lambda self, view: CompactPlan(keep=[torch.rand(view.slots(0).pos.shape) > 0.5])},
        r"plan_compact \(.*\), compaction at token 12",
    ),
    "a count in due": (
        {"due": lambda self, view: torch.full((len(view.tokens_seen),), self.noted() == 1)},
        "compaction, decode step at token 12",
    ),
}


@pytest.mark.parametrize("what", CHEATS)
def test_what_hangs_on_earlier_calls_or_chance_is_refused(what: str):
    """In the second prompt, step or eviction at the latest, by class, call and remedy."""
    told, moment = CHEATS[what]
    with pytest.raises(
        BrokenRule, match=f"^Cheat.{moment}.*: asked again about the same, .*; let an answer follow from"
    ):
        run(Cheat(**told))


def test_where_the_host_does_not_wait_it_is_refused_later():
    """By the report at the latest; there a few numbers may differ, since sums on a device have no fixed order."""
    with pytest.raises(BrokenRule, match=r"Cheat.plan_prefill \(.*\), prompt of 12 tokens, layer 0: asked again"):
        run(
            Cheat(prompt=lambda self, view: PrefillPlan(tier_of=half(view).index_fill_(-1, torch.tensor(0), 0))),
            late=True,
        )
    one = torch.arange(10_000)
    other = one.index_fill(0, torch.tensor(5), 0)
    assert bool(differ(one, other)) and not bool(differ(one, other, 1e-3))


def test_honest_methods_are_asked_again_and_nothing_comes_of_it():
    """A memory of the prompt's own layers, and a notebook that nothing hangs on, are no state between calls."""
    calls = []
    for prompt in (opened, lambda self, view: [calls.append(1), without(view, 2)][1]):
        run(Cheat(prompt=prompt), prompts=(12, 9, 7, 7, 7, 7, 7, 7, 7, 7), steps=1)
    assert len(calls) == LAYERS * (10 + 3)  # the first two prompts and the ninth, again


@dataclass(frozen=True)
class Moody(Statistic):
    """Scores as a function says, with a notebook."""

    of: Callable
    notes: list = field(default_factory=list)
    by_queries: ClassVar = False

    def of_prompt(self, seen: LayerTensors) -> torch.Tensor:
        self.notes.append(1)
        return self.of(self, seen.k[..., 0].float())


@pytest.mark.parametrize(
    ("of", "moment"),
    [
        (lambda self, k: torch.rand_like(k), "prompt of 12 tokens, layer 0"),
        (lambda self, k: k + len(self.notes) // (LAYERS + 1), "prompt of 9 tokens, layer 1"),
        (lambda self, k: k, ""),
    ],
)
def test_statistics_are_asked_again_too(of: Callable, moment: str):
    """In one layer of a prompt, another one each time."""
    policy = Cheat()
    policy.score = ScoreSpec(statistic=Moody(of), track=("pos",))
    if not moment:
        run(policy)
        return
    with pytest.raises(BrokenRule, match=rf"^Moody.of_prompt \(.*\), {moment}: asked again about the same"):
        run(policy)


def test_every_layer_is_asked_again():
    """Of four layers the last one too, which no multiple of eight prompts would come to."""

    def mood(self, k):
        return k + len(self.notes) // 4 if len(self.notes) % 4 == 0 else k  # the last layer of each prompt

    policy = Cheat()
    policy.score = ScoreSpec(statistic=Moody(mood), track=("pos",))
    store = make_store(policy, num_layers=4, rows=1, max_tokens=32, backend="torch")
    store.enable_replay_check()
    make = torch.Generator().manual_seed(0)
    with pytest.raises(BrokenRule, match=r"^Moody.of_prompt \(.*\), prompt of 9 tokens, layer 3: "):
        for _ in range(20):
            row = read_random(store, 9, make)
            store.close_row(row)


def test_the_sample_is_named(tiny_model):
    """The engine asks again in every run, and says which sample it was, or in which a step was."""
    requests = [request(name, random_tokens(20 + place), max_new_tokens=6) for place, name in enumerate("ab")]
    with pytest.raises(BrokenRule, match=r"Cheat.plan_prefill \(.*\), .* that they seed \(sample b\)$"):
        answers(tiny_model(), Cheat(**CHEATS["a count of prompts"][0]), requests)
    with pytest.raises(BrokenRule, match=r"Cheat.plan_decode \(.*\), .* that they seed \(samples a, b\)$"):
        answers(tiny_model(), Cheat(**CHEATS["a count of steps"][0]), requests)
