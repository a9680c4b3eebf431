import io
import math

import pytest
import torch
from structlog.testing import capture_logs

from pulsetrain.engine import EventBus, Events, Every
from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder, Plots
from pulsetrain.handlers.plots.curves import MAX_LAYERS, MAX_PANELS, RunCurves
from pulsetrain.handlers.plots.painter import InThisProcess
from tests.support import programs
from tests.support.engines import (
    log,
    log_each_iteration,
    make_engine,
    policy_updated,
    rolled_out,
    validate_each_epoch,
    validated,
)
from tests.support.models import loader, regression_model, trainer


@pytest.fixture(autouse=True)
def draw_at_once(monkeypatch):
    """Without a process that draws: test_drawing_process.py has that one."""
    monkeypatch.setattr("pulsetrain.handlers.plots.plots.DrawingProcess", InThisProcess)


def drawn(tmp_path, kind="png"):
    return sorted(str(path.relative_to(tmp_path / "plots"))[:-4] for path in (tmp_path / "plots").rglob(f"*.{kind}"))


def points(plots, name, engine=""):
    curve = plots.state_dict()[engine]["curves"][name]
    return list(zip(curve["iterations"], curve["values"], strict=True))


def labels(plots, figure, engine=""):
    """Those of each panel."""
    run = RunCurves()
    run.load_state_dict(plots.state_dict()[engine])
    return [[line.get_label() for line in axes.lines] for axes in run.figure(figure).axes]


def titles(plots, figure):
    return [axes.get_title(loc="left") for axes in plots._runs[""].figure(figure).axes]


def media(engine, name, value, kind="matrix"):
    engine.fire(Events.MEDIA_LOGGED, MediaLogged(name=name, kind=kind, value=value))


def everything(engine):
    log(
        engine,
        {
            "train/loss": 1.0,
            "train/perplexity": 3.0,
            "learning_rate": 0.1,
            "grad_norm": 2.0,
            "samples_per_second": 10.0,
            "tokens_per_second": 99.0,
            "memory/host_rss_bytes": 1e9,
            "skipped_updates": 0.0,
        },
    )
    media(engine, "val/confusion_matrix", torch.tensor([[5, 1], [0, 4]]))
    validated(engine, {"val/loss": 2.0, "val/accuracy": 0.5, "val/perplexity": 4.0, "code/accuracy": 0.25})


def test_rollouts_and_updates_of_the_policy_have_panels_and_are_drawn_as_they_come(tmp_path):
    engine = make_engine()
    plots = Plots(tmp_path, formats=["svg"]).attach(engine)
    rolled_out(engine, {"rollout/return": 2.5})
    assert drawn(tmp_path, "svg") == ["metrics"]
    policy_updated(engine, {"policy/kl": 0.125, "policy/value_loss": 1.0})
    plots.draw()
    assert drawn(tmp_path, "svg") == ["loss", "metrics"]
    assert titles(plots, "metrics") == ["kl", "return"]


@pytest.mark.slow
def test_each_figure_is_a_png_and_an_svg(tmp_path):
    engine = make_engine()
    Plots(tmp_path).attach(engine)
    everything(engine)
    expected = ["grad_norm", "learning_rate", "loss", "metrics", "throughput", "val_confusion_matrix"]
    assert drawn(tmp_path) == drawn(tmp_path, "svg") == expected
    assert len(list((tmp_path / "plots").iterdir())) == 12  # no temporary file stays


@pytest.mark.slow
def test_a_figure_has_the_curves_that_belong_to_it(tmp_path):
    engine = make_engine()
    plots = Plots(tmp_path, formats=["svg"]).attach(engine)
    everything(engine)
    run = plots._runs[""]
    assert titles(plots, "loss") == ["loss"]
    assert sorted(run.curves) == sorted(
        [
            *("train/loss", "val/loss", "train/perplexity", "val/perplexity", "val/accuracy", "code/accuracy"),
            *("learning_rate", "grad_norm", "samples_per_second", "tokens_per_second"),
        ]
    )
    assert titles(plots, "metrics") == ["accuracy", "perplexity"]
    assert [len(each) for each in labels(plots, "metrics")] == [2, 2]  # the training's perplexity beside validation's
    assert titles(plots, "throughput") == ["samples per second", "tokens per second"]


