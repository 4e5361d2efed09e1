"""kvbench as a model of lm-eval: our tasks through its evaluator give what our own run gives."""

from pathlib import Path

import pytest
import torch
from lmeval_demo import TINY, lm_of, outcomes_of
from longbench_rows import row, write
from refusals import refused
from selection import in_turn

from kvbench.lm import KvbenchLM
from kvbench.tasks.lmeval import TASKS_FOLDER


@pytest.fixture(scope="module")
def lm() -> KvbenchLM:
    """Gives a tiny random model with the full cache."""
    return lm_of()


def instances(kind: str, *arguments: tuple) -> list:
    """Requests of lm-eval."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, place) for place, one in enumerate(arguments)]


def evaluate(lm: KvbenchLM, task: str, metadata: dict, **more: object) -> dict:
    """lm-eval's own evaluator on one of our tasks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False, include_path=str(TASKS_FOLDER), metadata=metadata)
    return lm_eval.simple_evaluate(
        model=lm, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True, **more
    )


def test_lmeval_runs_our_tasks(lm: KvbenchLM, tmp_path: Path) -> None:
    """Prompts, answers and scores of lm-eval's evaluator are those of load_task and the engine."""
    from kvbench.tasks import load_task

    write(tmp_path / "samsum.jsonl", *(row(input=f"Dialogue {n}\nSummary: ") for n in range(3)))
    result = evaluate(lm, "kvbench_longbench_samsum", {"data_dir": str(tmp_path)}, limit=2)
    samples = result["samples"]["kvbench_longbench_samsum"]
    assert len(samples) == 2
    settings = {"name": "longbench", "subsets": "samsum", "data_dir": str(tmp_path)}
    task = load_task(settings, lm.model, limit="first:2", seed=0, protocol=dict(lm.config.protocol))
    outcomes = outcomes_of(lm, task.requests)
    for sample, request in zip(samples, task.requests, strict=True):
        assert sample["resps"][0][0] == outcomes[request.sample_id].text
        assert sample["score"] == task.score(request, outcomes[request.sample_id].text)["score"]


def test_one_cache_of_answers_gives_each_method_its_own(tmp_path: Path, monkeypatch) -> None:
    """lm-eval's `use_cache` knows a request by its text alone; a second method got the answers of the first."""
    from lm_eval.api.model import CachingLM

    text = "A line that is long enough to lose most of its tokens. " * 6
    asked = [("generate_until", (text, {"until": ["zzzz"], "max_gen_toks": 6})), ("loglikelihood", (text, " a word"))]

    def answers(lm: KvbenchLM) -> list:
        return [getattr(lm, kind)(instances(kind, arguments))[0] for kind, arguments in asked]

    methods = (("full", {}), ("streaming_llm", {"budget": 12}), ("streaming_llm", {"budget": 24}))
    models = [KvbenchLM(method=method, batch_size=2, **TINY, **more) for method, more in methods]
    wanted = [answers(each) for each in models]
    assert all(one != other for each in zip(*wanted, strict=True) for one, other in zip(each, each[1:], strict=False))
    for _ in range(2):
        cached = [CachingLM(each, str(tmp_path / "answers_rank0.db")) for each in models]
        assert [answers(each) for each in cached] == wanted
        monkeypatch.setattr(KvbenchLM, "_run", lambda *asked: pytest.fail("the answers are there"))


def test_the_generated_task_takes_its_tokenizer_from_metadata(lm: KvbenchLM) -> None:
    """Length, items and seed come with the metadata; without a tokenizer the error says so."""
    metadata = {"tokenizer": lm.model.tokenizer, "length": 1200, "items": 1, "seed": 3}
    result = evaluate(lm, "kvbench_longctx_passkey", metadata)
    assert set(result["results"]["kvbench_longctx_passkey"]) >= {"score,none", "exact,none"}
    with refused("setting-missing", None, "TaskManager(metadata="):
        evaluate(lm, "kvbench_longctx_passkey", {})


def test_a_rendered_chat_is_refused_for_our_tasks(tmp_path: Path) -> None:
    """lm-eval's one switch for all prompts would break the benchmark's rule."""
    write(tmp_path / "trec.jsonl", row(all_classes=["Food"], answers=["Food"]))
    lm = KvbenchLM(method="full", **TINY)
    lm.model.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    try:
        with refused("settings-conflict", "apply_chat_template", "kvbench_longbench_trec"):
            evaluate(lm, "kvbench_longbench_trec", {"data_dir": str(tmp_path)}, apply_chat_template=True)
    finally:
        lm.model.tokenizer.chat_template = None


