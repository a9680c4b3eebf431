"""The debugger of a recorded run, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pulsetrain.debugger.recorded import Debugger
from pulsetrain.engine import Events, Every
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, RecordingError
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.handlers import Checkpointer, EarlyStopping, EventRecorder, Fingerprints
from tests.support.models import loader, trainer

T = 1_763_000_000_000_000_000


class Run:
    """Writes a run's log: epochs of four iterations, each with a validation at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.ord = folder, LogWriter(folder / "events"), 0

    def add(self, event: str, epoch: int, iteration: int, engine: str = "trainer", **fields: Any) -> int:
        seq, ord = self.log.last_seq + 1, fields.pop("ord", None)
        if ord is None:
            ord, self.ord = self.ord, self.ord + 1
        self.log.add(LoggedEvent(ord, engine, event, epoch, iteration, seq=seq, t=T + 1000 * seq, **fields))
        return seq

    def epochs(self, count: int, losses: dict[int, Any] | None = None) -> Run:
        self.add("started", 0, 0, ord=-1)
        for epoch in range(1, count + 1):
            self.add("epoch_started", epoch, 4 * epoch - 4)
            for iteration in range(4 * epoch - 3, 4 * epoch + 1):
                loss = (losses or {}).get(iteration, 1.0 / iteration)
                self.add("iteration_started", epoch, iteration)
                self.add("gradients_ready", epoch, iteration, payload={"grad_norm": 0.5 * iteration})
                self.add("iteration_completed", epoch, iteration, output={"loss": loss}, lr=[0.1])
            metrics = {"val/loss": 4.0 - epoch}
            self.add("validation_completed", epoch, 4 * epoch, payload={"metrics": metrics}, metrics=metrics)
        return self

    def end(self) -> Path:
        self.log.end()
        self.log.close()
        return self.folder


@pytest.fixture
def debugger(tmp_path: Path) -> Debugger:
    return Debugger(Run(tmp_path / "run").epochs(3).end())


def seqs(events: Any) -> list[int]:
    return [event.seq for event in events]


