"""A bridge: what a scorer of the package kvpress ranks by, over pages whose bytes are counted."""

import inspect
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

import kvbench.policy as kv
from kvbench.policy.presses import attached_rotary, value_of

# kvpress asks for an older transformers than kvbench; its scorers run with kvbench's.
INSTALL = "pip install --no-deps kvpress && pip install peft 'fire<0.7' 'cachetools<6' accelerate datasets pandas"


def scorer(press: str, settings: tuple[str, ...]) -> Any:
    """An object of the class that kvpress knows by a name.

    Raises:
        NotForModel: kvpress cannot be imported, with the command that installs it.
        ValueError: There is no such scorer, it looks at more than a layer's tensors, or a setting is not one of its.
    """
    try:
        import kvpress as package  # by its own name, so that its version counts in a run's identity
    except ImportError as error:
        said = f"method=kvpress needs the package kvpress ({error}); install it with: {INSTALL}"
        raise kv.NotForModel(said, setting="method") from None
    scorers = {
        name: kind
        for name, kind in vars(package).items()
        if isinstance(kind, type) and issubclass(kind, package.ScorerPress) and kind is not package.ScorerPress
    }
    if press not in scorers:
        raise _refused(
            f"method.press={press} is no scorer of kvpress; those installed are {', '.join(sorted(scorers))}"
        )
    kind: Any = scorers[press]
    if kind.compress is not package.ScorerPress.compress:
        raise _refused(f"method.press={press} does not keep its best scores but chooses otherwise; run kvpress itself")
    options = dict(text.partition("=")[::2] for text in settings)
    known = set(inspect.signature(kind).parameters) - {"compression_ratio"}
    if unknown := sorted(set(options) - known):
        raise _refused(
            f"method.settings has {', '.join(unknown)}, and {press} {', '.join(sorted(known)) or 'none'}",
            "method.settings",
        )
    return kind(**{name: value_of(text) for name, text in options.items()})


def _refused(said: str, setting: str = "method.press") -> kv.SettingValue:
    return kv.SettingValue(said, setting=setting)


@lru_cache(maxsize=2)
def prepared(press: str, settings: tuple[str, ...], model: str, dtype: torch.dtype) -> Any:
    """Prepares the scorer for a model, of which it sees the name and the type alone, or refuses the model."""
    made = scorer(press, settings)
    seen = SimpleNamespace(config=SimpleNamespace(name_or_path=model), dtype=dtype)
    try:
        made.post_init_from_model(seen)
    except AttributeError as error:
        raise _refused(
            f"method.press={press} prepares itself from more of a model than its name, which no statistic sees "
            f"({error}); run kvpress itself"
        ) from error
    except Exception as error:  # the hub's, or the press's own
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise _refused(
            f"method.press={press} has nothing to load for a model called {model}: {said}; take a model that it was "
            "trained for, under the name that the hub has for it"
        ) from error
    return made


@dataclass(frozen=True)
class PressScore(kv.Statistic):
    """The numbers that a scorer of kvpress gives a layer; what it draws at random, it draws the same every time."""

    press: str
    settings: tuple[str, ...]
    budget: kv.Budget
    needs: ClassVar[frozenset[kv.Need]] = frozenset({"attention_call"})
    words: ClassVar[str] = "a scorer of kvpress"

    def of_prompt(self, seen: kv.LayerTensors) -> Tensor:
        if self.budget.unit != "bytes":
            kept = self.budget.tokens(seen.tokens_seen, 1, 1.0) / seen.tokens_seen
            return self._score(seen, max(0.0, 1 - kept))
        score, other = (self._score(seen, ratio) for ratio in (0.25, 0.75))  # how many tokens bytes buy is not known
        if not torch.equal(score, other):
            raise kv.SettingsConflict(
                f"the scores of {self.press} depend on the compression ratio, which a budget in bytes does not say; "
                "give a ratio or tokens",
                setting="method.budget",
            )
        return score

    def _score(self, seen: kv.LayerTensors, ratio: float) -> Tensor:
        call = seen.attention_call
        name = str(getattr(getattr(call.module, "config", None), "name_or_path", ""))
        # A copy: no layer sees what another left.
        made = copy(prepared(self.press, self.settings, name, call.hidden_states.dtype))
        made.compression_ratio = ratio
        named = {"position_embeddings": call.position_embeddings, "hidden_states": call.hidden_states[None]}
        try:
            with torch.no_grad(), torch.random.fork_rng(), attached_rotary(call.module, call.rotary):
                torch.manual_seed(0)
                score = made.score(call.module, call.hidden_states[None], seen.k[None], seen.v[None], None, named)
        except Exception as error:  # code of others may fail with any error
            said = " ".join(str(error).split())[:200] or type(error).__name__
            text = f"{self.press} of kvpress cannot score a prompt of {seen.tokens_seen} tokens: {said}"
            raise _refused(text) from error
        return torch.as_tensor(score[0].float())


@dataclass(kw_only=True)
class KVPress(kv.Ranked):
    """Keeps, per KV head, the tokens that a scorer of kvpress gives the highest numbers.

    Args:
        press: Class of kvpress that is a ScorerPress, such as KeyDiffPress.
        settings: Its settings except the compression ratio, each as name=value, such as [window_size=32].

    Source: NVIDIA/kvpress scorer_press.py; the scorer is the installed package's own.
    Differs: `floor(ratio x tokens)` tokens stay as here for all methods; equal scores keep the earlier token; what goes
        is freed. A scorer that prepares itself from the model sees the model's name alone: KVzapPress and QFilterPress
        fetch what was trained for that name, once, and neither their bytes nor their revision are in a run. Scorers
        that look at attention weights, at more of the model, or choose otherwise than by their scores are refused.
    """

    press: str = "KeyDiffPress"
    settings: Annotated[Sequence[str], kv.Several(kv.Text(), least=0)] = ()

    def declare(self) -> None:
        super().declare()
        self.settings = tuple(self.settings)
        self.rank_by(kv.ScoreSpec(statistic=PressScore(self.press, tuple(self.settings), self._budget)))

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        super().check_model(num_layers, num_kv_heads)
        scorer(self.press, tuple(self.settings))
