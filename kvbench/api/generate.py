"""Text from a model over a compressed cache, in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvbench.cache.options import StoreOptions
from kvbench.config.compose import compose, words_of
from kvbench.engine import hf
from kvbench.engine.engine import Engine, grouped
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.supported import num_full_layers
from kvbench.errors import SettingsConflict, SettingValue, check_whole
from kvbench.models.load import LoadedModel
from kvbench.models.rotary import context_length
from kvbench.policy import Policy, check_sizes
from kvbench.runs import calibration
from kvbench.runs.parts import make_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, repr=False)
class Generation:
    """Answers to some texts, in their order."""

    outcomes: list[Outcome]
    """All that the engine says of each answer: finish, ledger, kept tokens, times."""

    @property
    def texts(self) -> list[str]:
        """The answers, special tokens left out."""
        return [outcome.text for outcome in self.outcomes]

    @property
    def text(self) -> str:
        """The answer to a single text.

        Raises:
            ValueError: There are several.
        """
        if len(self.outcomes) != 1:
            raise ValueError(f"there are {len(self.outcomes)} answers; take one of .texts")
        return self.outcomes[0].text

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids of each answer, its end token left out."""
        return [outcome.token_ids for outcome in self.outcomes]

    @property
    def bytes(self) -> list[int]:
        """Bytes that the cache held for each text when its answer ended."""
        return [int(outcome.ledger["resident_bytes"]) for outcome in self.outcomes]

    @property
    def full_bytes(self) -> list[int]:
        """Bytes of an FP16 full cache of the same tokens."""
        return [int(outcome.ledger["fp16_bytes"]) for outcome in self.outcomes]

    def __repr__(self) -> str:
        lines = [
            f"{item.num_prompt_tokens} + {len(item.token_ids)} tokens, {held} bytes "
            f"({100 * held / full:.1f} % of an FP16 full cache): {item.text!r}"
            for item, held, full in zip(self.outcomes, self.bytes, self.full_bytes, strict=True)
        ]
        return "\n".join(lines)


def generate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    text: str | Sequence[str],
    *,
    method: str | Policy = "diffkv",
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    add_special_tokens: bool = True,
    backend: str = "auto",
    **settings: Any,
) -> Generation:
    """Continue texts with a model over a compressed cache, all of them in one batch.

    The model gets its own attention back, whatever happens.

    Args:
        model: A causal language model of transformers, with full attention in some of its layers.
        tokenizer: Its tokenizer.
        text: One text or several. A chat comes as `tokenizer.apply_chat_template(..., tokenize=False)` makes it, with
            `add_special_tokens=False`.
        method: Name in conf/method, or a policy.
        max_new_tokens: Longest answer, >= 1; the model's context may end it earlier.
        temperature: 0 takes the most likely token; > 0 samples.
        top_p: Share of the probability that sampling draws from, in (0, 1].
        stop: An answer ends before the first of these.
        seed: Seed of sampling; each text has separate random numbers.
        add_special_tokens: Let the tokenizer put its own before a text.
        backend: `auto` or the name of a backend.
        **settings: Of the method, for example `budget=0.25`.

    Raises:
        ValueError: A setting is unknown or out of range, a text is empty or too long, or the model cannot be held in
            the store (`UnsupportedModel`).
        RuntimeError: An answer could not be computed, because memory ran out or numbers were not finite.
    """
    _check(max_new_tokens, temperature, top_p)
    loaded, policy = begin(model, tokenizer, method, settings)
    texts = [text] if isinstance(text, str) else list(text)
    requests = [
        Request(
            sample_id=f"text {index}",
            subset="texts",
            segments=(tuple(tokenizer(item, add_special_tokens=add_special_tokens)["input_ids"]),),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=tuple(stop),
        )
        for index, item in enumerate(texts)
    ]
    outcomes: dict[str, Outcome] = {}
    size, group = grouped(loaded, backend, max(1, len(requests)))
    with hf.attached(model):
        engine = Engine(
            loaded,
            policy,
            store=StoreOptions(),
            batch_size=size,
            group=group,
            seed=seed,
            backend=backend,
            fidelity_max_tokens=0,
        )
        engine.run(requests, on_outcome=lambda outcome: outcomes.update({outcome.sample_id: outcome}))
    for outcome in outcomes.values():
        if outcome.status != "ok":
            raise RuntimeError(f"{outcome.sample_id} could not be continued ({outcome.status}): {outcome.message}")
    return Generation(outcomes=[outcomes[request.sample_id] for request in requests])


def begin(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    method: str | Policy,
    settings: Mapping[str, object],
) -> tuple[LoadedModel, Policy]:
    """Wrap a model loaded by the caller for the engine, and make the policy of a call for it.

    Its layers may lie on several devices. Its weights are not hashed: nothing that is kept depends on them.
    """
    policy, config = choose_policy(method, settings), model.config.get_text_config()
    max_tokens = context_length(model.config, None)
    check_sizes(policy, max_tokens=max_tokens, num_layers=num_full_layers(config))
    loaded = LoadedModel(
        model=model,
        tokenizer=cast("PreTrainedTokenizerBase", tokenizer),
        name=config.model_type,
        fingerprint="in memory",
        max_tokens=max_tokens,
        dtype=model.dtype,
        device=model.device,
        chat_template=bool(getattr(tokenizer, "chat_template", None)),
    )
    return loaded, policy


def choose_policy(method: str | Policy, settings: Mapping[str, object]) -> Policy:
    """Policy of a call: a method by name, with settings that override its YAML."""
    if not isinstance(method, str):
        if settings:
            raise SettingsConflict(
                f"{', '.join(settings)} cannot be set beside a policy that was made already; give it to "
                f"{type(method).__name__}(...)",
                setting=f"method.{next(iter(settings))}",
            )
        return method
    if settings.get(calibration.KEY) is not None:
        raise SettingsConflict(
            f"{calibration.KEY}={settings[calibration.KEY]} is for one model, which cannot be checked for a model in "
            "memory; give the settings of that file instead, or use kvbench.run",
            setting=f"method.{calibration.KEY}",
        )
    return make_policy(compose([f"method={method}", *words_of(settings, "method.")]).method)


def _check(max_new_tokens: int, temperature: float, top_p: float) -> None:
    check_whole("max_new_tokens", max_new_tokens, 1)
    if not temperature >= 0:
        raise SettingValue(
            f"temperature={temperature!r} must be at least 0, which takes the most likely token", setting="temperature"
        )
    if not 0 < top_p <= 1:
        raise SettingValue(f"top_p={top_p!r} must be in (0, 1]", setting="top_p")
