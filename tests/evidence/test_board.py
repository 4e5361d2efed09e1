"""A board of submitted folders: what does not fit in one is named, and such a folder ranks nowhere."""

import json
import re
import shutil

import pytest
from stored import flips, store, yes_no

from kvbench.cli.main import main
from kvbench.config.code import hash_files
from kvbench.config.files import conf_folder
from kvbench.config.settings import read_config
from kvbench.evidence import submission
from kvbench.results.identity import hash_identity
from kvbench.results.record import RunRecord
from kvbench.results.sample import seal_of
from kvbench.results.writing import encode_line

SCORES = yes_no(0.8, {"a": 20, "b": 20}, seed=1)
TASK = {"gold": lambda number: (f"the {number}",)}


def target(method):
    """The class of one of kvbench's methods."""
    return {"_target_": read_config(conf_folder() / "method" / f"{method}.yaml")["_target_"]}


def seal(folder):
    """Write `submission.json` for what lies in a folder."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    hashes = {name: submission.digest_of(folder / name) for name in names if name != submission.NAME}
    modules = {"toy": {"toy": "code/toy.py"}}
    (folder / submission.NAME).write_bytes(submission.write("quick", ["toy"], modules, hashes))


def submitted(root, name, lost=4, ratio=0.3, **changes):
    """A folder with full, random and a method of its author's, which loses some answers; gives it."""
    folder = root / name
    (folder / "code" / "method").mkdir(parents=True)
    (folder / "code" / "toy.py").write_text("class Toy:\n    pass\n")
    (folder / "code" / "method" / "toy.yaml").write_text("_target_: toy.Toy\n")
    code = hash_files({"toy": folder / "code" / "toy.py"})
    more = TASK | changes
    runs = [store(folder, "full", SCORES, ratio=1.0, settings=target("full"), **more)]
    runs += [
        store(folder, "random", flips(SCORES, 15, 0), ratio=held, settings=target("random") | {"budget": held}, **more)
        for held in (0.25, 0.5)
    ]
    mine = {"_target_": "toy.Toy", "share": ratio}
    runs += [store(folder, "toy", flips(SCORES, lost, 0), ratio=ratio, settings=mine, method_code=code, **more)]
    for run in runs:
        change(run, sealed=True)
    seal(folder)
    return folder


def change(run, **fields):
    """Edit run.json, whose identity may then be another's."""
    path = run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def of(folder, method):
    """The run of a method."""
    return next(folder.glob(f"toy/tiny/{method}/*"))


def lines(run, edit):
    """Change the lines of a run's samples."""
    path = run / "samples.jsonl"
    path.write_bytes(b"\n".join(edit(path.read_bytes().splitlines())) + b"\n")


def edit_score(folder):
    """A wrong answer becomes right."""
    lines(of(folder, "toy"), lambda old: [line.replace(b'"exact":0.0', b'"exact":1.0') for line in old])


def strip_seals(folder):
    """No line has a seal, and run.json says so."""
    lines(of(folder, "toy"), lambda old: [re.sub(rb',"seal":"\w+"', b"", line) for line in old])
    change(of(folder, "toy"), sealed=False)


def edit_identity(folder):
    """Another setting of the method."""
    record = RunRecord.load(of(folder, "toy"))
    change(of(folder, "toy"), identity=record.identity | {"method": record.identity["method"] | {"share": 0.1}})


def edit_identity_and_hash(folder):
    """The same, with the hash that follows, where it was."""
    record = RunRecord.load(of(folder, "toy"))
    identity = record.identity | {"method": record.identity["method"] | {"share": 0.1}}
    change(of(folder, "toy"), identity=identity, hash=hash_identity(identity))


def take_out(folder):
    """A wrong answer is gone."""
    lines(of(folder, "toy"), lambda old: [line for line in old if b'"sample_id":"a/3"' not in line])


def take_out_and_count(folder):
    """The same, with numbers and counts that follow."""
    take_out(folder)
    shutil.rmtree(of(folder, "toy"))
    code = hash_files({"toy": folder / "code" / "toy.py"})
    fewer = {"a": SCORES["a"][1:], "b": SCORES["b"]}
    settings = {"_target_": "toy.Toy", "share": 0.3}
    change(store(folder, "toy", fewer, ratio=0.3, settings=settings, method_code=code, **TASK), sealed=True)


def swap_run(folder):
    """The run.json of another run."""
    shutil.copy(of(folder, "random") / "run.json", of(folder, "toy") / "run.json")


def edit_metric(folder):
    """The score in run.json alone."""
    record = RunRecord.load(of(folder, "toy"))
    record.metrics["exact"].value = 1.0
    record.save(of(folder, "toy"))


def rename(folder):
    """The full cache's run under the method's name."""
    shutil.rmtree(of(folder, "toy"))
    shutil.copytree(of(folder, "full"), folder / "toy" / "tiny" / "toy" / of(folder, "full").name)
    change(of(folder, "toy"), method="toy")


def edit_code(folder):
    """Other code than what ran."""
    (folder / "code" / "toy.py").write_text("class Toy:\n    cheats = True\n")


def no_random(folder):
    """Nothing to compare chance with."""
    shutil.rmtree(folder / "toy" / "tiny" / "random")