def test_loglikelihood_against_a_plain_forward(lm: KvbenchLM) -> None:
    """Sums of log-probabilities and the greedy flag are those of the model's own forward pass on the same tokens."""
    from kvbench.models.load import load_model

    plain = load_model({**dict(lm.config.model)}).model
    tokenizer = lm.model.tokenizer
    pairs = [("The cat sat on the", " mat and slept"), ("Numbers: one two ", "three"), ("a", "b")]
    found = lm.loglikelihood(instances("loglikelihood", *pairs))
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        ids = tokenizer.encode(context + continuation)
        num_gold = len(ids) - len(tokenizer.encode(context.rstrip()))
        with torch.no_grad():
            logp = plain(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        steps = range(len(ids) - num_gold, len(ids))
        assert total == pytest.approx(sum(float(logp[at - 1, ids[at]]) for at in steps), abs=1e-3)
        assert greedy is all(int(logp[at - 1].argmax()) == ids[at] for at in steps)


TEXTS = ["", "a", "The cat sat on the mat. " * 3, "One two three four five six. " * 12]


@pytest.mark.parametrize(("method", "prompt_tokens"), in_turn(["full", "snapkv"], [1, 20]))
def test_whole_texts_against_lm_evals_own_model(method: str, prompt_tokens: int) -> None:
    """Sums over texts of less than a window, of one and of several are those of lm-eval's model of transformers; so are
    those of a method that keeps everything, whatever is read as a prompt."""
    from lm_eval.models.huggingface import HFLM

    from kvbench.models.load import load_model

    short = TINY | {"model.max_tokens": 64}
    if method == "snapkv":
        short |= {"method.budget": 1.0, "method.tier": "native"}
        prompt_tokens += 1
    ours = KvbenchLM(method=method, rolling_prompt_tokens=prompt_tokens, batch_size=3, **short)
    plain = load_model({**dict(ours.config.model)})
    theirs = HFLM(pretrained=plain.model, tokenizer=plain.tokenizer, max_length=64, batch_size=1)
    asked = instances("loglikelihood_rolling", *((text,) for text in TEXTS))
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked, True), abs=2e-3)


def test_what_a_method_forgets_costs_likelihood() -> None:
    """Sinks and a window of sixteen tokens score another sum than the full cache, and the exact beginning is not part
    of the difference: a window that is all prompt scores the same."""
    asked = instances("loglikelihood_rolling", (TEXTS[2],))
    scores = [
        KvbenchLM(method=method, rolling_prompt_tokens=count, **TINY, **more).loglikelihood_rolling(asked)[0]
        for method, more in (("full", {}), ("streaming_llm", {"method.budget": 16, "method.tier": "native"}))
        for count in (1, 500)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3) and scores[1] == pytest.approx(scores[3], abs=1e-3)
    assert abs(scores[2] - scores[0]) > 0.1


def test_full_keeps_the_models_own_type_here() -> None:
    """lm-eval's users compare with lm-eval's own models; who wants the 16-bit cache of kvbench's tables says so."""
    assert KvbenchLM(method="full", **TINY).policy.tier == "native"
    assert KvbenchLM(method="full", **TINY, **{"method.tier": "fp16"}).policy.tier == "fp16"


def test_what_is_not_supported_says_so(lm: KvbenchLM) -> None:
    """Whole texts have no prompt to compress; an empty continuation has nothing to score."""
    with refused("settings-conflict", "rolling_prompt_tokens", "SnapKV", "rolling_prompt_tokens=512"):
        KvbenchLM(method="snapkv", **TINY).loglikelihood_rolling([])
    with refused("prompt-length", None, "0 tokens"):
        lm.loglikelihood(instances("loglikelihood", ("a", "")))


def test_settings_go_through_the_configuration() -> None:
    """Unknown names are refused as on the command line, and Hydra names reach the protocol."""
    lm = KvbenchLM(method="full", **TINY, **{"protocol.query_aware": False, "protocol.max_new_tokens": 5})
    assert lm.protocol.query_aware is False
    assert lm.protocol.max_new_tokens == 5
    with refused("name-unknown", None, "key=query_awre"):
        KvbenchLM(method="full", **TINY, **{"+protocol.query_awre": False})
