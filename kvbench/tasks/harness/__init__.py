"""`task=lm_eval task.name=NAME`: any task of lm-eval, prompted and scored by it, answered through the compressed cache.

Prompts, choices, filters and metrics are lm-eval's own. Answers are generated and choices scored over the pages: the
prompt is prefilled once, compressed, and its last token is read after that, so that even one-letter choices depend on
the method (see `kvbench.tasks.choices`).

Differs: lm-eval's own models cut a prompt that is too long at its beginning; here an answered one loses its middle.
    Thoughts in front of `</think>` are taken off before the filters see a chat's answer.
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvbench.engine.requests import Request
from kvbench.errors import SettingMissing, SettingsConflict, Unsupported, unknown_name
from kvbench.rules import VALUES, Choice, Text, Whole
from kvbench.tasks.chat import check_template, render_chat, require_template, thinking_label
from kvbench.tasks.choices import choice_request
from kvbench.tasks.harness.find import cannot, load_tasks, manager_of, weighting_of
from kvbench.tasks.harness.score import Doc, HarnessTaskSet, common_metrics
from kvbench.tasks.lmeval import quiet
from kvbench.tasks.prompts import PromptBuilder, generation_rules
from kvbench.tasks.protocol import Protocol
from kvbench.tasks.task import Ask, DataDir, Task
from kvbench.tasks.taskset import TaskSet

if TYPE_CHECKING:
    from lm_eval.api.task import Task as LmEvalTask
    from transformers import PreTrainedTokenizerBase

# Names of the field, in documents of lm-eval's tasks, with the text that a question is about.
CONTEXT_FIELDS = ("context", "passage", "article", "document", "story", "text", "content", "input")
_OTHER_WAY = "`kvbench lm_eval --model kvbench --tasks ...` runs it in lm-eval's own loop"


@dataclass(frozen=True, kw_only=True)
class HarnessTask(Task):
    """A task of lm-eval; its chat template is used with `protocol.chat_template=always` only.

    With `query_aware=false` everything in front of the question is the context. The seed chooses few-shot examples and
    shuffled choices; 0 gives lm-eval's own.

    Args:
        name: A task, a group or a tag.
        harness: Harness of the task.
        num_fewshot: Examples in front of each question; None for the task's number.
        include_path: Folder with task YAMLs of the user's own, searched first.
        data_dir: Folder with a copy of the data set's repository; None for the cache, then the hub.
        metric: The one that stands for the task; None for the first.
        metadata: lm-eval's metadata of every task, for tasks that make their data; None for the model's tokenizer
            alone.
        context_field: The field of a document that is its context, for `protocol.query_aware=false`; None for the first
            of `CONTEXT_FIELDS` that it has.
    """

    kind: ClassVar = HarnessTaskSet

    harness: Annotated[str, Choice(("lm_eval",))] = "lm_eval"
    num_fewshot: Annotated[int | None, Whole(0, 1024, unit="examples")] = None
    include_path: Annotated[str | None, Text()] = None
    data_dir: DataDir = None
    metric: Annotated[str | None, Text()] = None
    metadata: Annotated[Mapping[str, Any] | None, VALUES] = None
    context_field: Annotated[str | None, Text()] = None

    def __post_init__(self) -> None:
        if self.name is None:  # as in the shipped file
            raise SettingMissing(
                "task.name=null names no task; give one of lm-eval's: task.name=hellaswag, for example",
                setting="task.name",
            )
        super().__post_init__()

    def data(
        self, seed: int, protocol: Protocol, tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> "dict[str, LmEvalTask] | None":
        """See `Task`; None where the data are made with a tokenizer, and there is none yet."""
        folders = [self.include_path] if self.include_path else []
        manager = manager_of([self.name], folders)
        metadata = dict(self.metadata or {})
        if any((entry.cfg or {}).get("custom_dataset") for entry in manager.task_index.values()):
            if tokenizer is None:
                return None
            if tokenizer_name := str(getattr(tokenizer, "name_or_path", "") or ""):
                metadata = {"tokenizer": tokenizer_name} | metadata
        if metadata:
            manager = manager_of([self.name], folders, metadata=metadata)
        state = random.getstate()
        random.seed(seed)  # some tasks shuffle their choices with the global generator
        try:
            with quiet():
                tasks = load_tasks(manager, self.name, self.data_dir)
        finally:
            random.setstate(state)
        for task in tasks.values():
            default = task.get_config("num_fewshot")
            # lm-eval's rule: a task that says 0 itself cannot be given examples.
            if self.num_fewshot is not None and default != 0:
                task.set_config(key="num_fewshot", value=self.num_fewshot)
            elif default is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=1234 + seed)  # lm-eval's own, where the seed is 0
        return tasks

    def load(self, ask: Ask) -> TaskSet:
        name, tasks = self.name, self.data(ask.seed, ask.protocol, ask.model.tokenizer)
        assert tasks is not None, "there is a tokenizer"
        rendered = self._is_chat(ask)
        requests: list[Request] = []
        docs: dict[str, Doc] = {}
        for leaf, task in tasks.items():
            _check(leaf, task, ask.protocol)
            for request, doc in self._requests(ask, leaf, task, rendered):
                requests.append(request)
                docs[request.sample_id] = doc
        metrics = common_metrics(tasks)
        references = {key: [json.dumps(doc.doc, sort_keys=True, default=str), doc.leaf] for key, doc in docs.items()}
        for leaf, task in tasks.items():
            first = next((key for key, doc in docs.items() if doc.leaf == leaf), None)
            if first:
                config = json.dumps(task.dump_config(), sort_keys=True, default=str)
                # Functions that lm-eval cannot write as source are written with their address, which changes by
                # process.
                references[first].append(re.sub(r" at 0x[0-9a-f]+", "", config))
        choices = any(request.choices for request in requests)
        rules: dict[str, Any] = {
            "harness": f"lm-eval {version('lm_eval')}",
            "lm_eval_task": name,
            "num_fewshot": {leaf: task.get_config("num_fewshot") for leaf, task in tasks.items()},
            "chat_template": rendered,
            "thinking": thinking_label(ask.protocol, rendered),
            "thoughts": "not graded",
            "truncation": "beginning" if choices else "middle",
            "metadata": dict(self.metadata or {}),
        }
        if choices:
            rules["choices"] = "scored over pages; the last prompt token is read after compression"
        else:
            rules["max_new_tokens"] = requests[0].max_new_tokens if requests else None
        if self.metric is not None and self.metric not in metrics:
            raise unknown_name("task.metric", self.metric, metrics)
        return self.task_set(
            ask,
            requests,
            rules,
            references,
            lambda key, text: docs[key].score_text(text),
            name=f"lm_eval_{name}",
            metrics=metrics,
            primary=self.metric or next(iter(metrics)),
            docs=docs,
            weighting=weighting_of(name, self.include_path) if len(tasks) > 1 else "subset",
        )

    def _is_chat(self, ask: Ask) -> bool:
        """Tell whether prompts are chats; refuse a protocol that needs one where they are none."""
        rendered = ask.protocol.chat_template == "always"
        if rendered:
            require_template(ask.model)
            check_template(ask.model, ask.protocol)
        if ask.protocol.chat_setting is not None and not rendered:
            raise SettingsConflict(
                f"{ask.protocol.chat_setting} needs a chat, and lm-eval's tasks are asked as "
                "plain text; set protocol.chat_template=always",
                setting=ask.protocol.chat_setting.partition("=")[0],
            )
        return rendered

    def _requests(self, ask: Ask, leaf: str, task: "LmEvalTask", rendered: bool) -> "list[tuple[Request, Doc]]":
        """Requests of a task's documents, each with its scorer."""
        requests = []
        for doc_id, doc in ask.drawn(list(enumerate(task.eval_docs)), leaf):
            try:
                text = task.fewshot_context(
                    doc,
                    num_fewshot=task.get_config("num_fewshot"),
                    system_instruction=ask.protocol.system,
                    apply_chat_template=rendered,
                    fewshot_as_multiturn=rendered,
                    chat_template=partial(render_chat, ask.model, protocol=ask.protocol) if rendered else None,
                    gen_prefix=task.doc_to_prefix(doc),
                )
                named = {"metadata": (leaf, doc_id, 1), "apply_chat_template": rendered}
                made = task.construct_requests(doc=doc, ctx=text, **named)
            except (ValueError, OSError, MemoryError):  # among them what `render_chat` says
                raise
            except Exception as error:
                raise cannot(leaf, f"the prompt of document {doc_id}", error) from error
            instances = made if isinstance(made, list) else [made]
            if len({instance.args[0] for instance in instances}) > 1:
                raise Unsupported(
                    f"task.name={leaf} scores its choices behind more than one prompt; {_OTHER_WAY}",
                    setting="task.name",
                )
            one = Doc(leaf, task, doc, instances, rendered)
            build = self._generation if task.OUTPUT_TYPE == "generate_until" else self._choices
            requests.append((build(ask, f"{leaf}/{doc_id}", one), one))
        return requests

    def _border(self, ask: Ask, one: Doc, text: str) -> int:
        """The place where the question begins; the end of the prompt when the protocol does not divide it."""
        if ask.protocol.query_aware:
            return len(text)
        task, doc = one.task, one.doc
        question = task.doc_to_text(doc)
        start = text.rfind(question.strip()) if isinstance(question, str) else -1
        context = self._context(doc, question.strip()) if start >= 0 else ""
        if context:
            return text.index(context, start) + len(context)
        if start <= 0 or not task.get_config("num_fewshot"):
            raise SettingsConflict(
                f"protocol.query_aware=false needs a prompt with a context before its question, and the prompts of "
                f"task.name={one.leaf} have none; name the field of its documents that is the context with "
                f"task.context_field= (they have {', '.join(sorted(doc))}), set task.num_fewshot above 0, or "
                "protocol.query_aware=true",
                setting="protocol.query_aware",
            )
        return start

    def _context(self, doc: dict, question: str) -> str:
        """The text that the question of a document is about, as it stands in it; empty where there is none."""
        for name in CONTEXT_FIELDS if self.context_field is None else (self.context_field,):
            context = doc.get(name)
            # A field that ends the question is the question.
            if isinstance(context, str) and context.strip() in question and not question.endswith(context.strip()):
                return context.strip()
        return ""

    def _generation(self, ask: Ask, sample_id: str, one: Doc) -> Request:
        text, generation = one.instances[0].args[:2]
        # lm-eval has put what the system says into the text.
        rules, protocol = generation_rules(generation, replace(ask.protocol, system=None))
        builder = PromptBuilder(ask.model, protocol, rules, rendered=one.chat)
        border = self._border(ask, one, text)
        target = gold = one.task.doc_to_target(one.doc)
        gold = gold[0] if isinstance(gold, list) and gold else gold
        request = builder.build(
            sample_id=sample_id,
            subset=one.leaf,
            context=text[:border],
            question=text[border:],
            gold=gold if isinstance(gold, str) else "",
            answers=[str(one) for one in (target if isinstance(target, list) else [target])],
        )
        one.opened = builder.opens_thoughts(request)
        return request

    def _choices(self, ask: Ask, sample_id: str, one: Doc) -> Request:
        text = one.instances[0].args[0]
        border = self._border(ask, one, text)
        gold = one.task.doc_to_target(one.doc) if one.task.OUTPUT_TYPE == "multiple_choice" else 0
        request = choice_request(
            ask.model,
            sample_id=sample_id,
            subset=one.leaf,
            context=text[:border],
            question=text[border:],
            continuations=[instance.args[1] for instance in one.instances],
            rendered=one.chat,
            gold=gold if isinstance(gold, int) and 0 <= gold < len(one.instances) else None,
        )
        return replace(request, meta={"num_choices": len(one.instances)})


