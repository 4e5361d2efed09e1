"""The pictures of benches: nothing that is said in them lies beyond their edges."""

import pytest

from kvbench.bench import plot


@pytest.mark.parametrize(("letters", "fit"), [(4, 5), (34, 2), (70, 1)])
@pytest.mark.parametrize("columns", [2, 5])
def test_a_legend_lies_within_its_picture(letters: int, fit: int, columns: int):
    """Names as long as methods with settings are stand in fewer columns than short ones."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), dpi=130, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    for index in range(10):
        axes.plot([0], [index], "o", label=(f"{index} snapkv budget=0.25, streamed " * 3)[:letters])
    plot._legend(figure, columns)
    canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width
    assert figure.legends[0]._ncols == min(columns, fit)
