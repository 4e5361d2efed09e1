"""The command `bytes`, from the command line to its table and its CSV."""

import csv
import json

import pytest
from engine_helpers import answers, random_tokens, request
from gguf_bytes import gguf_header, write_gguf

from kvbench.cache.options import StoreOptions
from kvbench.cli.main import main
from kvbench.engine.requests import Outcome, Request
from kvbench.engine.supported import model_shape
from kvbench.extensions.advise import along, shipped
from kvbench.results.identity import hash_identity
from kvbench.results.record import RunRecord
from kvbench.results.sample import journal_record, write_line
from kvbench.runs import choices
from kvbench.sizing.shapes import find_shape, presets


def lines(path):
    """The rows of a CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.smoke
def test_a_method_a_model_a_length_and_a_batch(tmp_path, capsys):
    """The table has a row per length; a batch is so many sequences, and FP16 is 2 x layers x heads x dim x 2 bytes."""
    out = tmp_path / "bytes.csv"
    assert main(["bytes", "method=kivi", "model=llama3.2-1b", "length=[1000,3000]", "batch=16", f"out={out}"]) == 0
    shown = capsys.readouterr().out
    assert "Bytes on llama3.2-1b: 16 layers, 8 KV heads of 64 channels" in shown
    assert "meta-llama/Llama-3.2-1B" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())
    short, long = lines(out)
    assert [row["tokens"] for row in (short, long)] == ["1000", "3000"]
    assert int(long["fp16_bytes"]) == 16 * 3000 * 16 * 8 * 64 * 2 * 2
    items = [int(count) for name, count in long.items() if name.endswith("_bytes") and name != "fp16_bytes"]
    assert sum(items) == 2 * int(long["resident_bytes"])  # the items and their sum
    assert float(long["ratio"]) == int(long["resident_bytes"]) / int(long["fp16_bytes"]) < float(short["ratio"])


@pytest.mark.parametrize(
    ("model", "windows", "states"),
    [
        ("gpt-oss-20b", 12 * 128 * 8 * 64 * 4, 0),  # layers x window x KV heads x channels x 2 sides, 16 bits
        ("qwen3-next-80b", 0, 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)),  # a convolution's, and fp32 memory
    ],
)
def test_layers_that_do_not_see_everything_are_billed_off_page(model, windows, states, tmp_path, capsys):
    """A model whose layers differ: windows and states are in every row and in FP16, and the full layers stand alone.
    Windows have pages of their own: those of 4 bits take a quarter, and their scales."""
    out, tokens = tmp_path / "bytes.csv", 4096
    words = ["bytes", f"model={model}", f"length={tokens}", f"out={out}"]
    assert main([*words, "method=full,int4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "% alone" in shown and "The method acts on the 12 layers that see everything, and" in shown
    shape, (full, int4) = presets()[model], lines(out)
    alone = tokens * shape.layers * shape.store_shape.num_kv_heads * shape.store_shape.head_dim * 4
    for row in (full, int4):
        assert int(row["fp16_bytes"]) == alone + windows + states and int(row["state_bytes"]) == states
        assert windows <= int(row["window_bytes"]) <= 1.1 * windows
        items = [int(count) for name, count in row.items() if name.endswith("_bytes") and name != "fp16_bytes"]
        assert sum(items) == 2 * int(row["resident_bytes"])
    paged = int(int4["resident_bytes"]) - int(int4["window_bytes"]) - states
    assert f"{100 * paged / alone:.1f}" in shown
    assert main([*words, "method=int4", "store.windows=method"]) == 0
    (coded,) = lines(out)
    assert windows / 4 <= int(coded["window_bytes"]) <= 0.35 * windows
    assert int(coded["resident_bytes"]) == paged + int(coded["window_bytes"]) + states


def test_a_latent_cache_is_counted_once(tmp_path, capsys):
    """DeepSeek-V3 holds 576 numbers per token and layer, and a quantiser half a byte for each of them."""
    out = tmp_path / "bytes.csv"
    assert main(["bytes", "model=deepseek-v3", "method=int4", "length=1000", "answer=4", f"out={out}"]) == 0
    assert "61 layers of one latent vector of 576 channels" in capsys.readouterr().out
    int4 = lines(out)[-1]
    assert int(int4["fp16_bytes"]) == 61 * 1000 * 576 * 2
    assert int(int4["payload_bytes"]) == 61 * 1000 * 576 // 2


def test_what_data_decide_has_two_rows_and_a_run_makes_them_one(tmp_path, capsys):
    """diffkv is shown from least to most; run=FOLDER takes the method and the shares of a stored run."""
    out, words = tmp_path / "bytes.csv", ["model=smollm2-135m", "length=600", "answer=4"]
    assert main(["bytes", "method=diffkv", *words, f"out={out}"]) == 0
    assert "run=FOLDER" in " ".join(capsys.readouterr().out.split())
    least, most, *_ = lines(out)
    assert [row["method"] for row in (least, most)] == ["diffkv, at least", "diffkv, at most"]
    outcome = Outcome(sample_id="a", kept={"slots_per_tier": [50.0, 25.0], "slot_ratio": 0.75}, ledger={})
    request = Request(sample_id="a", subset="s", segments=((1,),))
    record = RunRecord(method="diffkv", identity={"method": {"_target_": "kvbench.methods.diffkv.DiffKV"}})
    record.hash = hash_identity(record.identity)
    record.save(tmp_path)
    (tmp_path / "samples.jsonl").write_bytes(write_line(journal_record(request, outcome, {}, {}), record.hash))
    assert main(["bytes", *words, f"run={tmp_path}", f"out={out}"]) == 0
    (row,) = lines(out)
    assert row["method"] == "diffkv, as measured"
    assert int(least["resident_bytes"]) < int(row["resident_bytes"]) < int(most["resident_bytes"])


def test_pages_of_a_small_model_are_made_larger_for_a_large_one(tmp_path, capsys):
    """Pages that a run was given may hold no group of a larger model's slots: `auto` takes their place, and says so."""
    store = {"page_bytes": 2048, "budget_bytes": 2**20}
    record = RunRecord(method="full", identity={"method": {"_target_": "kvbench.methods.full.Full"}, "store": store})
    record.hash = hash_identity(record.identity)
    record.save(tmp_path)
    (tmp_path / "samples.jsonl").write_bytes(b"")
    for model, said in (("smollm2-135m", ""), ("llama3-8b", "store.page_bytes=auto")):
        assert main(["bytes", f"run={tmp_path}", "length=64", "answer=8", f"model={model}"]) == 0
        assert said in capsys.readouterr().err


