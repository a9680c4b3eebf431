import io
import json
import math
import re

import pytest
import structlog
from structlog.testing import capture_logs

from pulsetrain.engine import Engine, Events, Every
from pulsetrain.handlers import ConsoleLogger, ProgressBar
from tests.support.engines import (
    UpdatingEngine,
    log,
    log_each_iteration,
    make_engine,
    policy_updated,
    rolled_out,
    validate_each_epoch,
)


def logged(engine, logger_arguments, *, batches=2, epochs=1, target=None):
    stream = io.StringIO()
    ConsoleLogger(stream=stream, **logger_arguments).attach(target or engine)
    engine.run(list(range(batches)), max_epochs=epochs)
    return stream.getvalue().splitlines()


def without_time(lines):
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return [re.sub(r"\s+", " ", line[9:]).strip() for line in lines]


def test_a_line_for_each_rollout_and_each_update_of_the_policy():
    engine, stream = make_engine(), io.StringIO()
    ConsoleLogger(stream=stream).attach(engine)
    rolled_out(engine, {"rollout/return": 1.23456})
    policy_updated(engine, {"policy/kl": 0.125})
    assert without_time(stream.getvalue().splitlines()) == [
        "rollout epoch=0 iteration=0 rollout/return=1.235 seconds=0.5",
        "policy epoch=0 iteration=0 policy/kl=0.125",
    ]


def test_one_line_for_each_log_point_and_validation_and_for_start_and_end():
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / 3 / i, "learning_rate": 3e-4})
    validate_each_epoch(engine, [{"val/loss": 1.23456}])
    assert without_time(logged(engine, {})) == [
        "run started max_epochs=1 epoch_length=2",
        "metrics epoch=1 iteration=1 train/loss=0.3333 learning_rate=0.0003",
        "metrics epoch=1 iteration=2 train/loss=0.1667 learning_rate=0.0003",
        "validation epoch=1 iteration=2 val/loss=1.235 seconds=0.5",
        "run completed epoch=1 iteration=2",
    ]


def test_json_lines_are_exact_and_valid_even_for_nan():
    engine = make_engine()
    log_each_iteration(
        engine, lambda i: {"train/loss": 1 / 3, "grad_norm": math.nan, "scale": math.inf, "low": -math.inf}
    )
    lines = [json.loads(line, parse_constant=pytest.fail) for line in logged(engine, {"format": "json"}, batches=1)]
    assert [line["event"] for line in lines] == ["run started", "metrics", "run completed"]
    metrics = {name: lines[1][name] for name in ("train/loss", "grad_norm", "scale", "low", "iteration", "epoch")}
    assert metrics == {
        "train/loss": 1 / 3,
        "grad_norm": "NaN",
        "scale": "Infinity",
        "low": "-Infinity",
        "iteration": 1,
        "epoch": 1,
    }


def test_the_end_says_why_after_everything_else():
    engine = make_engine()
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate(reason="that will do"))
    engine.add_event_handler(Events.COMPLETED, lambda: log(engine, {"train/loss": 1.0}))
    assert without_time(logged(engine, {}))[1:] == [
        "metrics epoch=1 iteration=1 train/loss=1",
        "run stopped epoch=1 iteration=1 reason='that will do'",
    ]


def test_the_end_is_reported_once_where_completed_is_skipped():
    engine = make_engine()
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: engine.terminate(skip_completed=True, reason="enough"))
    assert without_time(logged(engine, {}))[1:] == ["run stopped epoch=1 iteration=1 reason=enough"]


def test_an_exception_is_reported_and_still_reaches_the_caller():
    def fail(iteration):
        raise ArithmeticError("too large")

    stream = io.StringIO()
    engine = make_engine(fail)
    ConsoleLogger(stream=stream).attach(engine)
    with pytest.raises(ArithmeticError):
        engine.run([0], max_epochs=1)
    assert without_time(stream.getvalue().splitlines())[-1] == (
        "run failed epoch=1 iteration=1 error='ArithmeticError: too large'"
    )


