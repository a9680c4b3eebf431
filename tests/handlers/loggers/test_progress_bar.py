import io

import pytest

from pulsetrain.engine import Engine, Events, Phase
from pulsetrain.handlers import ProgressBar
from tests.support.engines import (
    log,
    log_each_iteration,
    make_engine,
    roll_out_before_each_batch,
    validate_each_epoch,
    validated,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def last_drawing(stream):
    return stream.getvalue().rstrip("\n").split("\r")[-1]


def advance(engine, clock, seconds):
    @engine.on(Events.ITERATION_STARTED)
    def pass_time(engine):
        clock.now += seconds


def test_the_bar_is_one_line_with_the_figures_of_the_run():
    stream, engine = Terminal(), make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 2.34567, "learning_rate": 3e-4, "tokens_per_second": 12345.6})
    validate_each_epoch(engine, [{"val/loss": 2.5, "val/accuracy": 0.5}, {"val/loss": 1.87654}])
    ProgressBar(stream=stream).attach(engine)
    engine.run([0, 1, 2], max_epochs=2)
    drawn = last_drawing(stream)
    assert "epoch 2/2: 100%" in drawn
    assert "6/6" in drawn
    assert "loss=2.346, lr=0.0003, tokens/s=12,346, val/loss=1.877, val/accuracy=0.5" in drawn
    assert stream.getvalue().count("\n") == 1


def test_metrics_of_training_and_logged_values_are_on_the_bar_and_those_of_monitors_are_not():
    stream, engine = Terminal(), make_engine()
    values = {"train/loss": 2.0, "train/accuracy": 0.25, "grad_norm": 3.0, "samples_per_second": 9.0, "entropy": 1.5}
    log_each_iteration(engine, lambda i: values)
    log_each_iteration(engine, lambda i: {"memory/host_rss_bytes": 1e9, "throughput/step_seconds": 0.1})
    ProgressBar(stream=stream).attach(engine)
    engine.run([0], max_epochs=1)
    assert "loss=2, accuracy=0.25, entropy=1.5]" in last_drawing(stream)


def test_of_many_values_the_first_are_shown():
    stream, engine = io.StringIO(), make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 2.0, **{f"value_{number}": number for number in range(20)}})
    ProgressBar(stream=stream).attach(engine)
    engine.run([0], max_epochs=1)
    assert stream.getvalue() == (
        "epoch 1/1, iteration 1/1 (100%), loss 2, value_0 0, value_1 1, value_2 2, value_3 3, value_4 4, value_5 5, "
        "value_6 6\n"
    )


def test_many_metrics_of_a_validation_do_not_hide_the_loss_of_training():
    stream, engine = io.StringIO(), make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 2.0})
    validate_each_epoch(engine, [{f"val/value_{number}": 1.0 for number in range(9)}] * 2)
    ProgressBar(stream=stream).attach(engine)
    engine.run([0], max_epochs=2)
    assert "(100%), loss 2, val/value_0 1" in stream.getvalue()


def test_returns_and_rewards_of_rollouts_are_on_the_bar():
    stream, engine = Terminal(), make_engine()
    roll_out_before_each_batch(engine, [{"rollout/return": 2.5, "rollout/length": 9.0, "rollout/reward": 0.125}])
    ProgressBar(stream=stream).attach(engine)
    engine.run([0], max_epochs=1)
    assert "rollout/return=2.5, rollout/reward=0.125" in last_drawing(stream)
    assert "length" not in last_drawing(stream)


@pytest.mark.parametrize(
    ("bounds", "total"),
    [({"max_epochs": 3}, "6/6"), ({"max_iters": 5}, "5/5"), ({"max_epochs": 2, "epoch_length": 3}, "6/6")],
)
def test_the_total_follows_from_the_bounds_of_the_run(bounds, total):
    stream, engine = Terminal(), make_engine()
    ProgressBar(stream=stream).attach(engine)
    engine.run([0, 1], **bounds)
    assert total in last_drawing(stream)


def test_the_total_that_the_engine_knows_takes_precedence():
    class Bounded(Engine):
        total_iterations = 40

    stream, engine = Terminal(), Bounded(lambda engine, batch: None)
    ProgressBar(stream=stream).attach(engine)
    engine.run([0, 1], max_epochs=2)
    assert "4/40" in last_drawing(stream)


def test_the_total_is_found_after_the_first_epoch_of_a_loader_without_a_length():
    class Unsized:
        def __iter__(self):
            return iter(range(3))

    stream, engine = Terminal(), make_engine()
    ProgressBar(stream=stream).attach(engine)
    engine.run(Unsized(), max_epochs=2)
    assert "6/6" in last_drawing(stream)


