"""IFEval through lm-eval, on prompts made here: instructions that code checks, each answer by itself."""

import json

import pytest
from loaded import loader

load = loader("ifeval", harness="lm_eval")
ROWS = [
    {"key": 1, "prompt": "Say hello.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    {
        "key": 2,
        "prompt": "Answer in capitals.",
        "instruction_id_list": ["change_case:english_capital", "startend:end_checker"],
        "kwargs": [{}, {"end_phrase": "THE END"}],
    },
]


@pytest.mark.exhaustive  # lm-eval's extra `ifeval` is no requirement of kvbench
def test_instructions_are_checked_by_lm_eval(tmp_path, model):
    """A prompt counts where all of its instructions are followed; single ones are in lm-eval's own aggregate."""
    pytest.importorskip("langdetect")
    pytest.importorskip("immutabledict")
    (tmp_path / "ifeval_input_data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = load(model, data_dir=str(tmp_path))
    first, second = task.requests
    said = [task.score(first, text)["prompt_level_strict_acc"] for text in ("hello there", "hello, there")]
    assert said == [1.0, 0.0] and task.primary == "prompt_level_strict_acc"
    half = "THIS IS ALL. This is THE END"
    assert task.score(second, "THIS IS ALL. THE END")["prompt_level_strict_acc"] == 1.0
    assert task.score(second, half)["prompt_level_strict_acc"] == 0.0
    records = [
        {"sample_id": request.sample_id, "subset": request.subset, "text": text, "scores": task.score(request, text)}
        for request, text in ((first, "hello"), (second, half))
    ]
    assert task.aggregate(records)["lm_eval"]["ifeval"]["inst_level_strict_acc"] == pytest.approx(2 / 3)