class TestMoving:
    def test_it_begins_before_the_first_event_and_ends_at_the_last(self, debugger):
        assert debugger.event is None
        assert debugger.back() is None
        assert debugger.next().event == "started"
        last = debugger.next(10**6)
        assert last.event == "validation_completed"
        assert debugger.next() is None
        assert debugger.event.seq == last.seq

    def test_back_undoes_next(self, debugger):
        debugger.goto(iteration=5)
        before, state = debugger.event.seq, dict(debugger.facts())
        debugger.next(7)
        debugger.back(7)
        assert debugger.event.seq == before
        assert debugger.facts() == state

    @pytest.mark.parametrize("count", [1, 2, 1023, 1024, 1025, 3000, 5000])
    def test_moving_crosses_blocks_forward_and_back(self, tmp_path, count):
        run = Run(tmp_path)
        run.add("started", 0, 0)
        for iteration in range(1, 4001):
            run.add("iteration_completed", 1, iteration)
        debugger = Debugger(run.end())
        debugger.goto(seq=10)
        debugger.next(count)
        assert debugger.event.seq == min(10 + count, 4000)
        debugger.goto(seq=3990)
        debugger.back(count)
        assert (debugger.event.seq if debugger.event else None) == (3990 - count if count <= 3990 else None)

    def test_goto_moves_to_the_first_event(self, debugger):
        assert debugger.goto(iteration=5).event == "iteration_started"
        assert debugger.state.iteration == 5
        assert debugger.goto(epoch=2).event == "epoch_started"
        assert debugger.goto(seq=7).seq == 7
        assert debugger.goto(start=True) is None
        assert debugger.state.iteration == 0
        assert debugger.goto(end=True).iteration == 12

    def test_goto_moves_to_the_next_recorded_event_of_a_sampled_log(self, tmp_path):
        run = Run(tmp_path)
        for iteration in range(10, 100, 10):
            run.add("iteration_completed", 1, iteration)
        assert Debugger(run.end()).goto(iteration=41).iteration == 50

    @pytest.mark.parametrize(
        ("places", "message"),
        [
            ({"iteration": 13}, "its last iteration is 12"),
            ({"epoch": 4}, "its last epoch is 3"),
            ({"seq": 10**9}, "its last seq is 42"),
            ({"iteration": -1}, "whole number"),
            ({"iteration": True}, "whole number"),
            ({}, "needs exactly one of iteration"),
            ({"iteration": 1, "epoch": 1}, "needs exactly one of iteration"),
        ],
    )
    def test_a_position_outside_the_log_is_refused_without_a_move(self, debugger, places, message):
        debugger.goto(seq=9)
        with pytest.raises(ConfigurationError, match=message):
            debugger.goto(**places)
        assert debugger.event.seq == 9

    def test_events_superseded_by_a_resume_are_skipped(self, tmp_path):
        run = Run(tmp_path)
        for iteration in range(1, 6):
            run.add("iteration_completed", 1, iteration, output={"loss": 1.0})
        run.add("exception_raised", 1, 5, ord=-1)
        run.log.rewind(after=1, ord=2, seq=7, t=T)
        run.ord = 2
        again = [run.add("iteration_completed", 1, iteration, output={"loss": 2.0}) for iteration in range(3, 7)]
        debugger = Debugger(run.end())
        assert debugger.faults == []
        assert debugger.goto(iteration=5).seq == again[2]
        assert debugger.goto(iteration=3).seq == again[0]
        passed = [debugger.event.iteration]
        while debugger.back():
            passed.append(debugger.event.iteration)
        assert [iteration for iteration in passed if iteration][-2:] == [2, 1]
        assert debugger.next(3).seq > 4

    def test_an_empty_log_has_only_a_beginning(self, tmp_path):
        writer = LogWriter(tmp_path / "events")
        writer.close()
        debugger = Debugger(tmp_path)
        assert debugger.next() is debugger.back() is debugger.continue_() is None
        assert debugger.around(3) == ([], [])
        with pytest.raises(ConfigurationError, match="holds no events"):
            debugger.goto(iteration=1)

    def test_a_folder_without_a_log_is_refused(self, tmp_path):
        with pytest.raises(RecordingError):
            Debugger(tmp_path)


class TestBreaks:
    def test_continue_stops_at_each_and_then_at_the_end(self, debugger):
        made = debugger.add_break("validation_completed", 'metrics["val/loss"] < 3')
        assert debugger.continue_().epoch == 2
        assert debugger.hit is made
        assert debugger.continue_().epoch == 3
        assert debugger.continue_() is None
        assert debugger.hit is None
        assert debugger.next() is None

    def test_reverse_continue_stops_at_the_same_ones(self, debugger):
        debugger.add_break("validation_completed")
        forward = []
        while debugger.continue_():
            forward.append(debugger.event.seq)
        debugger.goto(end=True)
        backward = [debugger.event.seq]  # the last event is one itself
        while debugger.reverse_continue():
            backward.append(debugger.event.seq)
        assert backward == forward[::-1]
        assert debugger.event is None

    def test_a_condition_alone_stops_at_any_event(self, debugger):
        debugger.add_break(condition="iteration == 6")
        assert debugger.continue_().event == "iteration_started"

    def test_a_deleted_break_does_not_stop(self, debugger):
        debugger.delete_break(debugger.add_break("epoch_started").number)
        assert debugger.continue_() is None
        with pytest.raises(ConfigurationError, match="there are none"):
            debugger.delete_break(1)

    def test_a_misspelt_event_gets_a_suggestion(self, debugger):
        with pytest.raises(ConfigurationError, match="did you mean 'validation_completed'"):
            debugger.add_break("validation_complete")

    def test_a_condition_with_an_error_is_refused(self, debugger):
        with pytest.raises(ConfigurationError, match=r"where: "):
            debugger.add_break("epoch_started", "metrics[")
        assert debugger.breaks == {}

    def test_back_to_moves_to_an_event(self, debugger):
        assert debugger.next_to("validation_completed").epoch == 1
        assert debugger.next_to("validation_completed").epoch == 2
        assert debugger.back_to("epoch_started").epoch == 2
        assert debugger.back_to("epoch_started").epoch == 1
        assert debugger.back_to("epoch_started") is None
        assert debugger.event.event == "epoch_started"


