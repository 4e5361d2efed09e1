"""kvbench as a model of lm-eval: `lm_eval.simple_evaluate(model="kvbench", ...)` after `import kvbench.lm`.

lm-eval finds models by import, not by entry points, so its command line does not know this one. Index only the tasks
you need: `TaskManager(include_defaults=False, include_path="kvbench/tasks")`.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from kvbench.requests import Outcome, Request
from kvbench.tasks.lmeval import metadata_of
from kvbench.tasks.prompts import PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from omegaconf import DictConfig

# What lm-eval's own models generate when a task does not say.
DEFAULT_MAX_NEW_TOKENS = 256

_log = logging.getLogger(__name__)


def compose_config(overrides: Sequence[str]) -> "DictConfig":
    """The configuration of a run with the given Hydra overrides, composed without Hydra's command line."""
    from hydra import compose, initialize_config_dir

    from kvbench.provenance import sibling_folder

    with initialize_config_dir(version_base=None, config_dir=str(sibling_folder("conf").resolve())):
        return compose("config", overrides=list(overrides))


@register_model("kvbench")
class KvbenchLM(LM):
    """Answers lm-eval's requests through the compressed store.

    kvbench's own tasks keep their rules: the chat template where the benchmark has it, prompts cut in the middle, end
    tokens. Other tasks get the text that lm-eval makes, cut in the middle when it is too long.

    Args:
        model: Name in conf/model.
        method: Name in conf/method.
        batch_size: Prompts decoded together; lm-eval's `auto` takes the configuration's.
        max_batch_size: Not used.
        device: Where the model runs; None takes the configuration's.
        **overrides: Further settings by their Hydra names, for example `{"method.budget": 256}` or
            `{"protocol.query_aware": False}`.

    Raises:
        ValueError: a setting is unknown or out of range.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        method: str = "full",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **overrides: object,
    ) -> None:
        super().__init__()
        from kvbench.parts import default_parts

        settings: dict[str, object] = {"model": model, "method": method}
        if batch_size is not None and not str(batch_size).startswith("auto"):
            settings["batch_size"] = batch_size
        if device is not None:
            settings["model.device"] = device
        self.cfg = compose_config([f"{key}={_hydra(value)}" for key, value in (settings | overrides).items()])
        self._parts = default_parts()
        self.policy = self._parts.make_policy(self.cfg.method)
        self.model = self._parts.load_model(self.cfg.model)
        self.protocol = Protocol.from_mapping(self.cfg.protocol)
        self._device = self.model.device
        self._rendered = False

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches."""
        return self.model.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template; a named one is not supported."""
        return self.model.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat for a task that is not kvbench's own."""
        self._rendered = True
        return self.model.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
        """Answer each prompt; an answer that could not be computed is empty and logged."""
        asked = [self._generation_request(str(place), instance) for place, instance in enumerate(requests)]
        outcomes = self._run(asked, fidelity_max_tokens=0)
        texts = []
        for place, instance in enumerate(requests):
            outcome = outcomes[str(place)]
            if outcome.status != "ok":
                _log.warning("%s: sample %d counts as an empty answer (%s)", outcome.status, place, outcome.message)
            texts.append(outcome.text)
            self.cache_hook.add_partial("generate_until", instance.args, outcome.text)
        return texts

    def loglikelihood(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score each continuation by teacher forcing through the compressed cache.

        The first token of a continuation is predicted by the prompt's own forward pass and does not depend on the
        method; one-token continuations therefore say nothing about it.

        Raises:
            ValueError: a continuation is empty, as long as the model, or could not be computed.
        """
        asked = [self._scoring_request(str(place), *instance.args) for place, instance in enumerate(requests)]
        outcomes = self._run(asked, fidelity_max_tokens=max((len(request.gold) for request in asked), default=1))
        results = []
        for place, instance in enumerate(requests):
            outcome = outcomes[str(place)]
            if outcome.fidelity is None:
                raise ValueError(f"loglikelihood of request {place} could not be computed: {outcome.message}")
            total = -outcome.fidelity["nll"] * outcome.fidelity["num_tokens"]
            results.append((total, bool(outcome.fidelity["gold_exact"])))
            self.cache_hook.add_partial("loglikelihood", instance.args, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[float]:
        """Not supported.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "kvbench does not score whole texts (loglikelihood_rolling): without a prompt there is no cache to "
            "compress; use tasks of type generate_until, loglikelihood or multiple_choice"
        )

    def _generation_request(self, sample_id: str, instance: "Instance") -> Request:
        text, generation = instance.args
        own = metadata_of(instance.task_name or "")
        if own is not None and self._rendered:
            raise ValueError(
                f"task {instance.task_name} decides itself which prompts get a chat template; run it without "
                "apply_chat_template (protocol.chat_template=always wraps all of them)"
            )
        generation = {"max_gen_toks": DEFAULT_MAX_NEW_TOKENS} | dict(generation)
        rules = PromptRules.from_yaml({"generation_kwargs": generation, "metadata": own or {}})
        protocol = self.protocol
        if generation.get("do_sample") and generation.get("temperature") and protocol.temperature == 0:
            protocol = replace(protocol, temperature=generation["temperature"], top_p=generation.get("top_p", 1.0))
        builder = PromptBuilder(self.model, protocol, rules, rendered=self._rendered)
        border = _border(text, instance.doc, own)
        return builder.build(
            sample_id=sample_id, subset=instance.task_name or "", context=text[:border], question=text[border:]
        )

    def _scoring_request(self, sample_id: str, context: str, continuation: str) -> Request:
        tokenizer = self.model.tokenizer
        # lm-eval's convention: white space between the two belongs to the continuation.
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        head = tokenizer.encode(context, add_special_tokens=not self._rendered) if context else []
        if not head:
            start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            head = [start]
        joined = tokenizer.encode(context + continuation, add_special_tokens=not self._rendered)
        tail = joined[len(head) :] if joined[: len(head)] == head else []
        tail = tail or tokenizer.encode(continuation, add_special_tokens=False)
        room = self.model.max_tokens - len(tail)
        if not tail or room < 2:
            raise ValueError(
                f"a continuation of {len(tail)} tokens cannot be scored: it must have at least one token and leave "
                f"room for a prompt in the {self.model.max_tokens} tokens of model {self.model.name}"
            )
        return Request(
            sample_id=sample_id,
            subset="loglikelihood",
            segments=(tuple(head[-(room - 1) :]),),
            gold=tuple(tail),
            max_new_tokens=1,
            num_prompt_tokens_untruncated=len(head),
        )

    def _run(self, requests: list[Request], fidelity_max_tokens: int) -> dict[str, Outcome]:
        from omegaconf import OmegaConf

        cfg = OmegaConf.merge(self.cfg, {"fidelity": {"max_tokens": fidelity_max_tokens}})
        outcomes: dict[str, Outcome] = {}

        def keep(outcome: Outcome) -> None:
            # lm-eval repeats a request itself when it wants several answers.
            if outcome.repeat == 0:
                outcomes[outcome.sample_id] = outcome

        self._parts.make_engine(cfg, self.model, self.policy).run(requests, on_outcome=keep)
        return outcomes


def _border(text: str, doc: object, own: dict[str, Any] | None) -> int:
    """Where the question begins in a prompt of one of our tasks; the end of the text for any other."""
    context = doc.get("context") if own is not None and isinstance(doc, dict) else None
    start = text.find(context) if context else -1
    return start + len(context) if start >= 0 else len(text)


def _hydra(value: object) -> str:
    """A value as Hydra's command line writes it."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
