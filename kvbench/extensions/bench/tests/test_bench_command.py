"""The `bench` command: settings, help, the files it writes, and reading them again."""

import dataclasses
import json

import pytest

from kvbench.cli import commands
from kvbench.cli.main import main
from kvbench.extensions.bench import command, show
from kvbench.kernels.bench import bench, machine
from kvbench.show.picture import legend_below

SMALL = "what=attention attention.shapes=[6x2x64] attention.lengths=[96] attention.batches=[1] rounds=2".split()
SMALL += ["attention.formats=[K16V16,K4V2]", "attention.dense=[fp32]", "working_set_mb=1", "max_buffers=2"]
SMALL += ["threads=[1]", "kernels=torch"]


@pytest.fixture
def measured(tmp_path, monkeypatch, capsys):
    """A result of the smallest bench: its folder and what was printed."""
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)
    assert main(["bench", *SMALL, f"out={tmp_path / 'out'}"]) == 0
    (folder,) = (tmp_path / "out" / "attention").iterdir()
    return folder, capsys.readouterr()


@pytest.mark.smoke
def test_bench_writes_numbers_table_and_picture(measured):
    """bench.json checks and says where it comes from, bench.txt is what was printed, bench.png is a picture."""
    folder, printed = measured
    document = bench.read_document(folder / "bench.json")
    assert document["what"] == "attention" and set(document["provenance"]) == {"commit", "dirty", "harness"}
    assert document["settings"]["lengths"] == [96] and document["environment"]["load_average"] is not None
    table = (folder / "bench.txt").read_text()
    assert "K4V2 + scores" in table and "load average" in table
    assert table.split() == printed.out.split()[: len(table.split())]
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "attention: 0/3 rounds: shape 6x2x64" in printed.err


def test_a_stored_result_can_be_shown(measured, capsys):
    """load= draws table and picture from the numbers and measures nothing."""
    folder, _ = measured
    picture = (folder / "bench.png").read_bytes()
    (folder / "bench.png").unlink()
    assert main(["bench", f"load={folder / 'bench.json'}"]) == 0
    assert "K4V2 + scores" in capsys.readouterr().out
    assert "CPU seconds of one thread" not in (folder / "bench.txt").read_text()
    document = bench.read_document(folder / "bench.json")
    document["settings"]["clock"] = "cpu"
    (folder / "other.json").write_text(json.dumps(document))
    assert main(["bench", f"load={folder / 'other.json'}"]) == 0
    assert "CPU seconds of one thread" in capsys.readouterr().out
    assert (folder / "bench.png").read_bytes() == picture