class TestLooking:
    def test_state_is_that_after_the_event(self, debugger):
        debugger.goto(epoch=3)
        assert (debugger.state.epoch, debugger.state.iteration) == (3, 8)
        assert debugger.state.metrics == {"val/loss": 2.0}
        assert debugger.facts()["output"] == {"loss": 1 / 8}
        assert debugger.facts()["learning_rate"] == 0.1

    def test_watched_values_are_the_latest(self, debugger):
        for name in ("train/loss", "val/loss", "grad_norm", "payload.grad_norm", "event"):
            debugger.add_watch(name)
        assert set(debugger.watched().values()) == {None}
        debugger.goto(iteration=6)
        debugger.next()
        assert debugger.watched() == {
            "train/loss": 1 / 5,
            "val/loss": 3.0,
            "grad_norm": 3.0,
            "payload.grad_norm": 3.0,
            "event": "gradients_ready",
        }
        debugger.goto(iteration=2)
        assert debugger.value("train/loss") == 1.0
        assert debugger.value("val_loss") is None

    def test_an_unknown_name_gets_a_suggestion(self, debugger):
        with pytest.raises(ConfigurationError, match="did you mean 'train/loss'"):
            debugger.add_watch("train/los")

    def test_around_shows_the_neighbouring_events(self, debugger):
        debugger.goto(seq=10)
        before, after = debugger.around(3)
        assert (seqs(before), seqs(after)) == ([8, 9, 10], [11, 12, 13])
        assert debugger.around(0) == ([], [])
        debugger.goto(start=True)
        assert [seqs(each) for each in debugger.around(2)] == [[], [0, 1]]

    def test_here_shows_the_position(self, debugger):
        debugger.goto(iteration=5)
        assert debugger.here == "seq 16: trainer's iteration_started, epoch 2, iteration 5"


class TestWhatWentWrong:
    def test_it_begins_before_the_exception_that_ended_the_run(self, tmp_path):
        run = Run(tmp_path).epochs(2)
        run.add("batch_fingerprinted", 2, 8, payload={"batch": 99})
        last = run.add("iteration_started", 3, 9)
        error = {"__type__": "builtins.ValueError", "message": "boom"}
        run.add("exception_raised", 3, 9, ord=-1, payload={"error": error})
        debugger = Debugger(run.end())
        assert str(debugger.faults[0]) == (
            "ValueError: boom, at epoch 3, iteration 9 (seq 31); batch of iteration 9: fingerprint 99"
        )
        assert debugger.event.seq == last

    @pytest.mark.parametrize("first", [1, 2, 7, 11, 12])
    @pytest.mark.parametrize("value", ["NaN", "Infinity"])
    def test_it_starts_before_the_first_of_the_last_non_finite_losses(self, tmp_path, first, value):
        losses = dict.fromkeys(range(first, 13), value)
        debugger = Debugger(Run(tmp_path).epochs(3, losses).end())
        assert debugger.faults[0].event.iteration == first
        assert debugger.next().output == {"loss": value}

    def test_an_anomaly_names_the_rows(self, tmp_path):
        run = Run(tmp_path).epochs(1)
        payload = {"kind": "loss_spike", "value": 9.5, "batch_indices": list(range(20))}
        run.add("anomaly_detected", 1, 4, payload=payload)
        debugger = Debugger(run.end())
        assert "anomaly loss_spike (9.5)" in str(debugger.faults[0])
        assert "rows 0, 1, 2" in str(debugger.faults[0])
        assert "and 4 more" in str(debugger.faults[0])

    def test_earlier_faults_are_listed_after_the_exception(self, tmp_path):
        run = Run(tmp_path).epochs(2, {7: "NaN", 8: "NaN"})
        run.add("exception_raised", 2, 8, ord=-1, payload={"error": {"__type__": "RuntimeError"}})
        faults = Debugger(run.end()).faults
        assert [fault.what for fault in faults] == ["RuntimeError", "the loss is nan"]
        assert faults[1].event.iteration == 7

    def test_an_exception_before_a_resume_is_not_a_fault(self, tmp_path):
        run = Run(tmp_path).epochs(1)
        run.add("exception_raised", 1, 4, ord=-1, payload={"error": {"__type__": "RuntimeError"}})
        run.add("started", 1, 4, ord=-1)
        run.add("iteration_completed", 2, 5, output={"loss": 1.0})
        debugger = Debugger(run.end())
        assert debugger.faults == []
        assert debugger.event is None

    @pytest.mark.parametrize("payload", [None, {}, {"error": None}, {"error": 3}, "text"])
    def test_an_exception_with_an_incomplete_payload_is_shown(self, tmp_path, payload):
        run = Run(tmp_path).epochs(1)
        run.add("exception_raised", 1, 4, ord=-1, payload=payload)
        assert "an exception" in str(Debugger(run.end()).faults[0])