def test_pictures_come_with_each_validation_and_at_the_end(tmp_path, clock):
    engine, seen = make_engine(), []
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i})
    validate_each_epoch(engine, [{"val/loss": 1.0}] * 2)
    plots = Plots(tmp_path, formats=("png",), clock=clock).attach(engine)
    picture = tmp_path / "plots" / "loss.png"

    @engine.on(Events.EPOCH_COMPLETED)
    def look():
        seen.append(picture.exists())
        picture.unlink()

    @engine.on(Events.EPOCH_STARTED(once=2))
    def after_validation():
        assert points(plots, "val/loss") == [(3, 1.0)]

    engine.run([0, 1, 2], max_epochs=2)
    assert seen == [True, True]
    assert not picture.exists()  # nothing has changed since the last validation


@pytest.mark.slow
def test_only_figures_whose_data_has_changed_are_drawn_again(tmp_path, clock):
    engine = make_engine()
    plots = Plots(tmp_path, formats=("png",), clock=clock).attach(engine)
    log(engine, {"train/loss": 1.0, "learning_rate": 0.1})
    assert [path.name for path in plots.draw()] == ["learning_rate.png", "loss.png"]
    assert plots.draw() == []
    log(engine, {"learning_rate": 0.2})
    assert [path.name for path in plots.draw()] == ["learning_rate.png"]


def test_drawing_in_mid_run_takes_at_most_1_percent_of_the_time(tmp_path, clock, monkeypatch):
    engine = make_engine()
    Plots(tmp_path, formats=("png",), clock=clock).attach(engine)
    times = []

    def slow(figure, kind):
        times.append(clock.now)
        clock.now += 1.0  # seconds that drawing takes
        return b""

    monkeypatch.setattr("pulsetrain.handlers.plots.figures.render", slow)
    for iteration in range(62):
        engine.state.iteration = iteration
        validated(engine, {"val/loss": 1.0 / (1 + iteration)})
        clock.now += 5.0
    assert times == [0.0, 101.0, 202.0, 303.0]
    engine.fire(Events.COMPLETED)
    assert len(times) == 5


def test_a_run_that_ends_badly_has_its_pictures(tmp_path):
    def fail(iteration):
        if iteration == 3:
            raise ValueError("in the step")

    for number, step in enumerate((fail, lambda iteration: None)):
        engine = make_engine(step)
        log_each_iteration(engine, lambda i: {"train/loss": 1.0})
        if number:
            engine.add_event_handler(Events.ITERATION_COMPLETED, engine.terminate, skip_completed=True)
        Plots(tmp_path / str(number)).attach(engine)
        try:
            engine.run([0] * 5, max_epochs=1)
        except ValueError:
            assert number == 0
        assert drawn(tmp_path / str(number)) == ["loss"]


def test_a_run_that_fails_on_a_bus_has_its_pictures(tmp_path):
    engine = make_engine(lambda iteration: 1 / (3 - iteration))
    log_each_iteration(engine, lambda i: {"train/loss": 1.0})
    Plots(tmp_path).attach(engine.bus)
    with capture_logs() as logs, pytest.raises(ZeroDivisionError):
        engine.run([0] * 5, max_epochs=1)
    assert drawn(tmp_path) == ["trainer/loss"]
    assert not logs


def test_its_own_cadence_reads_the_loss_and_leaves_that_of_the_log(tmp_path):
    engine = make_engine(lambda i: {"loss": float(i)})
    log_each_iteration(engine, lambda i: {"train/loss": -1.0, "grad_norm": 7.0})
    plots = Plots(tmp_path, every=Every(iterations=2), formats=("png",)).attach(engine)
    engine.run([0] * 5, max_epochs=1)
    assert points(plots, "train/loss") == [(2, 2.0), (4, 4.0)]
    assert len(points(plots, "grad_norm")) == 5