def test_the_table_is_written_where_a_link_leads(tmp_path, capsys):
    """As other commands write what the user named: into the folder that a link names, and through no loop of links."""
    (tmp_path / "link").symlink_to("new/table.csv")
    (tmp_path / "loop").symlink_to("loop")
    assert main(["bytes", "length=64", "answer=8", f"out={tmp_path / 'link'}"]) == 0
    assert (tmp_path / "link").is_symlink() and lines(tmp_path / "new" / "table.csv")
    assert main(["bytes", "length=64", "answer=8", f"out={tmp_path / 'loop'}"]) == 2
    assert (tmp_path / "loop").is_symlink() and "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["method=snapkv,kivi,int4", "method=[snapkv,kivi,int4]"])
def test_several_methods_are_one_table(tmp_path, capsys, method):
    """A list of methods has the rows that each has by itself, with settings that all of them have."""
    out, words = tmp_path / "bytes.csv", ["model=smollm2-135m", "length=300", "answer=2"]
    assert main(["bytes", method, *words, f"out={out}"]) == 0
    whole = lines(out)
    assert [row["method"] for row in whole] == ["snapkv", "kivi", "int4"]
    assert main(["bytes", "method=kivi", *words, f"out={out}"]) == 0
    assert lines(out) == [whole[1]]
    capsys.readouterr()
    assert main(["bytes", method, "method.budget=0.5", *words]) == 2
    assert "there is no setting method.budget" in capsys.readouterr().err
    assert main(["calibrate", "method=snapkv,kivi"]) == 2
    assert "calibrate takes one method, not 2" in capsys.readouterr().err


