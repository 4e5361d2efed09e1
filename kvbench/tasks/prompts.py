"""Tokens of a request from a task's text: truncation from the middle, segments, gold tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from kvbench.engine.answer import END_OF_THOUGHT, THINK
from kvbench.engine.requests import Request, Thoughts, Turn
from kvbench.errors import PromptLength, SettingValue, Unsupported
from kvbench.tasks.chat import between, check_template, render_chat, require_template, system_messages, thinking_label
from kvbench.tasks.protocol import Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvbench.models.load import LoadedModel

# Re-tokenising the two decoded halves of a cut prompt can give a few tokens more than were kept.
RETOKENISE_SLACK_TOKENS = 16
# Number of tokens that lm-eval's models generate for a task without a setting.
DEFAULT_MAX_NEW_TOKENS = 256
# Ends thoughts that have used up their budget.
_THOUGHTS_OVER = f"\n{END_OF_THOUGHT}\n\n"


@dataclass(frozen=True, kw_only=True)
class PromptRules:
    """Prompt settings of one subset of a benchmark; `metadata` of its lm-eval YAML has the last three."""

    max_new_tokens: int  # length limit of the answer (`generation_kwargs.max_gen_toks`)
    stop: tuple[str, ...] = ()  # strings that end the answer (`generation_kwargs.until`)
    chat_template: bool = False  # the benchmark wraps this subset's prompts for chat models
    stop_tokens: tuple[str, ...] = ()  # texts whose last token ends the answer
    min_new_tokens: int = 0  # nothing ends the answer before

    @classmethod
    def from_yaml(cls, config: Mapping[str, Any]) -> "PromptRules":
        """Read the rules from a YAML's top level, or from the `config` of the lm-eval task made of it."""
        # By key only: lm-eval's own config class is a dict whose `get` sees nothing.
        generation, metadata = config["generation_kwargs"], config["metadata"]
        until = generation.get("until") or ()
        return cls(
            max_new_tokens=int(generation["max_gen_toks"]),
            stop=(until,) if isinstance(until, str) else tuple(until),
            chat_template=bool(metadata.get("chat_template", False)),
            stop_tokens=tuple(metadata.get("stop_tokens", ())),
            min_new_tokens=int(metadata.get("min_new_tokens", 0)),
        )


def generation_rules(
    generation: Mapping[str, Any], protocol: Protocol, metadata: Mapping[str, Any] | None = None
) -> tuple[PromptRules, Protocol]:
    """Read what an lm-eval task says in `generation_kwargs`, and in the metadata of its YAML where it is one of ours.

    Returns:
        The rules, and the protocol: with the task's own temperature when the task samples and the experiment does not.
    """
    generation = {"max_gen_toks": DEFAULT_MAX_NEW_TOKENS} | dict(generation)
    if generation.get("do_sample") and generation.get("temperature") and protocol.temperature == 0:
        protocol = replace(protocol, temperature=generation["temperature"], top_p=generation.get("top_p", 1.0))
    return PromptRules.from_yaml({"generation_kwargs": generation, "metadata": metadata or {}}), protocol


def fitting(limit: object) -> int | None:
    """The tokens of a limit that is written as `fit:N`; None for any other."""
    match = re.fullmatch(r"fit:([0-9]{1,9})", limit) if isinstance(limit, str) else None
    return int(match[1]) if match else None


def decode(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], **options: bool) -> str:
    """The text of one sequence of tokens; the options are those of the tokenizer's `decode`."""
    text = tokenizer.decode(list(ids), **options)
    assert isinstance(text, str), "one sequence gives one text"
    return text