def test_refused_variants_give_exit_code_1(measured, tmp_path, monkeypatch, capsys):
    """A wrong kernel is named on the screen and the command says that something was wrong."""
    from kvbench.kernels.bench import attention

    monkeypatch.setattr(attention, "TOLERANCE", {"cpu": 0.0})
    assert main(["bench", *SMALL, f"out={tmp_path / 'again'}"]) == 1
    assert "K4V2 at shape 6x2x64, length 96, batch 1, threads 1 wrong: error" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_bench_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    """Every cell is on the disk as soon as it is measured, and in the table that a signal leaves; the same command
    measures the others alone, into the same folder, and after that it measures anew."""
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)
    words = ["bench", *SMALL, "attention.lengths=[96,32,64]", f"out={tmp_path / 'out'}"]
    measured, real = [], bench.Bench._measured

    def stopped(self, cell):
        if len(measured) == 2:
            measured.append(None)
            raise KeyboardInterrupt
        measured.append(cell["length"])
        return real(self, cell)

    monkeypatch.setattr(bench.Bench, "_measured", stopped)
    assert main(words) == 130
    captured = capsys.readouterr()
    assert "length 96" in captured.out and "length 32" in captured.out and "length 64" not in captured.out, captured.out
    assert "every finished cell is kept. To go on: " in captured.err
    (path,) = (tmp_path / "out" / "attention").glob("*/bench.json")
    assert (bench.read_document(path)["left"], measured) == (1, [96, 32, None])
    assert main(["bench", f"load={path}"]) == 0
    before = bench.read_document(path)["cells"]
    assert main(words) == 0
    document = bench.read_document(path)
    assert measured[3:] == [64] and document["left"] == 0 and document["cells"][:2] == before
    assert main(words) == 0
    assert measured[4:] == [96, 32, 64] and len(list((tmp_path / "out" / "attention").iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["what=decoding"], "what=decoding does not exist."),
        (["quick=2"], "quick=2 is neither true nor false"),
        (["what=attention", "attention.batches=[0]"], "batches=0 must be"),
        (["what=attention", "clock=cpu", "threads=[2]"], "clock=cpu counts one thread"),
        (["load=x.json"], "not a document of kvbench bench"),
        (["load=/nowhere/bench.json"], "load=/nowhere/bench.json cannot be read"),
        (["attention.length=3"], "attention.lengths"),
    ],
)
def test_user_errors_are_one_line(words, message, capsys, tmp_path, monkeypatch):
    """Every wrong setting ends before anything is measured, with exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text(json.dumps({"schema": 1}))
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_time_left_follows_from_the_last_rounds(monkeypatch, capsys):
    """From the first round on; a long wait before it, until a bench says that it begins, does not count."""
    clock = {"now": 0.0}
    monkeypatch.setattr(show.time, "monotonic", lambda: clock["now"])
    with show.rounds_shown("decode") as update:
        update(0, 20, "loading")
        clock["now"] = 997.0
        update(0, 20, "first round")
        for done, now in ((1, 1000.0), (2, 1002.0), (3, 1004.0), (9, 1016.0)):
            clock["now"] = now
            update(done, 20, f"round {done}")
        for done in range(10, 18):
            clock["now"] += 2.0
            update(done, 20, f"round {done}")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["decode: 0/20 rounds: loading", "decode: 0/20 rounds: first round"]
    assert lines[2] == "decode: 1/20 rounds, 57 s left: round 1"
    assert lines[-1] == "decode: 17/20 rounds, 6 s left: round 17"


def test_quick_leaves_what_the_user_sets():
    """A value that differs from the default is kept, for settings of one bench and for those of all."""
    words = ["quick=true", "attention.lengths=[128,256]", "rounds=7"]
    settings = command.settings_of(commands.compose_command("bench", words), "attention")
    assert settings.lengths == [128, 256] and settings.rounds == 7 and settings.batches == [1]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", command.MODULES)
def test_quick_and_defaults_fit_the_modules(name):
    """The YAML's defaults are the module's own, and every quick value is a setting that passes its check."""
    settings = command.settings_of(commands.compose_command("bench", []), name)
    assert settings == type(settings)()
    quick = command.settings_of(commands.compose_command("bench", ["quick=true", "seed=5"]), name)
    assert quick.seed == 5 and set(quick.quick) <= {item.name for item in dataclasses.fields(quick)}
    assert all(getattr(quick, key) == value for key, value in quick.quick.items())
    assert quick.rounds < settings.rounds


def test_no_two_of_many_variants_look_alike():
    """Colour and marker together tell more variants apart than there are colours."""
    styles = [tuple(show._style(index).values()) for index in range(2 * len(show.COLOURS))]
    assert len(set(styles)) == len(styles)


@pytest.mark.parametrize(("letters", "columns"), [(4, 9), (34, 2), (70, 1)])
def test_a_legend_lies_within_its_picture(letters: int, columns: int):
    """Names as long as methods with settings are stand in fewer columns than short ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), dpi=130, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    for index in range(10):
        axes.plot([0], [index], "o", label=(f"{index} snapkv budget=0.25, streamed " * 3)[:letters])
    legend_below(figure, 8)
    canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width
    assert figure.legends[0]._ncols == columns
