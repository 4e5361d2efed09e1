"""The papers' entries on models in the shape of the papers' own: their jobs compose, and prompts and answers fit."""

import shlex
from types import SimpleNamespace
from typing import NamedTuple

import longbench_rows
import problem_rows
import pytest
import yaml

from kvbench.cli.main import main
from kvbench.config import files
from kvbench.config.compose import compose
from kvbench.config.files import AGREED
from kvbench.extensions.papers import papers
from kvbench.extensions.suite.suite import choice
from kvbench.models.random_weights import byte_tokenizer
from kvbench.sizing.shapes import package_folder
from kvbench.tasks import load_task
from kvbench.tasks.longbench import ENGLISH, LONGBENCH_E
from kvbench.tasks.mathematics import SUBJECTS
from kvbench.tasks.prompts import DEFAULT_MAX_NEW_TOKENS, PromptBuilder, PromptRules
from kvbench.tasks.protocol import Protocol

LONG = "It is in the box. " * 260  # 4,680 tokens of the byte tokenizer, more than Llama-2 holds
TOKENIZER = byte_tokenizer(320)
OF_SUBSET = {"trec": {"all_classes": ["in the box"]}, "passage_retrieval_en": {"answers": ["Paragraph 1"]}}


class Shape(NamedTuple):
    """Of a printed model what decides whether a job fits it."""

    preset: str  # of the same family, which has random weights
    context: int
    vocabulary: int
    q_heads: int
    kv_heads: int


SHAPES = {
    "LLaMA2-7B-chat": Shape("llama2-7b", 4096, 32000, 32, 32),
    "LLaMA2-13B-chat": Shape("llama2-7b", 4096, 32000, 40, 40),
    "Mistral-7B-Instruct-v0.2": Shape("mistral-7b", 32768, 32000, 32, 8),
    "Llama3-8B": Shape("llama3-8b", 8192, 128256, 32, 8),
    "Llama3-70B": Shape("llama3-8b", 8192, 128256, 64, 8),
    "Llama3.1-8B": Shape("llama3.1-8b", 131072, 128256, 32, 8),
    "Llama-3.1-8B-Instruct": Shape("llama3.1-8b", 131072, 128256, 32, 8),
    "Llama-3.1-70B-Instruct-FP8": Shape("llama3.1-70b", 131072, 128256, 64, 8),
    "R1-Distill-Llama-8B": Shape("llama3.1-8b", 131072, 128256, 32, 8),
    "Qwen2.5-7B": Shape("qwen2.5-7b", 32768, 152064, 28, 4),
    "Qwen2.5-32B": Shape("qwen2.5-7b", 32768, 152064, 40, 8),
    "QwQ-32B": Shape("qwen2.5-7b", 40960, 152064, 40, 8),
    "R1-Distill-Qwen-14B": Shape("qwen2.5-7b", 131072, 152064, 40, 8),
}