def test_each_parameter_group_has_a_line(tmp_path):
    engine = make_engine()
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    engine.optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.5}], lr=0.1)
    plots = Plots(tmp_path, formats=("png",)).attach(engine)
    log(engine, {"train/loss": 1.0, "learning_rate": 0.1})
    assert points(plots, "learning_rate/1") == [(0, 0.5)]
    assert len(labels(plots, "learning_rate")[0]) == 2
    log(engine, {"learning_rate/head": 0.5, "learning_rate/body": 0.1})  # published under the names of the groups
    assert len(labels(plots, "learning_rate")[0]) == 2


def test_only_the_largest_of_many_layers_are_drawn_beside_the_total(tmp_path):
    engine = make_engine()
    plots = Plots(tmp_path, formats=("png",)).attach(engine)
    log(engine, {"grad_norm": 9.0, **{f"grad_norm/layer{i}": float(i) for i in range(40)}})
    assert titles(plots, "grad_norm") == [f"gradient norm before clipping (the largest {MAX_LAYERS} of 40)"]
    assert len(labels(plots, "grad_norm")[0]) == MAX_LAYERS + 1


@pytest.mark.slow
def test_curves_of_other_engines_on_the_bus_are_not_mixed_in(tmp_path):
    bus = EventBus()
    first = make_engine(bus=bus)
    second = type(first)(lambda engine, batch: None, name="second", bus=bus)
    alone, both = Plots(tmp_path / "alone").attach(first), Plots(tmp_path / "both").attach(bus)
    for engine, loss in ((first, 1.0), (second, 2.0)):
        log(engine, {"train/loss": loss})
        engine.fire(Events.COMPLETED)
    assert points(alone, "train/loss") == [(0, 1.0)]
    assert points(both, "train/loss", "second") == [(0, 2.0)]
    assert drawn(tmp_path / "alone") == ["loss"]
    assert drawn(tmp_path / "both") == ["second/loss", "trainer/loss"]


@pytest.mark.parametrize(
    "value",
    [[[1, 2, 3], [4, 5, 6]], [1, 2], [[-1, 0], [0, 1]], [[math.nan, 0], [0, 1]], "matrix", {"shape": [2, 2]}, []],
)
def test_what_is_not_a_confusion_matrix_is_left_out(tmp_path, value):
    engine = make_engine()
    plots = Plots(tmp_path).attach(engine)
    media(engine, "val/confusion_matrix", value)
    assert plots.draw() == []


def test_other_media_are_left_out(tmp_path):
    engine = make_engine()
    plots = Plots(tmp_path).attach(engine)
    media(engine, "val/attention", [[1.0, 2.0], [3.0, 4.0]])
    media(engine, "val/confusion_matrix", "a text", kind="text")
    assert plots.draw() == []


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_pictures(tmp_path):
    engine = make_engine()
    first = Plots(tmp_path / "a").attach(engine)
    everything(engine)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = Plots(tmp_path / "b")
    second.load_state_dict(torch.load(file, weights_only=True))
    second.attach(make_engine())
    assert len(second.draw()) == 10
    for path in (tmp_path / "b" / "plots").iterdir():
        assert path.read_bytes() == (tmp_path / "a" / "plots" / path.name).read_bytes()


def test_what_a_clock_has_measured_is_in_no_checkpoint(tmp_path):
    states = []
    for rate in (10.0, 11.0):
        engine = make_engine()
        plots = Plots(tmp_path, formats=["svg"]).attach(engine)
        log(engine, {"train/loss": 1.0, "samples_per_second": rate, "tokens_per_second": 8 * rate})
        states.append(plots.state_dict())
    assert states[0] == states[1]
    assert list(states[0][""]["curves"]) == ["train/loss"]


def test_a_run_that_goes_back_in_its_process_keeps_the_throughput_before_that(tmp_path):
    engine = make_engine()
    plots = Plots(tmp_path, formats=["svg"]).attach(engine)

    def at(iteration, rate):
        engine.state.iteration = iteration
        log(engine, {"train/loss": rate, "samples_per_second": rate})

    at(1, 10.0)
    at(2, 20.0)
    checkpoint = plots.state_dict()
    at(3, 30.0)
    at(4, 40.0)
    plots.load_state_dict(checkpoint)
    assert points(plots, "train/loss") == [(1, 10.0), (2, 20.0)]
    at(3, 33.0)
    for name in ("train/loss", "samples_per_second"):
        assert plots._runs[""].curves[name].points == [(1, 10.0), (2, 20.0), (3, 33.0)]


