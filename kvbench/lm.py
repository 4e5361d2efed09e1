"""kvbench as a model of lm-eval: `lm_eval.simple_evaluate(model="kvbench", ...)` after `import kvbench.lm`.

lm-eval 0.4.13 finds models in its own table or by import, not by entry points, so its command line does not list this
one; `kvbench lm_eval ...` is that command line with this module imported. For versions that read entry points, this
package has one in the group `lm_eval.models`. Index only the tasks you
need: `TaskManager(include_defaults=False, include_path="kvbench/tasks")`.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kvbench.config.code import hash_files, reached
from kvbench.config.compose import compose
from kvbench.config.files import FULL, SHARED
from kvbench.engine.requests import Outcome, Request
from kvbench.errors import PackageMissing, SettingsConflict, check_whole
from kvbench.methods.full import Full
from kvbench.results.identity import canonical, hash_identity
from kvbench.runs.config import RunConfig
from kvbench.runs.experiment import answering, load_method
from kvbench.runs.parts import Loaders
from kvbench.tasks.answers import after_thinking
from kvbench.tasks.chat import check_template, render_chat, system_messages
from kvbench.tasks.choices import choice_request
from kvbench.tasks.lmeval import TASKS_FOLDER, metadata_of
from kvbench.tasks.prompts import PromptBuilder, generation_rules
from kvbench.tasks.protocol import Protocol

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook

    from kvbench.policy import Policy

_log = logging.getLogger(__name__)


@register_model("kvbench")
class KvbenchLM(LM):
    """Answers lm-eval's requests through the compressed store.

    kvbench's own tasks keep their rules: the chat template where the benchmark has it, prompts cut in the middle, end
    tokens. Other tasks get the text that lm-eval makes; a prompt that is too long loses its middle when it is to be
    answered, and its beginning when continuations are scored.

    Args:
        model: Name in conf/model.
        method: Name in conf/method. `full` stores keys and values in the model's own type here, so that its
            log-likelihoods are those of transformers; `method.tier=fp16` gives the 16-bit cache of kvbench's tables,
            which differs by up to 0.011 nats on a model of 32 bits.
        batch_size: Prompts decoded together; lm-eval's `auto` takes the configuration's.
        max_batch_size: Not used.
        device: Device of the model; None takes the configuration's.
        rolling_prompt_tokens: Tokens at the beginning of each window of a text that is scored whole which are read and
            compressed at once, as a prompt, and so scored exactly; the rest goes through the cache one by one.
        **overrides: Further settings by their Hydra names, for example `{"method.budget": 256}` or
            `{"protocol.query_aware": False}`; those of the method without `method.`, too.

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
        rolling_prompt_tokens: int = 1,
        **overrides: object,
    ) -> None:
        super().__init__()
        wanted: dict[str, object] = {"model": model, "method": method}
        if method == FULL:
            # lm-eval's users compare with its own models, which keep keys and values in the model's type.
            wanted["method.tier"] = "native"
        if batch_size is not None and not str(batch_size).startswith("auto"):
            wanted["batch_size"] = batch_size
        if device is not None:
            wanted["model.device"] = device
        self._parts = Loaders()
        wanted |= full_names(method, overrides)
        config = RunConfig.read(compose([f"{key}={_hydra(value)}" for key, value in wanted.items()]))
        config = replace(config, fidelity=replace(config.fidelity, max_tokens=0))  # lm-eval forces no answers
        self.config, self.policy, self.model = load_method(config, self._parts, _log.warning)
        self.protocol = Protocol.from_mapping(self.config.protocol)
        self._device = self.model.device
        self.rolling_prompt_tokens = check_whole("rolling_prompt_tokens", rolling_prompt_tokens, 1)
        self._rendered = False
        self._held: dict[str, list[tuple[float, float]]] = {}  # task -> bytes of each prompt, and of a full cache

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's caches."""
        return self.model.fingerprint

    def set_cache_hook(self, cache_hook: "CacheHook") -> None:
        """Extend the key of lm-eval's cache of answers (`use_cache`) by the model and method.

        lm-eval's key is the request alone, so that one file gave every method and every model the answers of the first.

        Raises:
            ValueError: The cache has keys that cannot be told apart.
        """
        super().set_cache_hook(cache_hook)
        if cache_hook.dbdict is None:
            return
        if not hasattr(cache_hook.dbdict, "encode_key"):
            raise PackageMissing(
                "use_cache needs sqlitedict 2.1 or newer; `pip install -U sqlitedict`, or leave it out",
                setting="use_cache",
            )
        answers = self._answering()
        cache_hook.dbdict.encode_key = lambda request: f"{answers} {request}"

    def _answering(self) -> str:
        """The hash of what decides an answer to one and the same request."""
        engine = self._parts.make_engine(self.config, self.model, self.policy)
        ingredients = answering(self.config, self.policy, self.model, engine)
        package = TASKS_FOLDER.parent
        door = package / "lm.py"
        files = (door, *reached([door], "kvbench.tasks", TASKS_FOLDER))
        ingredients["door"] = hash_files({str(path.relative_to(package)): path for path in files})
        ingredients["rolling_prompt_tokens"] = self.rolling_prompt_tokens
        return hash_identity({name: canonical(value) for name, value in ingredients.items()})

    def get_model_info(self) -> dict[str, Any]:
        """Entries for the configuration of lm-eval's results: the bytes held since the last call.

        They are means over the prompts of each task, the ratio as in kvbench's tables.
        """
        held, self._held = self._held, {}
        means = {
            task: {"prompts": len(each), "resident_bytes": fmean(size), "resident_ratio": sum(size) / sum(full)}
            for task, each in held.items()
            for size, full in [zip(*each, strict=True)]
        }
        return {"kvbench": {"method": self.config.method["_target_"].rpartition(".")[2], "held": means}}

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template; a named one is not supported."""
        return self.model.tokenizer.chat_template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a chat for a task that is not kvbench's own."""
        self._rendered = True
        check_template(self.model, self.protocol)
        system = system_messages(self.protocol) if chat_history[0]["role"] != "system" else []
        return render_chat(self.model, [*system, *chat_history], self.protocol, add_generation_prompt)

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[str]:
        """Answer each prompt; an answer that could not be computed is empty and logged, and thoughts are left out."""
        built = [self._generation_request(str(index), instance) for index, instance in enumerate(requests)]
        batch = [request for request, _ in built]
        outcomes = self._run(batch)
        texts = []
        for index, instance in enumerate(requests):
            outcome = outcomes[str(index)]
            if outcome.status != "ok":
                _log.warning("%s: sample %d counts as an empty answer (%s)", outcome.status, index, outcome.message)
            opened = built[index][1]
            text = (after_thinking(outcome.text, opened) or "") if opened or self._rendered else outcome.text
            texts.append(text)
            self.cache_hook.add_partial("generate_until", instance.args, text)
        return texts

    def loglikelihood(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score each continuation through the compressed cache; a prompt that several share is prefilled once.

        The last token of the prompt is read after compression, so that even one-token continuations depend on the
        method; see `kvbench.tasks.choices`.
        """
        by_context: dict[str, list[int]] = {}
        for index, instance in enumerate(requests):
            by_context.setdefault(instance.args[0], []).append(index)
        batch = [
            choice_request(
                self.model,
                sample_id=str(group[0]),
                subset=requests[group[0]].task_name or "loglikelihood",
                context=self._with_system(context),
                continuations=[requests[index].args[1] for index in group],
                rendered=self._rendered,
            )
            for context, group in by_context.items()
        ]
        outcomes = self._run(batch)
        results: dict[int, tuple[float, bool]] = {}
        for group in by_context.values():
            outcome = outcomes[str(group[0])]
            if outcome.status != "ok":
                raise ValueError(f"loglikelihood of request {group[0]} could not be computed: {outcome.message}")
            for index, scored in zip(group, outcome.choices, strict=True):
                results[index] = (scored["loglikelihood"], scored["greedy"])
                self.cache_hook.add_partial("loglikelihood", requests[index].args, results[index])
        return [results[index] for index in range(len(requests))]

    def _with_system(self, context: str) -> str:
        """A prompt with what the system says in front of it, where it is no chat."""
        return context if self._rendered or self.protocol.system is None else f"{self.protocol.system}\n\n{context}"

    def loglikelihood_rolling(self, requests: list["Instance"], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, token by token through the compressed cache, in windows as long as the model's context.

        Windows are lm-eval's: the first begins with the token that begins a text, the others with one token of context.
        With the full cache the sums are those of lm-eval's own model of transformers.
        """
        check_rolling(self.policy, self.rolling_prompt_tokens)
        totals = [0.0] * len(requests)
        batch: list[Request] = []
        exact: list[tuple[int, list[int], int]] = []
        for index, instance in enumerate(requests):
            for number, (context, scored) in enumerate(self._windows(instance.args[0])):
                inside = min(max(0, self.rolling_prompt_tokens - len(context)), len(scored))
                prompt, rest = [*context, *scored[:inside]], scored[inside:]
                if inside:
                    exact.append((index, prompt, inside))
                if rest:
                    name = f"{index}/{number}"
                    batch.append(
                        Request(
                            sample_id=name,
                            subset=instance.task_name or "rolling",
                            segments=(tuple(prompt),),
                            choices=(tuple(rest),),
                            max_new_tokens=0,
                        )
                    )
        for name, outcome in self._run(batch).items():
            if outcome.status != "ok":
                raise ValueError(f"loglikelihood_rolling of text {name} could not be computed: {outcome.message}")
            totals[int(name.partition("/")[0])] += outcome.choices[0]["loglikelihood"]
        for index, log_likelihood in zip([index for index, _, _ in exact], self._exact(exact), strict=True):
            totals[index] += log_likelihood
        for instance, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
        return totals

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        """lm-eval's windows of a text: context, and the tokens that are scored after it."""
        tokenizer = self.model.tokenizer
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        ids = tokenizer.encode(text)
        windows = get_rolling_token_windows(ids, begin, self.model.max_tokens, context_len=1)
        yield from map(make_disjoint_window, windows)

    def _exact(self, prompts: list[tuple[int, list[int], int]]) -> Iterator[float]:
        """Log-likelihoods of the last tokens of prompts, which their own forward pass predicts.

        Each item has a prompt, and how many of its tokens at the end are scored.
        """
        if not prompts:
            return
        runner = self._parts.make_engine(self.config, self.model, self.policy).runner
        runner.reserve(rows=1, prompt_tokens=1, new_tokens=1)  # a pass that keeps nothing needs no room
        for _, prompt, count in prompts:
            logits = runner.full_logits(prompt[:-1], num_logits=count)
            yield sum(float(logits[at].log_softmax(-1)[token]) for at, token in enumerate(prompt[-count:]))

    def _generation_request(self, sample_id: str, instance: "Instance") -> tuple[Request, bool]:
        """The request, and whether its prompt ends inside thoughts."""
        text, generation = instance.args
        metadata = metadata_of(instance.task_name or "")
        if metadata is not None and self._rendered:
            raise SettingsConflict(
                f"task {instance.task_name} decides itself which prompts get a chat template; run it without "
                "apply_chat_template (protocol.chat_template=always wraps all of them)",
                setting="apply_chat_template",
            )
        rules, protocol = generation_rules(generation, self.protocol, metadata)
        builder = PromptBuilder(self.model, protocol, rules, rendered=self._rendered)
        border = _border(text, instance.doc, metadata)
        request = builder.build(
            sample_id=sample_id, subset=instance.task_name or "", context=text[:border], question=text[border:]
        )
        return request, builder.opens_thoughts(request)

    def _run(self, requests: list[Request]) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}

        def keep(outcome: Outcome) -> None:
            # lm-eval repeats a request itself for several answers.
            if outcome.repeat == 0:
                outcomes[outcome.sample_id] = outcome

        self._parts.make_engine(self.config, self.model, self.policy).run(requests, on_outcome=keep)
        for request in requests:
            if (outcome := outcomes[request.sample_id]).status == "ok":
                size, full = outcome.ledger["resident_bytes"], outcome.ledger["fp16_bytes"]
                self._held.setdefault(request.subset, []).append((size, full))
        return outcomes