def add_twice(folder):
    """A right answer counts twice."""
    lines(of(folder, "toy"), lambda old: [*old, old[0]])


TAMPERED = {
    edit_score: "toy/tiny/toy/.*: line 2 of samples.jsonl: edited line, or line of another run",
    strip_seals: "run.json says that its lines have no seals",
    edit_identity: "was edited: its identity is not the one that its hash",
    edit_identity_and_hash: "run.json is of another run, which belongs into toy/tiny/toy/",
    take_out: "samples.jsonl has 39 of the 40 answers of its run",
    take_out_and_count: "toy .* has 39 answers and full has 40",
    swap_run: "run.json is of another run, which belongs into toy/tiny/random/",
    edit_metric: "the metric exact of run.json is not what its samples give",
    rename: "run.json calls its method toy, and its identity has another class than toy.Toy",
    edit_code: "the files in code/ are not the code of toy that ran",
    no_random: "toy with tiny: no run of random is beside",
    add_twice: "line 41 of samples.jsonl: a sample that is there already",
}


def test_a_folder_in_which_all_fits(tmp_path):
    """It has no fault, packed or not; whatever is edited without its hash is named, and so is what is not listed."""
    folder = submitted(tmp_path, "good")
    assert not submission.check(folder).faults
    edit_score(folder)
    (folder / "more.txt").write_text("x")
    (folder / "link").symlink_to("/etc/hostname")
    faults = submission.check(folder).faults
    name = (of(folder, "toy") / "samples.jsonl").relative_to(folder).as_posix()
    assert f"{name} is not the file that submission.json has the hash of" in faults
    assert {"more.txt is not in submission.json", "link is not in submission.json"} <= set(faults)
    (folder / submission.NAME).unlink()
    assert submission.check(folder).faults == ["has no submission.json; `kvbench submit` writes it"]


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_each_kind_of_tampering_is_named(tmp_path, tamper):
    """Also where every hash of a file was made anew behind it."""
    folder = submitted(tmp_path, "bad", lost=8)
    tamper(folder)
    seal(folder)
    faults = submission.check(folder).faults
    assert any(re.search(TAMPERED[tamper], fault) for fault in faults), faults


def test_what_no_seal_can_tell(tmp_path):
    """Who makes every seal, number and hash anew hands in another folder, in which all fits: the page says so."""
    folder = submitted(tmp_path, "forged", lost=8)
    run = of(folder, "toy")
    record = RunRecord.load(run)

    def forge(line):
        content = json.loads(line.replace(b'"exact":0.0', b'"exact":1.0'))
        del content["seal"]
        return encode_line(content | {"seal": seal_of(content, record.hash)})[:-1]

    lines(run, lambda old: list(map(forge, old)))
    record.metrics["exact"].value = 1.0
    record.save(run)
    seal(folder)
    assert not submission.check(folder).faults


def rows_of(page):
    """Method -> the cells of its row in the first table, as texts."""
    first = page.split("<section")[1]
    found = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', first, re.S)
    return {name: re.findall(r"<td[^>]*>(.*?)</td>", cells) for name, cells in found}


def test_a_board_of_three_folders(tmp_path, capsys):
    """The tampered one is named and ranks nowhere; of the others, who holds no more and loses less is before."""
    inbox = tmp_path / "inbox"
    submitted(inbox, "careful", lost=2, ratio=0.4)
    submitted(inbox, "thrifty", lost=6, ratio=0.3, started="2026-02-01T00:00:00+00:00")
    take_out(submitted(inbox, "bad<b>", lost=0, ratio=0.2))
    out = tmp_path / "board.html"
    command = ["board", str(inbox), f"out={out}", "resamples=200"]
    assert main(command) == 0
    page = out.read_text()
    assert "bad&lt;b&gt; ranks nowhere: this does not fit" in page and "<b>" not in page
    assert "samples.jsonl has 39 of the 40 answers of its run" in page
    rows = rows_of(page)
    places = {name: (float(cells[-5]), cells[0]) for name, cells in rows.items()}  # mean difference, place
    assert places == {
        "random budget=0.25": (-37.5, "1"),
        "toy share=0.3": (-15.0, "1"),
        "toy share=0.4": (-5.0, "1"),
        "random budget=0.5": (-37.5, "3"),
    }
    assert rows["random budget=0.25"][1] == "kvbench&#39;s own, in 2 folders" and rows["toy share=0.4"][1] == "careful"
    assert rows["toy share=0.3"][-2] == "-37.5 at 25.0"
    shutil.copytree(inbox / "careful", inbox / "zcopy")
    assert main([*command[:2], f"out={tmp_path / 'copy.html'}", "resamples=200"]) == 0
    assert "zcopy: 1 things do not fit\n! is a copy of careful" in capsys.readouterr().out
    shutil.rmtree(inbox / "zcopy")
    assert main(command) == 0
    assert "Folders: 3." in page and "rank nowhere: 1." in page
    said = capsys.readouterr().out
    assert "bad<b>: 5 things do not fit" in said and "careful: fits, 4 runs" in said
    first = out.read_bytes()
    assert main(command) == 0 and out.read_bytes() == first