def _check(leaf: str, task: "LmEvalTask", protocol: Protocol) -> None:
    """Refuse what this loop cannot run, with the way that can."""
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        raise Unsupported(
            f"task.name={leaf} scores whole texts (loglikelihood_rolling), which has no answer to record; take "
            f"`python -m kvbench lm_eval --model kvbench --tasks {leaf}`, or task=stream task.file=FILE",
            setting="task.name",
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise Unsupported(
            f"task.name={leaf} runs generated code outside a cage in lm-eval; take task=humaneval_plus or "
            "task=mbpp_plus, which run it in one",
            setting="task.name",
        )
    if task.config.repeats > 1:
        raise Unsupported(
            f"task.name={leaf} asks for {task.config.repeats} answers and lets them vote, which kvbench's run does not "
            f"do; {_OTHER_WAY}, or take protocol=sampled with a task that answers once",
            setting="task.name",
        )
    if getattr(task, "multiple_input", 0):
        raise Unsupported(
            f"task.name={leaf} compares prompts, not continuations of one; {_OTHER_WAY}", setting="task.name"
        )
    if task.OUTPUT_TYPE != "generate_until" and protocol.num_samples > 1:
        raise SettingsConflict(
            f"task.name={leaf} scores choices, which are not sampled; set protocol.num_samples=1 and temperature=0",
            setting="protocol.num_samples",
        )