def full_names(method: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Settings by their full names.

    `budget` is the method's, as in `kvbench.generate`, unless a run has a setting of that name.

    Raises:
        ValueError: There is no such method.
    """
    run = compose([f"method={method}"])
    method_settings = {name for name in (*run.method, *SHARED) if name not in run}
    return {f"method.{name}" if name in method_settings else name: value for name, value in settings.items()}


def check_rolling(policy: "Policy", prompt_tokens: int) -> None:
    """Refuse to score texts without a prompt under a method that compresses prompts only."""
    if policy.prompt_only and prompt_tokens == 1 and not isinstance(policy, Full):
        raise SettingsConflict(
            f"{type(policy).__name__} compresses prompts only, and a text that is scored whole (loglikelihood_rolling) "
            "is read token by token, so it would score as the full cache does; set rolling_prompt_tokens=512 to read "
            "the first 512 tokens of each window as a prompt, or method.decode_every where the method has it",
            setting="rolling_prompt_tokens",
        )


def _border(text: str, doc: object, metadata: dict[str, Any] | None) -> int:
    """Find where the question begins in a prompt of one of our tasks; the end of the text for any other."""
    context = doc.get("context") if metadata is not None and isinstance(doc, dict) else None
    if not context or (start := text.find(context)) < 0:
        return len(text)
    return start + len(context)


def _hydra(value: object) -> str:
    """A value as Hydra's command line writes it."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
