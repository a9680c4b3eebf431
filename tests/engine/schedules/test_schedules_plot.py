"""plot: the rates of schedules in one picture."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.schedules import Constant, Cosine, Linear, Step, Warmup, plot
from tests.support import programs


def curves(figure):
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def test_a_schedule_is_drawn_update_by_update_over_its_length():
    figure = plot(Linear(1.0, 4))
    assert isinstance(figure, Figure)
    (line,) = curves(figure).values()
    assert list(line.get_xdata()) == [0, 1, 2, 3, 4]
    assert list(line.get_ydata()) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_the_axes_say_what_they_show():
    (axes,) = plot(Cosine(0.1, 100)).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("update", "learning rate")
    assert axes.get_xlim() == (0, 100)


def test_several_schedules_are_drawn_by_name_over_the_longest_length():
    figure = plot({"short": Linear(1.0, 4), "warm": Warmup(1.0, 2) >> Linear(1.0, 6), "endless": Constant(0.5)})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["short", "warm", "endless"]
    lines = curves(figure)
    assert all(list(line.get_xdata()) == list(range(9)) for line in lines.values())
    assert list(lines["warm"].get_ydata())[:4] == [0.0, 0.5, 1.0, pytest.approx(5 / 6)]
    assert len({line.get_color() for line in lines.values()}) == 3


def test_schedules_without_an_end_are_drawn_over_a_thousand_updates():
    (line,) = curves(plot(Step(0.1, 300))).values()
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0, 1000)


def test_as_many_updates_are_drawn_as_asked_for():
    (line,) = curves(plot(Cosine(0.1, 100), steps=7)).values()
    assert list(line.get_xdata()) == list(range(8))


def test_a_long_schedule_is_thinned_out_but_keeps_its_ends():
    (line,) = curves(plot(Linear(1.0, 10**7 + 1))).values()
    assert len(line.get_xdata()) <= 4098
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0, 10**7 + 1)
    assert line.get_ydata()[-1] == 0.0


def test_more_curves_than_colours_differ_in_their_line_style():
    lines = curves(plot({f"{n}": Constant(n) for n in range(20)})).values()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20


def test_the_legend_lies_beside_the_curves():
    figure = plot({"a": Linear(1.0, 4), "b": Constant(1.0)})
    figure.canvas.draw()
    assert figure.legends[0].get_window_extent().x0 >= figure.axes[0].get_window_extent().x1


@pytest.mark.parametrize(("name", "begins"), [("rates.png", b"\x89PNG\r\n\x1a\n"), ("rates.svg", b"<?xml")])
def test_a_path_writes_the_picture_as_its_suffix_says(tmp_path, name, begins):
    plot(Cosine(0.1, 100), path=tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedules": {}}, r"plot\(schedules=\{\}\): needs at least 1 schedule"),
        ({"schedules": 0.1}, r"plot\(schedules=\{'float': 0.1\}\): needs a schedule"),
        ({"schedules": {"a": None}}, r"plot\(schedules=\{'a': None\}\): needs a schedule, such as Cosine"),
        ({"steps": 0}, r"plot\(steps=0\): needs a whole number of updates, at least 1"),
        ({"steps": 1.5}, r"plot\(steps=1.5\): needs a whole number"),
        ({"path": "rates.pdf"}, r"plot\(path='rates.pdf'\): needs a name that ends in .png or .svg"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        plot(**{"schedules": Constant(0.1), **arguments})


@pytest.mark.slow
def test_importing_the_schedules_leaves_matplotlib_alone_and_drawing_leaves_pyplot_alone():
    code = (  # the warm Python has imported the schedules and everything else of ours
        "import sys; from pulsetrain.engine.schedules import Constant, plot; assert 'matplotlib' not in sys.modules\n"
        "plot(Constant(0.1)); assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    done = programs.run("-c", code)
    assert done.returncode == 0, done.stderr
