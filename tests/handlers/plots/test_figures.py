"""The contents of figures, read from the matplotlib objects and from the files."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.handlers.loggers.pictures import picture_of
from pulsetrain.handlers.plots import figures
from pulsetrain.handlers.plots.curves import MAX_POINTS, Curve, Point, thinned
from pulsetrain.handlers.plots.figures import COUNTED_CLASSES, Panel, confusion_matrix, matrix

NAN, INF = math.nan, math.inf


def one_panel(**curves):
    return figures.curves([Panel("loss", "loss", curves, frozenset(set(curves) - {"train"}))])


def lines(figure):
    """The curves, without the marks at the edge."""
    (axes,) = figure.axes
    return [line for line in axes.lines if line.get_transform() == axes.transData]


def edge_marks(figure):
    (axes,) = figure.axes
    marks = [line for line in axes.lines if line.get_transform() != axes.transData]
    return [(mark.get_marker(), list(mark.get_xdata())) for mark in marks]


def legend(figure):
    return [text.get_text() for each in figure.legends for text in each.texts]


def test_a_curve_goes_through_its_points():
    (line,) = lines(one_panel(train=[(1, 3.0), (5, 2.0)]))
    assert line.get_xydata().tolist() == [[1.0, 3.0], [5.0, 2.0]]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((1.0, 99.0), "linear"),
        ((1.0, 101.0), "log"),
        ((1e-8, 1.0, 1e8), "log"),
        ((0.0, 1e-3, 500.0), "linear"),
        ((-1.0, 1e-3, 500.0), "linear"),
        ((1.0, NAN, 500.0), "log"),
        ((1.0, INF), "linear"),
        ((NAN, NAN), "linear"),
    ],
)
def test_an_axis_is_logarithmic_where_positive_values_span_two_decades(values, scale):
    (axes,) = one_panel(train=list(enumerate(values))).axes
    assert axes.get_yscale() == scale


def test_values_that_are_not_finite_leave_a_gap_and_a_mark():
    figure = one_panel(train=[(1, 1.0), (2, NAN), (3, 2.0), (4, INF), (5, -INF), (6, NAN), (7, 1.0)])
    (line,) = lines(figure)
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False, True, True, True, False]
    assert edge_marks(figure) == [("x", [2, 6]), ("^", [4]), ("v", [5])]
    assert legend(figure) == ["not finite: NaN a cross, infinity an arrow"]


def test_a_point_between_two_gaps_is_seen():
    (line,) = lines(one_panel(train=[(i, 1.0 if i == 50 else NAN) for i in range(100)]))
    assert line.get_marker() not in (None, "None")


def test_a_single_point_has_a_margin_and_one_tick():
    figure = one_panel(train=[(10, 0.5)])
    (axes,) = figure.axes
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert "10" in ticks
    assert len(set(ticks)) == len(ticks)


def test_ten_sets_differ_in_more_than_colour():
    sets = {f"set{number}/loss": [(1, number), (2, number + 1.0)] for number in range(10)}
    drawn = lines(one_panel(train=[(1, 3.0), (2, 1.0)], **sets))
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == 11
    assert len({line.get_color() for line in drawn}) == len(figures.COLOURS)
    assert legend(one_panel(train=[(1, 3.0)], **sets)) == ["train", *sets]


def test_a_label_has_one_style_in_all_panels_and_is_in_the_legend_once():
    a, b = [(1, 0.5), (2, 0.6)], [(1, 0.1), (2, 0.2)]
    figure = figures.curves([Panel("accuracy", "accuracy", {"val": a, "code": b}), Panel("f1", "f1", {"code": a})])
    first, second = figure.axes
    assert first.lines[1].get_color() == second.lines[0].get_color() != first.lines[0].get_color()
    assert legend(figure) == ["val", "code"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["accuracy", "f1"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["curves", "matrix"])
def test_nothing_is_drawn_over_the_figures_edge(kind):
    name = "a_validation_set_with_a_very_long_name_of_a_benchmark_$x_in_many_languages_{}/loss"
    if kind == "curves":
        figure = one_panel(**{name.format(number): [(1, 1e-8), (3_000_000, 1e8)] for number in range(10)})
    else:
        figure = figures.confusion_matrix([[123456] * 20] * 20, name)
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.get_figwidth() + 0.01
    assert box.y1 <= figure.get_figheight() + 0.01


def test_a_legend_hides_no_axes():
    figure = one_panel(**{f"set{number}/loss": [(1, 1.0), (2, 2.0)] for number in range(10)})
    renderer = figure.canvas.get_renderer()
    (axes,), (below,) = figure.axes, figure.legends
    assert below.get_window_extent(renderer).y1 <= axes.get_tightbbox(renderer).y0 + 1


def test_a_confusion_matrix_is_coloured_by_rows_and_counted():
    figure = figures.confusion_matrix([[3, 1], [0, 0]], "val/confusion_matrix")
    axes = figure.axes[0]
    assert np.asarray(axes.images[0].get_array()).tolist() == [[0.75, 0.25], [0.0, 0.0]]
    assert [text.get_text() for text in axes.texts] == ["3", "1", "0", "0"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")


def test_counts_are_left_out_where_they_could_not_be_read():
    assert len(figures.confusion_matrix([[1] * 20] * 20, "m").axes[0].texts) == 400
    assert len(figures.confusion_matrix([[1] * 25] * 25, "m").axes[0].texts) == 0


def test_a_range_test_marks_its_suggestion_and_keeps_a_last_loss_from_flattening_the_rest():
    rates = [1e-3, 1e-2, 1e-1, 1.0]
    (axes,) = figures.range_test(rates, [2.0, 1.0, 1.5, 1e9], [2.0, 1.0, 1.5, 1e8], 1e-2).axes
    assert list(axes.lines[-1].get_xdata()) == [1e-2, 1e-2]
    assert [text.get_text() for text in axes.get_legend().texts] == ["loss", "running mean", "suggestion 1.00e-02"]
    assert axes.get_xscale() == "log"
    low, high = axes.get_ylim()
    assert low < 1.0 < 2.0 < high < 3.0


def test_a_range_test_of_nothing_but_nan_can_be_drawn():
    figure = figures.range_test([1e-3], [NAN], [NAN], None)
    assert len(figures.render(figure, "png")) > 1000


def test_equal_data_gives_equal_bytes_and_files_of_their_kind(tmp_path):
    made = []
    for _ in range(2):
        figure = one_panel(train=[(1, 3.0), (2, 2.0)], val=[(2, 2.5)])
        made.append({kind: figures.render(figure, kind) for kind in figures.FORMATS})
    assert made[0] == made[1]
    (tmp_path / "a.png").write_bytes(made[0]["png"])
    assert imread(tmp_path / "a.png").std() > 0.05
    root = ET.fromstring(made[0]["svg"])
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_thinning_halves_the_points_and_loses_no_spike():
    values = [math.sin(i / 50) for i in range(1000)]
    values[321], values[777], values[500], values[650] = 100.0, -100.0, NAN, INF
    kept = thinned([Point(i, value) for i, value in enumerate(values)])
    assert 450 < len(kept) < 550
    assert [each.iteration for each in kept] == sorted({each.iteration for each in kept})
    assert (kept[0].iteration, kept[-1].iteration) == (0, 999)
    assert {321, 777, 500, 650} <= {each.iteration for each in kept}


def test_a_long_curve_keeps_its_ends_and_its_spikes_at_bounded_size():
    curve = Curve()
    for i in range(20 * MAX_POINTS):
        curve.add(i, 50.0 if i == 12345 else 1.0 / (i + 1))
    assert len(curve.points) <= MAX_POINTS
    assert Point(12345, 50.0) in curve.points
    assert (curve.points[0].iteration, curve.points[-1].iteration) == (0, 20 * MAX_POINTS - 1)


def test_a_curve_of_nan_alone_stays_bounded_too():
    curve = Curve()
    for i in range(5 * MAX_POINTS):
        curve.add(i, NAN)
    assert len(curve.points) <= MAX_POINTS


def test_the_later_of_two_values_at_one_iteration_counts():
    curve = Curve()
    for iteration, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
        curve.add(iteration, value)
    assert curve.points == [(1, 1.0), (2, 3.0)]


def test_a_matrix_of_any_shape_is_drawn_with_its_values():
    figure = matrix(np.array([[-1.0, 0.5, 2.0], [0.0, 1e-3, 9.0]]), "attention")
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "attention"
    assert [text.get_text() for text in axes.texts] == ["-1", "0.5", "2", "0", "0.001", "9"]
    assert not matrix(np.zeros((COUNTED_CLASSES + 1, 2)), "large").axes[0].texts


def test_a_confusion_matrix_is_one_picture_wherever_it_goes():
    counts = [[5, 1], [0, 4]]
    media = MediaLogged(name="val/confusion_matrix", kind="matrix", value=torch.tensor(counts))
    expected = MediaLogged(name="x", kind="figure", value=confusion_matrix(counts, "val/confusion_matrix"))
    assert np.array_equal(picture_of(media), picture_of(expected))