@pytest.mark.slow
def test_only_as_many_metrics_are_drawn_as_fit(tmp_path):
    engine = make_engine()
    plots = Plots(tmp_path, formats=["svg"]).attach(engine)
    plots._next = float("inf")  # drawn below
    validated(engine, {f"val/metric{number:02}": 1.0 for number in range(MAX_PANELS + 3)})
    assert titles(plots, "metrics") == [f"metric{number:02}: val" for number in range(MAX_PANELS)]


@pytest.mark.slow
def test_a_replay_draws_the_same_pictures_of_several_groups_and_of_nan(tmp_path):
    model = regression_model()
    groups = [{"params": model[:2].parameters()}, {"params": model[4].parameters(), "lr": 0.5}]
    run = trainer(
        {"max_epochs": 2, "schedule": "cosine", "clip_grad_norm": 1.0},
        model=model,
        optimizer=torch.optim.SGD(groups, lr=1e38),  # it ends in NaN
        val_loader={"val": loader(8), "other": loader(12)},
        handlers=[EventRecorder(tmp_path), Plots(tmp_path / "live")],
    )
    run.train()
    run.handlers[0].detach()
    again = Plots(tmp_path / "again").attach(replay := Replay(tmp_path))
    replay.run()
    assert len(points(again, "learning_rate/1")) == 4
    assert math.isnan(points(again, "train/loss")[-1][1])
    pictures = sorted((tmp_path / "live" / "plots").iterdir())
    assert len(pictures) == 8
    for path in pictures:
        assert path.read_bytes() == (tmp_path / "again" / "plots" / path.name).read_bytes()


def test_a_picture_that_cannot_be_written_is_written_the_next_time(tmp_path):
    engine, failures = make_engine(), []
    plots = Plots(tmp_path, formats=("png",)).attach(engine)
    engine.add_event_handler(Events.HANDLER_FAILED, failures.append)
    (tmp_path / "plots" / "loss.png").mkdir()
    validated(engine, {"val/loss": 1.0})
    assert len(failures) == 1
    (tmp_path / "plots" / "loss.png").rmdir()
    assert [path.name for path in plots.draw()] == ["loss.png"]


def test_names_of_files_stay_in_the_folder(tmp_path):
    engine = make_engine()
    plots = Plots(tmp_path / "run", formats=("png",)).attach(engine)
    media(engine, "../../etc/a b/confusion_matrix", [[1]])
    assert [path.name for path in plots.draw()] == ["_.._etc_a_b_confusion_matrix.png"]


@pytest.mark.slow
def test_matplotlib_is_imported_only_to_draw_and_pyplot_never(tmp_path):
    code = (
        "import sys; from pulsetrain.engine import Engine; from pulsetrain.handlers import Plots; "
        "from pulsetrain.handlers.plots.curves import RunCurves; "
        f"plots = Plots({str(tmp_path)!r}); before = 'matplotlib' in sys.modules; run = RunCurves(); "
        "run.add(1, {'train/loss': 1.0}); plots.load_state_dict({'': run.state_dict()}); "
        "plots.attach(Engine(lambda engine, batch: None)); plots.draw(); "
        "print(before, 'matplotlib.pyplot' in sys.modules)"
    )
    done = programs.run("-c", code)
    assert done.stdout.split() == ["False", "False"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 10}, TypeError, r"Plots\(every=10\): needs an Every"),
        ({"formats": "png"}, ValueError, r"Plots\(formats='png'\): needs a list"),
        ({"formats": ()}, ValueError, r"Plots\(formats=\(\)\): needs a list"),
        (
            {"formats": ["png", "svgz"]},
            ValueError,
            r"Plots\(formats='svgz'\): unknown; choose one of png, svg; did you",
        ),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        Plots(tmp_path, **arguments)
