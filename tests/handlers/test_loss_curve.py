import math

import matplotlib.image
import pytest
from driving import log, log_each_iteration, make_engine, validate_each_epoch, validated

from engine import Events, Every
from handlers import LossCurve
from handlers.loss_curve import MAX_POINTS


def drawn_points(curve):
    return curve.state_dict()["curves"]


def test_the_picture_is_written_at_each_validation_and_at_the_end(tmp_path):
    engine, seen = make_engine(), []
    picture = tmp_path / "plots" / "loss.png"
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i})
    validate_each_epoch(engine, [{"val/loss": 1.0, "val/code/loss": 0.5, "val/accuracy": 0.9}] * 2)
    curve = LossCurve(tmp_path).attach(engine)

    @engine.on(Events.EPOCH_COMPLETED)
    def look(engine):
        seen.append(matplotlib.image.imread(picture).shape)
        picture.unlink()

    engine.run([0, 1, 2], max_epochs=2)
    assert [len(shape) for shape in seen] == [3, 3]
    assert matplotlib.image.imread(picture).std() > 0.05
    assert sorted(drawn_points(curve)) == ["train/loss", "val/code/loss", "val/loss"]
    assert [path.name for path in picture.parent.iterdir()] == ["loss.png"]


def test_points_stand_at_their_iterations(tmp_path):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": i / 2})
    validate_each_epoch(engine, [{"val/loss": 5.0}])
    curve = LossCurve(tmp_path).attach(engine)
    engine.run([0, 1], max_epochs=1)
    assert drawn_points(curve) == {"train/loss": [[1, 0.5], [2, 1.0]], "val/loss": [[2, 5.0]]}


def test_two_readings_at_one_iteration_are_one_point(tmp_path):
    engine = make_engine()
    curve = LossCurve(tmp_path).attach(engine)
    log(engine, {"train/loss": 1.0})
    log(engine, {"train/loss": 2.0})
    assert drawn_points(curve) == {"train/loss": [[0, 2.0]]}


def test_its_own_cadence_reads_the_output(tmp_path):
    engine = make_engine(lambda i: {"loss": float(i)})
    curve = LossCurve(tmp_path, every=Every(iterations=2, epochs=1)).attach(engine)
    engine.run([0] * 4, max_epochs=1)
    assert drawn_points(curve) == {"train/loss": [[2, 2.0], [4, 4.0]]}
    assert (tmp_path / "plots" / "loss.png").exists()


def test_without_a_loss_there_is_no_picture_and_no_error(tmp_path):
    engine = make_engine(lambda i: None)
    curve = LossCurve(tmp_path).attach(engine)
    engine.run([0], max_epochs=1)
    assert curve.draw() is None
    assert list((tmp_path / "plots").iterdir()) == []


def test_losses_that_are_no_numbers_leave_a_gap(tmp_path):
    engine = make_engine()
    curve = LossCurve(tmp_path).attach(engine)
    for iteration, loss in enumerate((1.0, math.nan, math.inf, 0.5), start=1):
        engine.state.iteration = iteration
        log(engine, {"train/loss": loss})
    assert curve.draw() == tmp_path / "plots" / "loss.png"


def test_a_run_that_is_terminated_without_completed_has_its_picture(tmp_path):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1.0})
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate(skip_completed=True))
    LossCurve(tmp_path).attach(engine)
    engine.run([0, 1], max_epochs=1)
    assert (tmp_path / "plots" / "loss.png").exists()


def test_memory_stays_flat_and_the_curve_whole(tmp_path):
    engine = make_engine()
    curve = LossCurve(tmp_path).attach(engine)
    for iteration in range(1, 3 * MAX_POINTS):
        engine.state.iteration = iteration
        log(engine, {"train/loss": 1.0 / iteration})
    points = drawn_points(curve)["train/loss"]
    assert MAX_POINTS // 2 <= len(points) <= MAX_POINTS
    assert points[0] == [1, 1.0]
    assert points[-1][0] == 3 * MAX_POINTS - 1


def test_a_resumed_run_draws_the_whole_curve(tmp_path):
    first, second = LossCurve(tmp_path), LossCurve(tmp_path)
    engine = make_engine()
    first.attach(engine)
    log(engine, {"train/loss": 3.0})
    validated(engine, {"val/loss": 4.0})
    second.load_state_dict(first.state_dict())
    assert drawn_points(second) == {"train/loss": [[0, 3.0]], "val/loss": [[0, 4.0]]}


def test_pyplot_is_left_alone(tmp_path):
    import sys

    already = "matplotlib.pyplot" in sys.modules
    curve = LossCurve(tmp_path).attach(make_engine())
    curve.load_state_dict({"curves": {"train/loss": [[1, 1.0]]}})
    curve.draw()
    assert ("matplotlib.pyplot" in sys.modules) == already


def test_a_cadence_that_is_no_cadence_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"LossCurve\(every=10\): needs an Every"):
        LossCurve(tmp_path, every=10)