def test_its_own_cadence_reads_the_output_once_an_iteration():
    engine = UpdatingEngine()
    lines = logged(engine, {"every": Every(iterations=2, epochs=1, updates=4)}, batches=4)
    assert without_time(lines)[1:-1] == [
        "metrics epoch=1 iteration=2 train/loss=0 learning_rate=1",
        "metrics epoch=1 iteration=4 train/loss=0 learning_rate=1",
    ]


def test_its_own_cadence_takes_the_place_of_the_log_points():
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"unlogged": 1.0})
    assert not any("unlogged" in line for line in logged(engine, {"every": Every(iterations=2)}))


def test_a_cadence_in_seconds_reads_the_given_clock(clock):
    engine = make_engine(lambda i: float(i))

    @engine.on(Events.ITERATION_STARTED)
    def pass_time(engine):
        clock.now += 4.0

    lines = logged(engine, {"every": Every(seconds=10), "clock": clock}, batches=8)
    assert [line.split()[2] for line in without_time(lines)[1:-1]] == ["iteration=4", "iteration=7"]


def test_on_a_bus_each_line_names_its_engine():
    engine = make_engine()
    evaluator = Engine(lambda engine, batch: 1.0, name="evaluator", bus=engine.bus)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0], max_epochs=1))
    assert without_time(logged(engine, {}, target=engine.bus)) == [
        "run started engine=trainer max_epochs=1 epoch_length=2",
        "run started engine=evaluator max_epochs=1 epoch_length=1",
        "run completed engine=evaluator epoch=1 iteration=1",
        "run completed engine=trainer epoch=1 iteration=2",
    ]


def test_a_metric_may_have_any_name():
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"event": 1.0, "timestamp": 2.0, "self": 3.0, "method_name": 4.0})
    line = without_time(logged(engine, {}, batches=1))[1]
    assert line.endswith("event_=1 timestamp_=2 self=3 method_name=4")


def test_structlogs_global_configuration_is_neither_read_nor_changed():
    before = structlog.get_config()
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1.0})
    with capture_logs() as captured:
        lines = logged(engine, {})
    assert captured == []
    assert len(lines) == 4
    assert structlog.get_config() == before


def test_the_default_stream_is_stderr(capsys):
    engine = make_engine()
    ConsoleLogger().attach(engine)
    engine.run([0], max_epochs=1)
    assert "run completed" in capsys.readouterr().err


def test_lines_do_not_run_into_a_bar_on_the_same_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream, engine = Terminal(), make_engine()
    ProgressBar(stream=stream).attach(engine)
    ConsoleLogger(stream=stream).attach(engine)
    log_each_iteration(engine, lambda i: {"train/loss": 1.0})
    engine.run([0, 1, 2], max_epochs=1)
    lines = [line.split("\r")[-1] for line in stream.getvalue().split("\n")]
    assert sum(bool(re.match(r"\d\d:\d\d:\d\d metrics", line)) for line in lines) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"format": "yaml"}, ValueError, r"ConsoleLogger\(format='yaml'\): unknown; choose one of json, key_value"),
        ({"every": 50}, TypeError, r"ConsoleLogger\(every=50\): needs an Every"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, error, message):
    with pytest.raises(error, match=message):
        ConsoleLogger(**arguments)


def test_many_values_of_a_family_are_folded_in_text_but_not_in_json():
    norms = {f"grad_norm/{layer}": 0.5 * layer for layer in range(9)}
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1.0, **norms, "throughput/step_seconds": 0.25})
    line = without_time(logged(engine, {}, batches=1))[1]
    assert line == (
        "metrics epoch=1 iteration=1 train/loss=1 grad_norm/*='9 values, 0 to 4' throughput/step_seconds=0.25"
    )
    assert norms.items() <= json.loads(logged(engine, {"format": "json"}, batches=1)[1]).items()