def common_prefix(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The tokens with which both begin."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def opens_thoughts(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> bool:
    """Tell whether a prompt ends inside thoughts."""
    return decode(tokenizer, ids[-8:]).rstrip().endswith(THINK)


class PromptBuilder:
    """Turns texts into requests for one model, one protocol and one set of rules.

    Args:
        max_prompt_tokens: Longest prompt before the chat template is put around it; None takes what the model leaves
            after the answer and the template, and `fit:N` that where it is less than N.
        rendered: The texts already are what a chat template made: nothing is put around them, special tokens are kept.

    Raises:
        ValueError: `chat_template=always` without a template, `thinking` without a template that supports it, a
            template that cannot be rendered or drops the message, or the model is too short for the answer or for
            max_prompt_tokens.
    """

    def __init__(
        self,
        model: "LoadedModel",
        protocol: Protocol,
        rules: PromptRules,
        max_prompt_tokens: int | str | None = None,
        rendered: bool = False,
    ) -> None:
        self.rendered = rendered
        self.model, self.tokenizer, self.protocol, self.rules = model, model.tokenizer, protocol, rules
        self.chat = self._decide_chat()
        if self.chat:
            check_template(model, protocol)
        self.max_new_tokens = protocol.max_new_tokens or rules.max_new_tokens
        # Openings that answers may have, except one that the prompt has.
        self._thoughts: Thoughts | None = None
        if self.chat or rendered:
            over = () if protocol.thinking_tokens is None else self._plain(_THOUGHTS_OVER)
            self._thoughts = Thoughts(budget_tokens=protocol.thinking_tokens, end=tuple(over))
        self.answer_tokens = Request(
            sample_id="", subset="", segments=(), max_new_tokens=self.max_new_tokens, thoughts=self._thoughts
        ).answer_tokens
        # A model answers nothing after its context length, so prompt and answer share it.
        self.room_tokens = model.max_tokens - self.answer_tokens
        wraps = self.chat or (protocol.system is not None and not rendered)
        overhead = len(self._encode(self._wrap("a"))) - len(self._encode("a")) if wraps else 0
        self._template_tokens = overhead - len(self.tokenizer.encode("a")) + len(self._encode("a"))
        # Text before the user's text, whatever that is.
        both = [self._encode(self._wrap(text)) for text in ("a", "b")] if wraps else [[], []]
        self._instruction = tuple(common_prefix(*both))
        # Text after it.
        self._closing = common_prefix(*(ids[::-1] for ids in both))[::-1]
        self._available = available = self.room_tokens - overhead - RETOKENISE_SLACK_TOKENS
        if available < 2:
            raise PromptLength(
                f"model {model.name} holds {model.max_tokens} tokens, which leaves none for a prompt beside an answer "
                f"of {self.answer_tokens}; lower protocol.max_new_tokens or choose a model with a longer context",
                setting="protocol.max_new_tokens",
            )
        if (most := fitting(max_prompt_tokens)) is not None:
            max_prompt_tokens = most if most <= self.room_tokens - overhead else available
        assert not isinstance(max_prompt_tokens, str), "the setting was checked"
        if max_prompt_tokens is not None and not 2 <= max_prompt_tokens <= self.room_tokens - overhead:
            raise SettingValue(
                f"task.max_prompt_tokens={max_prompt_tokens} must lie between 2 and {self.room_tokens - overhead}: "
                f"model {model.name} holds {model.max_tokens} tokens, the answer takes {self.answer_tokens} and the "
                f"chat template {overhead}; leave it out or write fit:{max_prompt_tokens} to use what the model allows",
                setting="task.max_prompt_tokens",
            )
        self.max_prompt_tokens = max_prompt_tokens or available
        self._stop_token_ids = tuple(self._plain(text)[-1] for text in rules.stop_tokens)

    def build(
        self,
        *,
        sample_id: str,
        subset: str,
        context: str,
        question: str,
        gold: str = "",
        answers: Sequence[str] = (),
        meta: dict | None = None,
        prefix: str = "",
        turns: Sequence[Turn] = (),
    ) -> Request:
        """Make the request of one sample.

        Args:
            context: First part of the prompt, everything up to the end of the document.
            question: Rest of the prompt; empty when the prompt is not divided. The prompt is `context + question`
                whatever the protocol, so both protocols run the same tokens.
            gold: Reference answer for teacher forcing; empty for none.
            answers: The right answers, for people; `gold` by default.
            prefix: The beginning of the answer, which the model continues: after the prompt, in a chat after the
                header of the answer.
            turns: Later turns of a conversation; see `turn`.

        Returns:
            The request; two segments only when the protocol is not query aware and the question does not begin inside
            the first token. A prompt that was too long has `num_prompt_tokens_untruncated` above its length.

        Raises:
            ValueError: the chat template changes the text of the prompt, so that the question cannot be found in it, or
                what stands around the prompt leaves no room for it.
        """
        later = sum(len(turn.tokens) + self.answer_tokens for turn in turns)
        room, whole = self.room_tokens - later, (context, question)
        limit = min(self.max_prompt_tokens, self._available - later) if later else self.max_prompt_tokens
        if limit < 2:
            raise PromptLength(
                f"{sample_id}: the turns of the conversation and their answers take up to {later} tokens of the "
                f"{self.model.max_tokens} of model {self.model.name}, and leave none for a prompt; shorten them, or "
                "lower protocol.max_new_tokens"
            )
        # Once: a document of megabytes takes long.
        tokens = self.tokenizer.encode(context + question, add_special_tokens=not self.rendered)
        while True:
            parts = self._cut(whole, tokens, limit)
            rendered = self._open("".join(parts), prefix)
            ids = self._encode(rendered)
            if len(ids) <= room:
                break
            if limit == 2:
                raise self._no_room(sample_id, prefix, room)
            limit = max(limit - (len(ids) - room), 2)
        untruncated = len(ids)
        if parts != whole:
            # At least one more: re-tokenising may hide that the cut removed something.
            untruncated = max(len(tokens) + self._template_tokens, len(ids) + 1)
        return Request(
            sample_id=sample_id,
            subset=subset,
            segments=self._segments(ids, rendered, *parts),
            gold=self._gold(ids, rendered, gold),
            answers=tuple(answers) or ((gold,) if gold else ()),
            turns=tuple(turns),
            thoughts=self._thoughts and replace(self._thoughts, opened=opens_thoughts(self.tokenizer, ids)),
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=min(self.rules.min_new_tokens, self.max_new_tokens),
            stop=self.rules.stop,
            stop_token_ids=self._stop_token_ids,
            temperature=float(self.protocol.temperature),
            top_p=float(self.protocol.top_p),
            num_samples=self.protocol.num_samples,
            instruction_tokens=len(common_prefix(self._instruction, ids)),
            closing_tokens=len(self._closing) if ids[-len(self._closing) :] == self._closing else 0,
            num_prompt_tokens_untruncated=untruncated,
            meta=meta or {},
        )

    def _no_room(self, sample_id: str, prefix: str, room: int) -> PromptLength:
        """The error of a prompt that is too long even without its text: names what takes the room."""
        around, begun = self.count("a", prefix) - 1, len(self._plain(prefix)) if prefix else 0
        parts = [f"task.answer_prefix {begun}"] if begun else []
        parts += [f"the chat template, protocol.system and the tokenizer's special tokens {max(around - begun, 0)}"]
        return PromptLength(
            f"{sample_id}: around its text, the prompt has {around} tokens ({', '.join(parts)}), and model "
            f"{self.model.name} has room for {room}: it holds {self.model.max_tokens}, and what follows takes "
            f"{self.model.max_tokens - room}; shorten what is long, lower protocol.max_new_tokens or choose a model "
            "with a longer context"
        )

    @property
    def thinking(self) -> str:
        """See `thinking_label`."""
        return thinking_label(self.protocol, self.chat or self.rendered)

    def protocol_notes(self) -> dict[str, Any]:
        """Fields of result rows about its prompts."""
        notes: dict[str, Any] = {"chat": self.chat, "max_prompt_tokens": self.max_prompt_tokens, "truncation": "middle"}
        return notes | {"thinking": self.thinking, "thoughts": "not graded"}

    def check_prefix(self) -> None:
        """Raises ValueError where the beginning of an answer would stand inside the thoughts of a model."""
        if self.chat and opens_thoughts(self.tokenizer, self._encode(self._wrap("a"))):
            raise Unsupported(
                f"the chat template of model {self.model.name} begins the answer with thoughts, and the answer's "
                "prefix would stand inside them; set task.answer_prefix=false, or protocol.thinking=false where the "
                "template has that switch",
                setting="task.answer_prefix",
            )

    def opens_thoughts(self, request: Request) -> bool:
        """Tell whether the prompt ends inside thoughts: an answer without `</think>` then is all thoughts."""
        return opens_thoughts(self.tokenizer, request.segments[-1])

    def turn(
        self, said: str, *, gold: str = "", answers: Sequence[str] = (), prefix: str = "", separator: str = "\n\n"
    ) -> Turn:
        """Make a turn of a conversation: the user's text, after `separator` where the prompt is no chat."""
        if self.chat or self.rendered:
            text = between(self.model, said, self.protocol)
            text += prefix.lstrip() if text[-1:].isspace() else prefix
        else:
            text = separator + said + prefix
        ids, right = self._plain(text), tuple(answers) or ((gold,) if gold else ())
        return Turn(tokens=tuple(ids), gold=self._gold(ids, text, gold, begins=False), answers=right)

    def _decide_chat(self) -> bool:
        if self.rendered or self.protocol.chat_template == "never":
            return False
        if self.protocol.chat_template == "always":
            require_template(self.model)
            return True
        return self.rules.chat_template and self.model.chat_template

    def _wrap(self, text: str) -> str:
        if self.rendered:
            return text
        if not self.chat:
            return text if self.protocol.system is None else f"{self.protocol.system}\n\n{text}"
        messages = [*system_messages(self.protocol), {"role": "user", "content": text}]
        return render_chat(self.model, messages, self.protocol)

    def _open(self, text: str, prefix: str) -> str:
        """The prompt with the beginning of its answer; a space is not put after a line break of the template."""
        rendered = self._wrap(text)
        return rendered + (prefix.lstrip() if rendered[-1:].isspace() else prefix)

    def count(self, text: str, prefix: str = "") -> int:
        """Tokens of an uncut prompt with its chat template and the beginning of its answer."""
        return len(self._encode(self._open(text, prefix)))

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _encode(self, rendered: str, begins: bool = True) -> list[int]:
        # A chat template writes its own special tokens.
        return self.tokenizer.encode(rendered, add_special_tokens=begins and not (self.chat or self.rendered))

    def _cut(self, whole: tuple[str, str], ids: list[int], limit: int) -> tuple[str, str]:
        """Cut the middle out of a prompt that has more than `limit` tokens, which are `ids`.

        The tokens of the whole prompt are counted with the tokenizer's special tokens, the first and last `limit // 2`
        are kept and decoded apart without special tokens, and the two texts are joined.

        Source: LongBench pred.py, get_pred, at 2e00731; where context and question part is our addition.
        """
        context, question = whole
        if len(ids) <= limit:
            return whole
        half = max(limit // 2, 1)
        head, tail = (
            decode(self.tokenizer, part, skip_special_tokens=not self.rendered, clean_up_tokenization_spaces=False)
            for part in (ids[:half], ids[-half:])
        )
        if len(tail) > len(question) and tail.endswith(question):
            border = len(tail) - len(question)
            return head + tail[:border], tail[border:]
        # The question itself was cut; it begins in the tail at the latest.
        border = min(len(head), len(context))
        return head[:border], head[border:] + tail

    def _segments(self, ids: list[int], rendered: str, context: str, question: str) -> tuple[tuple[int, ...], ...]:
        """Split the tokens before the first one that holds any of the question.

        The whole prompt is tokenised at once, as the benchmark does, and the border goes where the tokens of the text
        before the question stop agreeing with it: a token that straddles the border belongs to the question.
        """
        if self.protocol.query_aware or not question:
            return (tuple(ids),)
        text = context + question
        # Templates may strip the message, never change its inside.
        start = rendered.find(text.strip())
        if start < 0:
            raise Unsupported(
                "protocol.query_aware=false needs the prompt inside the chat template unchanged, but the template of "
                f"model {self.model.name} alters it; set protocol.chat_template=never",
                setting="protocol.query_aware",
            )
        before = rendered[: start + max(len(context) - (len(text) - len(text.lstrip())), 0)]
        border = len(commonprefix([self._encode(before), ids]))
        if border == 0 or border == len(ids):
            return (tuple(ids),)
        return tuple(ids[:border]), tuple(ids[border:])

    def _gold(self, ids: list[int], rendered: str, gold: str, begins: bool = True) -> tuple[int, ...]:
        """Tokens of the reference answer as it would follow the prompt.

        After a space unless one is there already; `begins` says whether the prompt begins the text.
        """
        if not gold:
            return ()
        if not rendered[-1:].isspace() and not gold[:1].isspace():
            gold = " " + gold
        whole = self._encode(rendered + gold, begins)
        if whole[: len(ids)] == ids and len(whole) > len(ids):
            return tuple(whole[len(ids) :])
        return tuple(self._plain(gold))