def model_words(shape):
    """A model of two layers in that shape, with narrow heads and random weights."""
    fields = {"hidden_size": 16 * shape.q_heads, "intermediate_size": 64, "head_dim": 32}
    fields |= {"num_attention_heads": shape.q_heads, "num_key_value_heads": shape.kv_heads}
    fields["vocab_size"] = shape.vocabulary
    overrides = ",".join(f"{name}:{value}" for name, value in fields.items())
    return ["model=random", f"model.preset={shape.preset}", "model.num_layers=2", f"model.max_tokens={shape.context}",
            f"model.overrides={{{overrides}}}"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders, by task, of made-up rows of each benchmark whose files kvbench reads itself; those of LongBench are too
    long for Llama-2."""
    root = tmp_path_factory.mktemp("data")
    for name in (*problem_rows.FILES, "longbench"):
        (root / name).mkdir()
        if name in problem_rows.FILES:
            problem_rows.folder_of(root / name, name)
    for subject in SUBJECTS:
        longbench_rows.write(root / "math" / f"{subject}.jsonl", problem_rows.MATH)
    for subset in (*ENGLISH, *LONGBENCH_E):
        fields = OF_SUBSET.get(subset.removesuffix("_e"), {})
        longbench_rows.write(root / "longbench" / f"{subset}.jsonl", longbench_rows.row(context=LONG, **fields))
    return root


def models_of(paper, entry):
    """The models that an entry has printed cells of; all of the paper's where it has none."""
    return [model for model in entry.printed(paper)["model"].unique() if model in paper.models] or [*paper.models]


def lines_of(paper):
    """Words of every task of every entry, and the contexts of its models."""
    lines = {}
    for entry in paper.entries:
        for line in entry.tasks:
            words = (*shlex.split(entry.every), *shlex.split(line))
            contexts = {SHAPES[model].context for model in models_of(paper, entry)}
            lines.setdefault(words, set()).update(contexts or {8192})
    return lines


def test_every_printed_model_has_a_shape():
    """And it is that of config/shapes.yaml where the model stands there."""
    assert {model for paper in papers.every() for model in paper.models} == set(SHAPES)
    listed = yaml.safe_load((package_folder() / "config" / "shapes.yaml").read_text(encoding="utf-8"))
    for name, preset in (("LLaMA2-7B-chat", "llama2-7b"), ("Llama3-70B", "llama3-70b"), ("QwQ-32B", "qwq-32b"),
                         ("Qwen2.5-32B", "qwen2.5-32b"), ("R1-Distill-Qwen-14B", "r1-distill-qwen-14b")):  # fmt: skip
        assert SHAPES[name][1::2] == (listed[preset]["context"], listed[preset]["q_heads"])
        assert SHAPES[name].kv_heads == listed[preset]["kv_heads"]


@pytest.mark.parametrize("name", files.options("paper"))
def test_prompts_and_answers_fit_the_papers_models(name, data):
    """Every line of tasks of every entry, on the contexts of its models. Of tasks that lm-eval reads from the hub,
    and of code, whose loading takes the cage, the usual answer leaves room for a prompt of 1,024."""
    for words, contexts in lines_of(papers.find(name)).items():
        cfg = compose([*words, "method=full"])
        settings, protocol, folder = dict(cfg.task), dict(cfg.protocol), data / choice(words, "task")
        for context in sorted(contexts):
            model = SimpleNamespace(tokenizer=TOKENIZER, max_tokens=context, name="it", chat_template=False)
            if "harness" in settings or AGREED in settings:
                rules = PromptRules(max_new_tokens=DEFAULT_MAX_NEW_TOKENS)
                builder = PromptBuilder(model, Protocol.from_mapping(protocol), rules)
                assert builder.max_prompt_tokens >= 1024
                assert protocol["num_samples"] == 1 or builder.max_new_tokens >= 16384, "thoughts are cut"
                continue
            data_words = {"data_dir": str(folder)} if folder.is_dir() else {}
            task = load_task(settings | data_words, model, limit=1, seed=0, protocol=protocol)
            for request in task.requests:
                assert request.num_prompt_tokens + request.max_new_tokens <= context, (words, request.subset)
                assert protocol["num_samples"] == 1 or request.max_new_tokens >= 16384, "thoughts are cut"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "at"), [(paper.key, entry.at) for paper in papers.every() for entry in paper.entries if entry.tasks]
)
def test_one_item_of_an_entry_runs(name, at, data, tmp_path, monkeypatch):
    """All rows of an entry through one item of each task whose rows are made up here, on two layers in the shape of its
    model with the shortest context; of LongBench one subset. Nothing fails."""
    monkeypatch.chdir(tmp_path)
    paper = papers.find(name)
    entry = paper.find(*at.split())
    shape = min((SHAPES[model] for model in models_of(paper, entry)), key=lambda one: one.context, default=None)
    words = ["limit=1", "protocol.max_new_tokens=2", "protocol.num_samples=1", "protocol.temperature=0"]
    words += model_words(shape) if shape else ["model=random", "model.preset=tiny"]
    for line in entry.tasks:
        task = choice(shlex.split(line), "task")
        more = {"longbench": ["task.subsets=trec_e" if "subsets=e" in line else "task.subsets=trec"]}.get(task, [])
        more += [f"data_dir={data / task}"] if (data / task).is_dir() else []
        if task not in ("mmlu", "mmlu_pro", "gpqa", "humaneval_plus", "mbpp_plus"):  # of lm-eval; need the cage
            assert main(["paper", name, at.replace(" ", "="), f"tasks={task}", *words, *more]) == 0
