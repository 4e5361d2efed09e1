"""A folder of runs whose frontier is drawn, and the figures of its panel."""

import itertools
import shutil

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from stored import command_settings, flips, store, yes_no

from kvbench.evidence import frontier_figure
from kvbench.evidence.drawing import STYLE, Drawing
from kvbench.evidence.load import load_groups
from kvbench.evidence.one_panel import Look
from kvbench.evidence.pareto import panels_of

LOOK = Look()
SCORES = yes_no(0.8, {"a": 40, "b": 40}, seed=1)


def settings(root, *words):
    """The settings of `kvbench report view=pareto`."""
    return command_settings("pareto", root, "resamples=300", *words)


def panel_of(root, *words):
    """The one panel of a results folder."""
    cfg = settings(root, *words)
    (panel,) = panels_of(load_groups(cfg), cfg)
    return panel


def figure_of(panel, layout="panels", look=LOOK):
    """The figure of a panel by resident bytes, drawn."""
    with rc_context(STYLE):
        made = frontier_figure.LAYOUTS[layout](Drawing(panel, "resident"), look)
        FigureCanvasAgg(made).draw()
    return made


def boxes_of(axes):
    """The places of the names beside a panel, from below, without the lines that tie them to their points."""
    return sorted((Text.get_window_extent(text) for text in axes.texts), key=lambda box: box.y0)


def overlap(boxes):
    """Two neighbours touch by more than a pixel."""
    return any(below.y1 > above.y0 + 1 for below, above in itertools.pairwise(boxes))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The full cache twice, and methods of every kind; one is cheap and bad, one dear and bad."""
    root = tmp_path_factory.mktemp("sweep")
    store(root, "full", SCORES, ratio=1.0, tiers=(100,), bits=16)
    store(root, "full", flips(SCORES, 2, 1), ratio=1.0, tiers=(100,), bits=16, batch_size=8)
    store(root, "fp8", SCORES, ratio=0.5, tiers=(100,), seconds=0.2)
    store(root, "good", flips(SCORES, 1, 1), ratio=0.4, settings={"budget": 0.4})
    store(root, "good", flips(SCORES, 8, 0), ratio=0.2, settings={"budget": 0.2})
    store(root, "dear", flips(SCORES, 24, 0), ratio=0.7)
    store(root, "close", flips(SCORES, 2, 1), ratio=0.45)
    return root


@pytest.fixture
def sweep(stored, tmp_path):
    """A copy of these runs, to which a test may add."""
    return shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
