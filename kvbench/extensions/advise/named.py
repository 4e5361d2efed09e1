"""Methods by their settings: told apart, described and counted, without torch where that was done before."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import yaml

from kvbench.config import files
from kvbench.extensions.advise.remembered import remembered
from kvbench.sizing.projection import Projection
from kvbench.sizing.shapes import NamedShape, presets
from kvbench.sizing.stored import policy_of

if TYPE_CHECKING:
    from kvbench.policy import Policy


@dataclass(frozen=True, kw_only=True)
class NamedMethod:
    """A method with its settings. The policy is made when something is counted that never was."""

    text: str
    """The policy's own: two with one text are one method."""
    settings: Mapping[str, Any]
    """`_target_`, and every setting of the policy as it counts."""
    make: "Callable[[], Policy]" = field(repr=False, compare=False)
    """Makes the policy."""

    @cached_property
    def policy(self) -> "Policy":
        """The policy itself, whose making imports torch."""
        return self.make()

    def outline(
        self, shape: NamedShape, prompt_tokens: int, new_tokens: int, shares: Sequence[float] = ()
    ) -> Projection | None:
        """Bytes of a sequence as `kvbench.sizing.outline` has them; None where the text decides.

        Raises:
            ValueError: The method does not fit the model.
        """

        def count() -> dict[str, Any] | None:
            from kvbench.sizing.outline import outline

            result = outline(self.policy, shape.store_shape, prompt_tokens, new_tokens, shares)
            if result is None:
                return None
            return {"items": result.items, "fp16_bytes": result.fp16_bytes, "measured": result.measured}

        sizes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "shares": list(shares)}
        plain = self.remember("outline", count, {"model": shape.name, **sizes}) if is_preset(shape) else count()
        return None if plain is None else Projection(**plain)

    def remember(self, what: str, answer: Callable[[], Any], more: Mapping[str, Any]) -> Any:
        """Answer a question about the method, by `remembered`."""
        return remembered({"what": what, "method": dict(self.settings), **more}, answer)


def is_preset(shape: NamedShape) -> bool:
    """True for a model that is known by its name alone."""
    return presets().get(shape.name) is shape


_known: dict[str, NamedMethod | None] = {}  # in this process; a study has many runs of one method


def stored_method(identity: Mapping[str, Any]) -> NamedMethod | None:
    """The method of a stored run; None where the code no longer fits its settings (`policy_of`)."""
    stored = dict(identity.get("method") or {})
    return _named("stored", stored, lambda: policy_of(identity))


def method_of(text: str, *more: str) -> NamedMethod:
    """The method that a text such as `kivi bits=2` describes, with `more` settings in the same form.

    Raises:
        ValueError: It describes none.
    """

    def make() -> "Policy":
        from kvbench.runs.choices import read_choice
        from kvbench.runs.parts import make_policy

        return make_policy(read_choice("method", text, *more))

    name, *changes = [*text.split(), *more] or [""]
    if files.config_dirs():  # a method of the user's, whose code may change
        return described(make())
    pairs = [[key, yaml.safe_load(value) if sign else None] for key, sign, value in (x.partition("=") for x in changes)]
    known = _named("text", {"name": name, "changes": pairs}, make)
    assert known is not None, "make_method raises"
    return known


def _named(what: str, words: Mapping[str, Any], make: "Callable[[], Policy | None]") -> NamedMethod | None:
    key = json.dumps([what, words, list(map(str, files.config_dirs()))], sort_keys=True, default=repr)
    if key not in _known:
        made: list[NamedMethod | None] = []

        def describe() -> dict[str, Any] | None:
            policy = make()
            made.append(None if policy is None else described(policy))
            return None if made[0] is None else {"text": made[0].text, "settings": dict(made[0].settings)}

        plain = remembered({"what": what, "method": words}, describe)
        kept = None if plain is None else NamedMethod(**plain, make=make)  # type: ignore[arg-type]  # it made one before
        _known[key] = made[0] if made else kept
    return _known[key]


def described(policy: "Policy") -> NamedMethod:
    """A policy by its settings."""
    kind = type(policy)
    values = {item.name: getattr(policy, item.name) for item in fields(policy) if item.init}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}  # as in JSON
    settings = {"_target_": f"{kind.__module__}.{kind.__qualname__}", **values}
    return NamedMethod(text=repr(policy), settings=settings, make=lambda: policy)