def test_a_resumed_run_starts_its_bar_where_it_was():
    stream, engine = Terminal(), make_engine()
    engine.run([0, 1, 2], max_epochs=1)
    ProgressBar(stream=stream).attach(engine)
    engine.run([0, 1, 2], max_epochs=2)
    assert "3/6" in stream.getvalue().split("\r")[1]
    assert "6/6" in last_drawing(stream)


def fail(iteration):
    raise ArithmeticError("too large")


@pytest.mark.parametrize("ending", ["completed", "terminated", "terminated without completed", "exception"])
def test_the_bar_is_closed_however_the_run_ends(ending):
    stream, engine = Terminal(), make_engine(fail if ending == "exception" else lambda i: 1.0)
    if ending.startswith("terminated"):
        engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: engine.terminate(skip_completed=ending != "terminated")
        )
    bar = ProgressBar(stream=stream).attach(engine)
    if ending == "exception":
        with pytest.raises(ArithmeticError):
            engine.run([0, 1], max_epochs=1)
    else:
        engine.run([0, 1], max_epochs=1)
    assert stream.getvalue().endswith("\n")
    assert bar._bar is None


def test_the_last_validation_of_a_terminated_run_is_on_the_bar():
    stream, engine = Terminal(), make_engine()
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate())
    engine.add_event_handler(Events.COMPLETED, lambda: validated(engine, {"val/loss": 0.125}))
    ProgressBar(stream=stream).attach(engine)
    engine.run([0, 1], max_epochs=1)
    assert "val/loss=0.125" in last_drawing(stream)


def test_a_log_file_gets_a_plain_line_every_interval_and_one_at_the_end(clock):
    stream, engine = io.StringIO(), make_engine()
    advance(engine, clock, 4.0)
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i, "tokens_per_second": 1000.0})
    ProgressBar(stream=stream, interval=10.0, clock=clock).attach(engine)
    engine.run([0] * 7, max_epochs=1)
    assert stream.getvalue().splitlines() == [
        "epoch 1/1, iteration 3/7 (43%), loss 0.3333, tokens/s 1,000",
        "epoch 1/1, iteration 6/7 (86%), loss 0.1667, tokens/s 1,000",
        "epoch 1/1, iteration 7/7 (100%), loss 0.1429, tokens/s 1,000",
    ]


def test_a_log_file_holds_no_carriage_returns_and_no_escape_codes(capsys):
    engine = make_engine()
    ProgressBar().attach(engine)
    engine.run([0] * 3, max_epochs=2)
    written = capsys.readouterr().err
    assert written == "epoch 2/2, iteration 6/6 (100%)\n"


def test_the_bar_starts_no_thread_of_its_own():
    engine, watched = make_engine(), []
    bar = ProgressBar(stream=Terminal()).attach(engine)
    # tqdm keeps the thread that wakes up its bars at the class that started it
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: watched.append(vars(type(bar._bar)).get("monitor")))
    engine.run([0], max_epochs=1)
    assert watched == [None]


def test_detaching_in_mid_run_closes_the_bar():
    stream, engine = Terminal(), make_engine()
    bar = ProgressBar(stream=stream).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), bar.detach, phase=Phase.PERSIST)
    engine.run([0] * 4, max_epochs=1)
    assert "2/4" in last_drawing(stream)
    assert stream.getvalue().endswith("\n")


def test_a_second_run_begins_with_new_figures():
    stream, engine = Terminal(), make_engine()
    ProgressBar(stream=stream).attach(engine)
    with engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: log(engine, {"train/loss": 7.0})):
        engine.run([0, 1], max_epochs=1)
    first = len(stream.getvalue())
    assert "loss=7" in stream.getvalue()
    engine.run([0, 1], max_epochs=1)
    assert "loss=7" not in stream.getvalue()[first:]


def test_an_interval_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"ProgressBar\(interval=0\): needs a positive number"):
        ProgressBar(interval=0)


def test_the_clock_is_read_rarely_in_fast_iterations_and_the_line_keeps_up_with_slow_ones(clock):
    stream, engine, looks = io.StringIO(), make_engine(), []

    @engine.on(Events.ITERATION_STARTED)
    def pass_time(engine):
        clock.now += 1e-5 if engine.state.iteration <= 10_000 else 20.0

    def look():
        looks.append(engine.state.iteration)
        return clock()

    ProgressBar(stream=stream, interval=10.0, clock=look).attach(engine)
    engine.run([0] * 10_100, max_epochs=1)
    assert len([each for each in looks if each <= 10_000]) < 10_000 / 64 + 12
    shown = [int(line.split("/")[1].split()[-1]) for line in stream.getvalue().splitlines()[:-1]]
    assert shown[0] <= 10_000 + 64
    assert shown == list(range(shown[0], 10_101))