def test_what_data_decide_has_the_rows_of_others_marked(tmp_path, capsys, monkeypatch):
    """Measured shares lie between least and most, printed ones equal the papers', and both are
    named; an installed package has no study, and says so."""
    out = tmp_path / "bytes.csv"
    words = ["bytes", "method=diffkv", "model=llama3-8b", "length=200", "answer=2", f"out={out}"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    ratios = {row["method"]: float(row["ratio"]) for row in lines(out)}
    assert ratios["diffkv, at least"] < ratios["diffkv, study"] < ratios["diffkv, at most"]
    printed = [float(row["ratio"]) for row in lines(out) if row["method"] == "diffkv, printed"]
    assert printed == pytest.approx([0.176, 0.276], abs=1e-4)
    assert "the repository's study measured of diffkv on smollm2-135m" in said
    assert "the least and the most that DiffKV, Table 1 gives for Llama3-8B, as printed" in said
    monkeypatch.setattr(shipped, "study_folders", list)
    assert main(words) == 0
    assert shipped.ABSENT in " ".join(capsys.readouterr().out.split())
    assert "diffkv, study" not in {row["method"] for row in lines(out)}


def test_a_gguf_file_is_a_model(tmp_path, capsys):
    """The shape is that of the model that a run makes of it; a damaged file is named."""
    path = tmp_path / "small.gguf"
    write_gguf(path, blocks=2)
    assert main(["bytes", f"model={path}", "length=60", "answer=2"]) == 0
    assert "Bytes on small: 2 layers, 2 KV heads of 16 channels" in capsys.readouterr().out
    path.write_bytes(gguf_header(**{"llama.block_count": 2})[:-30])
    assert main(["bytes", f"model={path}"]) == 2
    assert "its header names more than the file holds" in " ".join(capsys.readouterr().err.split())


def test_a_config_json_is_a_model(tmp_path, capsys):
    """A configuration that leaves its windows to transformers, with the folder or the file as the model; one that
    kvbench does not run is refused, and `advise` counts only models whose layers all see everything."""
    fields = {"model_type": "gemma2", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    for model in (file, tmp_path):
        assert main(["bytes", f"model={model}", "length=8192", "answer=2"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"Bytes on {tmp_path.name}: 2 layers, 4 KV heads of 256 channels" in said
        assert "2 more keep their last 4096 tokens" in said
    words = ["advise", f"model={tmp_path}", "context=2k", "margin=0.01", f"results_dir={tmp_path}"]
    assert main(words) == 2
    assert f"not all of {tmp_path.name} do" in " ".join(capsys.readouterr().err.split())
    file.write_text(json.dumps({"model_type": "bert", "num_hidden_layers": 1}))
    for command in (words, ["bytes", f"model={file}"]):
        assert main(command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "kvbench does not run this model" in said and "use a model with" in said
    fields |= {"model_type": "llama", "num_attention_heads": 4, "intermediate_size": 64}
    file.write_text(json.dumps(fields))
    assert main([*words, "methods=int8"]) == 0
    assert "int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["model=llama3-9b"], "model=llama3-9b does not exist. Did you mean llama3-8b"),
        (["length=0"], "length=0 must be a whole number of tokens from 1"),
        (["length=64"], "answer=64 must be a whole number of tokens from 0 to 63"),
        (["batch=0"], "batch=0 must be"),
        (["method=duo_attention"], "gates belong to one model"),
        (["run=nowhere"], "run=nowhere holds no run.json"),
    ],
)
def test_a_wrong_setting_is_named(words, match, capsys):
    """Each mistake is one message that says what is allowed."""
    assert main(["bytes", *words]) == 2
    assert match in capsys.readouterr().err


def test_the_lines_of_an_answer_are_the_ledger_s(tiny_model):
    """Bytes held at a point are those that a run of a real model has there, and bytes read those of its steps: Quest,
    H2O and SnapKV at half of what was seen hold or read about half of what the full cache does, all along."""
    loaded, prompt, answer = tiny_model("llama", "gqa3", 64), 100, 40
    shape = model_shape(loaded.model)
    by_method = {}
    for name in ("full", "quest read_budget=50%seen dense_layers=0", "h2o budget=50%seen", "snapkv budget=50%seen"):
        policy = choices.make_method(name)
        lines = along.lines_of(name, policy, shape, prompt, answer, StoreOptions())
        assert [line.is_read for line in lines] == [False, True][: len(lines)]
        assert lines[0].tokens == [*range(answer + 1)]
        by_method[name.split()[0]] = lines
        seen, read = [], [0.0]

        def look(running, step, seen=seen, read=read):
            if running.store.counters.seen[0] > prompt:
                seen.append((running.store.counters.seen[0] - prompt, running.store.ledger.row_bytes(0)))
                read.append(running.store.ledger.meters[0].read_bytes)

        requests = [request("0", random_tokens(prompt), max_new_tokens=answer)]
        answers(loaded, policy, requests, on_step=look)
        assert len(seen) > answer // 2
        # Tables of a run have room for the whole answer, those of a point for its part of it.
        assert {at: lines[0].counts[at] for at, _ in seen} == pytest.approx(dict(seen), abs=400)
        for line in lines[1:]:
            assert list(line.counts)[: len(seen)] == [b - a for a, b in zip(read, read[1:], strict=False)]
    full, (_, reads) = by_method["full"][0], by_method["quest"]
    for line in (*by_method["h2o"], *by_method["snapkv"], reads):
        for at, count in zip(line.tokens, line.counts, strict=True):
            least = (prompt + at) // 2 - 2 * 16  # pages read are rounded down, and the newest may have one token
            assert shape.fp16_bytes(least) < count < full.counts[at]


def test_a_picture_of_an_answer(tmp_path, capsys):
    """Settings of each method, one line named for each, the least and the most where the text decides."""
    out, picture = tmp_path / "t.csv", tmp_path / "a.svg"
    words = ["bytes", "model=smollm2-135m", "length=100", "answer=4", f"picture={picture}"]
    assert main([*words, 'methods=["snapkv budget=0.5","snapkv budget=50%seen",diffkv]', f"out={out}"]) == 0
    assert picture.read_bytes().startswith(b"<?xml") and str(picture) in "".join(capsys.readouterr().out.split())
    assert [line["method"] for line in lines(out)][:2] == ["snapkv budget=0.5", "snapkv budget=50%seen"]
    shape = find_shape("smollm2-135m").store_shape
    drawn = along.lines_of("diffkv", choices.make_method("diffkv"), shape, 280, 1, StoreOptions())
    assert [line.name for line in drawn] == ["diffkv, at least", "diffkv, at most"]
    for wrong, match in (("picture=a.txt", "must end with .png"), ("answer=0", "answer=0 has no steps")):
        assert main([*words, wrong]) == 2
        assert match in capsys.readouterr().err
    assert main([*words, "methods=[snapkv budgte=0.5]"]) == 2