def test_a_real_failed_run_opens_at_its_fault(tmp_path):
    made = trainer(
        {"max_epochs": 3, "validate_every": Every(epochs=1)},
        val_loader=loader(12),
        handlers=[
            Fingerprints(batches=True),
            EventRecorder(tmp_path),
            Checkpointer(tmp_path, every=Every(iterations=5)),
            EarlyStopping(metric="val/loss", patience=2),
        ],
    )

    def fail() -> None:
        raise ValueError("boom")

    made.add_event_handler(Events.ITERATION_COMPLETED(once=13), fail)
    with pytest.raises(ValueError, match="boom"):
        made.train()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    debugger = Debugger(tmp_path)
    assert "ValueError: boom, at epoch 2, iteration 13" in str(debugger.faults[0])
    assert "batch of iteration 13: fingerprint" in str(debugger.faults[0])
    assert debugger.event.event == "iteration_completed"
    assert debugger.state.update == 13
    assert debugger.value("train/loss") == debugger.event.output["loss"]
    handlers = debugger.handlers()
    assert handlers.names == (
        "Fingerprints",
        "EventRecorder",
        "Checkpointer",
        "EarlyStopping",
        "RunSummary",
        "ProgressBar",
    )
    assert handlers.iteration == 10
    assert handlers.states["EarlyStopping(val/loss)"]["counter"] == 0
    assert any("patience=2" in line for line in handlers.lines())
    debugger.goto(iteration=3)
    assert "no checkpoint before iteration 3" in "\n".join(debugger.handlers().lines())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_a_damaged_checkpoint_is_reported_and_does_not_end_the_session(tmp_path):
    Run(tmp_path).epochs(2).end()
    (tmp_path / "checkpoints" / "000000002-checkpoint").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000000002-checkpoint" / "manifest.json").write_text("{")
    debugger = Debugger(tmp_path)
    debugger.goto(end=True)
    assert debugger.handlers().problem is not None


def test_a_damaged_block_is_skipped(tmp_path):
    run = Run(tmp_path)
    for iteration in range(1, 3501):
        run.add("iteration_completed", 1, iteration, output={"loss": 1.0})
    run.end()
    sealed = tmp_path / "events" / "events.jsonl.zst"
    content = bytearray(sealed.read_bytes())
    content[len(content) // 2] ^= 1
    sealed.write_bytes(content)
    debugger = Debugger(tmp_path)
    count = 0
    while debugger.next():
        count += 1
    assert 2000 < count < 3500
    assert debugger.log.damage
    try:
        debugger.goto(iteration=1800)
    except PulsetrainError:
        pytest.fail("the events after the damage can be reached")
