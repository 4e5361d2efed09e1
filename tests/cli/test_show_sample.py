"""`show`: a stored sample with its whole prompt, made again and checked."""

import shutil

import pytest
from omegaconf import OmegaConf

from kvbench.cli.main import main
from kvbench.models.load import load_model, load_outline
from kvbench.results.lines import read_samples
from kvbench.results.record import RunRecord
from kvbench.results.sample import write_line

WORDS = ["method=snapkv", "model=random", "model.preset=tiny", "task.kinds=[passkey,kv]", "task.items=1"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run that the program itself made."""
    root = tmp_path_factory.mktemp("show")
    assert main([*WORDS, "task.length=600", "reference=none", f"results_dir={root / 'results'}"]) == 0
    (path,) = root.rglob("run.json")
    return path.parent


@pytest.fixture
def stored(made, tmp_path):
    """A copy of it that may be changed."""
    return shutil.copytree(made, tmp_path / "run")


def change(stored, **changes):
    """Set keys of the run's config.yaml."""
    cfg = OmegaConf.load(stored / "config.yaml")
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, merge=False, force_add=True)
    OmegaConf.save(cfg, stored / "config.yaml")


def test_the_whole_prompt_is_made_again(stored, capsys):
    """Prompt, answer, right answer, scores and bytes; the hash says that this is what was asked."""
    assert main(["show", str(stored), "passkey/0"]) == 0
    out = capsys.readouterr().out
    record = read_samples(stored / "samples.jsonl", RunRecord.load(stored).hash)[0]["passkey/0", 0]
    key = record["meta"]["answer"].strip()
    assert "the same as was asked" in out and "There is a pass key hidden in the text." in out
    assert f"The pass key is {key}." in out and f"--- right answer\n {key}\n" in out
    assert record["gold"] == [f" {key}"] and out.count(record["prompt"]["tail"].splitlines()[-1]) == 1
    assert f"{record['num_prompt_tokens']} tokens" in out
    share = 100 * record["ledger"]["resident_bytes"] / record["ledger"]["fp16_bytes"]
    assert f"({share:.1f} % of an FP16 full cache)" in out


def test_samples_are_listed_and_wrong_names_answered(stored, capsys):
    """Without a sample it lists them; a wrong one, or an answer that there is not, is named with a remedy."""
    assert main(["show", str(stored)]) == 0
    assert "2 samples: passkey/0, kv/0" in capsys.readouterr().out
    for words, said in (
        (["passkey/7"], "Did you mean passkey/0?"),
        (["passkey/0", "repeat=3"], "has 1 answers"),
        (["passkey/0", "more"], "more is no setting of show"),
    ):
        assert main(["show", str(stored), *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["show"]) == 2 and main(["show", "nowhere"]) == 2


def test_another_prompt_is_not_passed_off_as_the_one_that_was_asked(stored, capsys):
    """Where data or settings changed, both the prompt of now and the end of the true one are shown; the exit code says
    so."""
    change(stored, seed=5)
    assert main(["show", str(stored), "passkey/0"]) == 1
    out = capsys.readouterr().out
    assert "NOT what was asked" in out and "prompt as asked, its end as stored" in out


def test_without_the_data_the_stored_end_is_shown(stored, tmp_path, capsys):
    """It says what is missing; the same with prompt=tail, which looks for nothing."""
    (tmp_path / "empty").mkdir()
    change(stored, task={"name": "longbench", "subsets": ["trec"], "data_dir": None})
    assert main(["show", str(stored), "passkey/0", f"data_dir={tmp_path / 'empty'}"]) == 0
    out = capsys.readouterr().out
    assert "cannot be made here: task=longbench has no data for trec" in out
    assert "What was the pass key mentioned in the text above?" in out and "--- right answer" in out
    assert main(["show", str(stored), "passkey/0", "prompt=tail"]) == 0
    assert "cannot be made here" not in capsys.readouterr().out


def test_a_run_of_before_is_shown_unchecked(stored, capsys):
    """A journal without right answers and hashes gives what it has."""
    run = RunRecord.load(stored).hash
    samples = read_samples(stored / "samples.jsonl", run)[0]
    for record in samples.values():
        del record["gold"], record["prompt"]
    (stored / "samples.jsonl").write_bytes(
        b"".join(write_line(item | {"token_ids": []}, run) for item in samples.values())
    )
    assert main(["show", str(stored), "passkey/0"]) == 0
    out = capsys.readouterr().out
    assert "nothing checks it" in out and "There is a pass key hidden" in out and "--- right answer\n" in out


def test_a_folder_of_somebody_else_runs_no_code(stored, capsys):
    """A task that brings code is loaded only when the user says so."""
    change(stored, task__include_path="elsewhere/evil")
    assert main(["show", str(stored), "passkey/0"]) == 2
    assert (
        "task.include_path=elsewhere/evil, which runs code; if the folder is yours, add trust=true"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("changes", [{}, {"max_tokens": 512}, {"overrides": {"num_key_value_heads": 1}}])
def test_the_outline_of_a_model_is_the_model_without_weights(changes):
    """Tokenizer, context length and chat template are those of the loaded model."""
    cfg = {"kind": "random", "preset": "tiny", "device": "cpu"} | changes
    whole, outline = load_model(cfg), load_outline(cfg)
    assert (outline.max_tokens, outline.chat_template) == (whole.max_tokens, whole.chat_template)
    assert outline.tokenizer.get_vocab() == whole.tokenizer.get_vocab()
    assert all(weight.is_meta for weight in outline.model.parameters())


def test_the_outline_of_a_folder(tmp_path):
    """Of a saved checkpoint too."""
    whole = load_model({"kind": "random", "preset": "tiny", "device": "cpu"})
    whole.model.save_pretrained(tmp_path / "model")
    whole.tokenizer.save_pretrained(tmp_path / "model")
    outline = load_outline({"kind": "hf", "path": str(tmp_path / "model"), "max_tokens": 300})
    assert outline.max_tokens == 300 and outline.tokenizer.encode("A key.") == whole.tokenizer.encode("A key.")
