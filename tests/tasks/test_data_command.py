"""`python -m kvbench data`: fetching from a hub that is a local server, and checking files at hand."""

import gzip
import hashlib
import http.server
import io
import json
import threading
import urllib.parse
import zipfile
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from longbench_rows import row, write
from places import DATA, need_data
from problem_rows import AIME, CODE, FILES, GSM8K
from refusals import refused

from kvbench.cli.main import main
from kvbench.models import files as model_files
from kvbench.tasks import data_files
from kvbench.tasks.fetch import Fetch

COMMIT = "c" * 40
# Task -> the files of the benchmark data, without `.jsonl`, that some test reads.
READ_BY_TESTS = {
    "longbench": {"trec"},
    "gsm8k": {"train", "test"},
    "math500": {"test"},
    "aime24": {"test"},
    "humaneval_plus": {"humanevalplus"},
}


class Hub:
    """The four answers of the hub that a download needs, from a dict of files.

    Args:
        files: (repository, path) -> content; a path that ends in .parquet or .zip is stored as a large file.
    """

    def __init__(self, files: dict[tuple[str, str], bytes]) -> None:
        self.files, self.asked, self.lie = files, [], False
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def reply(self, body: bytes, status: int = 200, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.asked.append((self.command, self.path))
                parts = self.path.split("?")[0].strip("/").split("/")
                if parts[:2] == ["api", "datasets"]:
                    repo = "/".join(parts[2:4])
                    names = [path for owner, path in hub.files if owner == repo]
                    if parts[4:5] == ["tree"]:
                        return self.reply(json.dumps([hub.entry(repo, path)[0] for path in names]).encode())
                    info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": path} for path in names]}
                    return self.reply(json.dumps(info).encode(), 200 if names else 404)
                if parts[:1] == ["datasets"] and parts[3:4] == ["resolve"]:
                    content = hub.files.get(("/".join(parts[1:3]), "/".join(parts[5:])))
                    if content is not None:
                        etag = f'"{hashlib.sha256(content).hexdigest()}"'
                        return self.reply(content, ETag=etag, X_Repo_Commit=COMMIT)
                return self.reply(b"", 404, X_Error_Code="EntryNotFound") if parts != [""] else self.reply(b"")

            def do_POST(self) -> None:
                wanted = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
                repo = "/".join(self.path.strip("/").split("/")[2:4])
                self.reply(json.dumps([i for path in wanted for i in hub.entry(repo, path)]).encode())

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def entry(self, repo: str, path: str) -> list[dict]:
        """What the hub states about a file; another file's hash when it is to lie."""
        content = self.files.get((repo, path))
        if content is None:
            return []
        stated = content + b"!" if self.lie else content
        blob = hashlib.sha1(b"blob %d\0" % len(stated) + stated).hexdigest()
        entry = {"type": "file", "path": path, "size": len(content), "oid": blob}
        if not path.endswith(".jsonl"):
            entry["lfs"] = {"oid": hashlib.sha256(stated).hexdigest(), "size": len(content), "pointerSize": 134}
        return [entry]


def lines(*rows: dict) -> bytes:
    """Rows as the bytes of a jsonl file."""
    return b"".join(json.dumps(item).encode() + b"\n" for item in rows)


def parquet(*rows: dict) -> bytes:
    """Rows as the bytes of a Parquet file."""
    return pandas.DataFrame(rows).to_parquet(index=False)


def archive(**members: bytes) -> bytes:
    """Files as the bytes of the official archive."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as opened:
        for name, content in members.items():
            opened.writestr(f"data/{name}.jsonl", content)
    return stream.getvalue()


@pytest.fixture(scope="module")
def benchmarks() -> dict[tuple[str, str], bytes]:
    """Gives AIME as jsonl and Parquet, GSM8K as Parquet, and two subsets of LongBench in its archive."""
    subset = archive(trec=lines(*[row(all_classes=["Food"], answers=["Food"])] * 200), qasper=lines(*[row()] * 199))
    return {
        ("math-ai/aime25", "test.jsonl"): lines(*[AIME] * 30),
        ("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet"): parquet(*[AIME] * 30),
        ("openai/gsm8k", "main/test-00000-of-00001.parquet"): parquet(*[GSM8K] * 1319),
        ("openai/gsm8k", "main/train-00000-of-00001.parquet"): parquet(*[GSM8K] * 7473),
        ("THUDM/LongBench", "data.zip"): subset,
        ("zai-org/LongBench", "lcc/test-00000-of-00001.parquet"): parquet(*[row(all_classes=None)] * 500),
        ("cais/mmlu", "README.md"): b"# x\n",
        ("cais/mmlu", "abstract_algebra/test-00000-of-00001.parquet"): parquet({"question": "x"}),
    }


@pytest.fixture
def hub(tmp_path, monkeypatch, benchmarks):
    """Gives a hub with the benchmarks, to which a test may add."""
    from huggingface_hub import constants

    made = Hub(dict(benchmarks))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", made.address)
    template = made.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hubcache"))
    yield made
    made.server.shutdown()


@pytest.mark.every(2)
@pytest.mark.parametrize("task", ["aime24", "aime25", "gsm8k"])
def test_fetch_once_then_check(hub, tmp_path, capsys, task) -> None:
    """A benchmark comes as JSON lines with a note of its hashes; a second fetch asks the hub for nothing."""
    folder = tmp_path / "data"
    assert main(["data", f"task={task}", f"to={folder}"]) == 0
    assert "All good. Use it with" in capsys.readouterr().out
    noted = json.loads((folder / "kvbench-data.json").read_text())["files"]
    for name, item in noted.items():
        assert item["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert item["source"].endswith(f"at {COMMIT}")
    asked = len(hub.asked)
    assert main(["data", f"task={task}", f"to={folder}"]) == 0
    assert len(hub.asked) == asked
    assert main(["data", f"task={task}", f"check={folder}"]) == 0
    changed = folder / sorted(noted)[0]
    changed.write_bytes(changed.read_bytes().replace(b"a", b"e", 1))
    assert main(["data", f"task={task}", f"check={folder}"]) == 1
    assert "changed since it was fetched" in capsys.readouterr().out
    assert main(["data", f"task={task}", f"to={folder}"]) == 0  # and is fetched again


def test_fetched_files_run(hub, tmp_path, tiny_model) -> None:
    """What was fetched is what the task reads."""
    from kvbench.tasks import load_task

    assert main(["data", "task=longbench", "task.subsets=[trec]", f"to={tmp_path / 'lb'}"]) == 0
    cfg = {"name": "longbench", "subsets": "trec", "data_dir": str(tmp_path / "lb")}
    assert len(load_task(cfg, tiny_model(), limit=None, seed=0).requests) == 200


def test_an_archive_with_too_few_rows_or_without_a_subset(hub, tmp_path, capsys) -> None:
    """Counts are checked after fetching; a subset is taken from the archive or else from its own file."""
    assert main(["data", "task=longbench", "task.subsets=[qasper]", f"to={tmp_path}"]) == 1
    assert "199 of 200 rows" in capsys.readouterr().out
    assert main(["data", "task=longbench", "task.subsets=[lcc]", f"to={tmp_path}"]) == 0
    assert main(["data", "task=longbench", "task.subsets=[musique]", f"to={tmp_path}"]) == 2
    assert "it has no musique.jsonl" in capsys.readouterr().err


def test_a_file_that_is_not_what_the_hub_states(hub, tmp_path, capsys) -> None:
    """A wrong hash stops the fetch; nothing is written."""
    hub.lie = True
    for task in ("aime24", "aime25"):
        assert main(["data", f"task={task}", f"to={tmp_path / task}"]) == 2
        assert "the hub states" in capsys.readouterr().err
        assert not list((tmp_path / task).iterdir())


def test_a_copy_of_a_repository(hub, tmp_path, capsys) -> None:
    """Tasks of lm-eval take a whole repository; its files are checked against the note."""
    folder = tmp_path / "mmlu"
    assert main(["data", "task=mmlu", f"to={folder}"]) == 0
    assert main(["data", "task=mmlu", "task.name=mmlu_anatomy", f"check={folder}"]) == 0
    (folder / "README.md").write_text("other")
    (folder / "abstract_algebra/test-00000-of-00001.parquet").unlink()
    assert main(["data", "task=mmlu", f"check={folder}"]) == 1
    shown = capsys.readouterr().out
    assert "missing" in shown and "changed since it was fetched" in shown
    assert main(["data", "task=mmlu", f"check={tmp_path}"]) == 2
    assert "has no kvbench-data.json to compare with" in capsys.readouterr().err


def test_the_release_file_of_evalplus(tmp_path, monkeypatch, capsys) -> None:
    """What is not on the hub comes from its own address, unpacked."""
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(lines(*[CODE] * 164)))
    (file,) = data_files({"name": "humaneval_plus"})
    fetch = Fetch("humaneval_plus", tmp_path / "to", Path.write_bytes, lambda text: None)
    fetch.files([replace(file, url=packed.as_uri())])
    assert main(["data", "task=humaneval_plus", f"check={tmp_path / 'to'}"]) == 0
    with refused("data-missing", None, "HumanEvalPlus.jsonl.gz"):
        replace(fetch, folder=tmp_path / "other").files([replace(file, url=(tmp_path / "no").as_uri())])


@pytest.mark.parametrize("task", ["longbench", "gsm8k", "mmlu"])
def test_without_a_network_nothing_is_asked_for(task, tmp_path, capsys, monkeypatch) -> None:
    """The reason and what to do instead; the hub's own client, which retries for half a minute, is not called."""
    import huggingface_hub
    from huggingface_hub import constants

    for name in ("HfApi", "hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, lambda *given, name=name, **named: pytest.fail(f"{name} was called"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["data", f"task={task}", f"to={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert "the hub cannot be reached (it does not answer from this machine)" in error and "copy the folder" in error
    assert not model_files.hub_reachable()


@pytest.mark.parametrize("task", sorted(FILES))
def test_broken_rows_are_named_by_file_and_line(task, tmp_path, capsys) -> None:
    """Too few rows, and each broken one with its reason; nothing else is in the way."""
    stem, good = FILES[task]
    path = write(tmp_path / f"{stem}.jsonl", good, b"{broken", good, b'{"x": 1}')
    subsets = ["task.subjects=[algebra]"] if task == "math" else []
    assert main(["data", f"task={task}", *subsets, f"check={tmp_path}"]) == 1
    shown = capsys.readouterr().out
    assert f"{path}:2: not JSON" in shown and f"{path}:4: field" in shown
    assert "2 of " in shown.replace("\n", " ") or task == "gsm8k"
    if task == "math500":  # more rows than the benchmark has are not the benchmark
        write(path, *[good] * 501)
        assert main(["data", f"task={task}", f"check={tmp_path}", "partial=true"]) == 1
        assert "501 rows, the benchmark has 500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=gsm8k"], "give one of to=FOLDER"),
        (["task=gsm8k", "to=a", "check=b"], "give one of to=FOLDER"),
        (["check=."], "which benchmark?"),
        (["task=longctx", "check=."], "task=longctx has no files that this command knows"),
        (["task=gsm8k", "check=/nowhere"], "check=/nowhere is not a folder"),
        (["task=gsm9k", "check=."], "Did you mean gsm8k?"),
    ],
)
def test_wrong_settings(words, message, capsys) -> None:
    """One message each."""
    assert main(["data", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("task", [pytest.param(name, marks=need_data(name)) for name in READ_BY_TESTS])
def test_the_files_at_hand(task, capsys) -> None:
    """Whatever real parts of a benchmark are here have no fault as parts, and are the whole when no row is missing."""
    words = ["data", f"task={task}", f"check={DATA / task}"]
    assert main([*words, "partial=true"]) == 0
    paths = [(file, DATA / task / f"{file.name}.jsonl") for file in data_files({"name": task})]
    contents = [(file, path.read_bytes() if path.is_file() else b"") for file, path in paths]
    whole = all(len(content.strip().split(b"\n")) == file.rows for file, content in contents)
    assert main(words) == (0 if whole else 1)
    official = any(hashlib.sha256(content).hexdigest() == file.official for file, content in contents)
    assert ("the authors' own file" in capsys.readouterr().out) is official


def test_the_data_command_writes_what_the_tests_read() -> None:
    """The command that a skipped test names fetches the file that the test misses."""
    reason = need_data("gsm8k/no-such-file.jsonl").kwargs["reason"]
    assert f"`python -m kvbench data task=gsm8k to={DATA / 'gsm8k'}`" in reason
    for task, names in READ_BY_TESTS.items():
        assert names <= {file.name for file in data_files({"name": task})}
