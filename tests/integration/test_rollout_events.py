"""The events of rollouts in a Trainer's run: evaluated, logged, recorded, replayed and resumed."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain import Trainer
from pulsetrain.debugger.live import LiveDebugger
from pulsetrain.debugger.recorded import Debugger
from pulsetrain.engine import Events, Every, Phase
from pulsetrain.engine.errors import CheckpointError, MetricNotFoundError
from pulsetrain.engine.recording import EventLog, diff
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.engine.recording.replay.state import METRIC_EVENTS as REPLAYED_METRIC_EVENTS
from pulsetrain.handlers import (
    EMA,
    BestModel,
    Checkpointer,
    ConsoleLogger,
    CSVLogger,
    EarlyStopping,
    EventRecorder,
    JSONLinesLogger,
    Plots,
    ProgressBar,
    ReduceLROnPlateau,
)
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS
from pulsetrain.handlers.recorder.event_recorder import MEASURED
from tests.support.acting import BATCHES, RETURNS, acting
from tests.support.checkpoints import downgraded
from tests.support.models import loader

EACH_ROLLOUT = Every(iterations=BATCHES)
ROLLOUT = ["rollout_started", "rewards_computed", "rollout_completed"]
SEEN = (
    *(Events.ROLLOUT_STARTED, Events.REWARDS_COMPUTED, Events.ROLLOUT_COMPLETED, Events.POLICY_UPDATED),
    *(Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.VALIDATION_COMPLETED, Events.EPOCH_COMPLETED),
    *(Events.METRICS_LOGGED, Events.COMPLETED),
)
COUNTERS = ("epoch", "iteration", "update", "validation_round", "rollout_round")


class Seen:
    """What a handler finds at each event."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def attach(self, engine: Any) -> Seen:
        for event in SEEN:
            for phase in (Phase.ACT, Phase.OBSERVE):
                engine.add_event_handler(event, self._see, phase, phase=phase)
        return self

    def _see(self, engine: Any, event: Any, phase: Phase) -> None:
        state = engine.state
        counters = [getattr(state, name) for name in COUNTERS]
        self.found.append((event.type, phase, event.payload, counters, dict(state.metrics)))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, without what a clock has measured."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.endswith("_per_second")} for row in csv.DictReader(file)]


def observers(folder: Path, stream: Any) -> list[Any]:
    return [
        JSONLinesLogger(folder),
        CSVLogger(folder),
        Plots(folder, formats=("svg",)),
        ConsoleLogger(format="json", stream=stream),
        ProgressBar(stream, clock=lambda: 0.0),
        Seen(),
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recorded run of all rollouts, with validations."""
    acting(val_loader=loader(8), handlers=[EventRecorder(tmp_path / "run")]).train()
    return tmp_path / "run"


def test_the_log_has_rollouts_between_iterations_and_policy_updates_inside_them(run: Path) -> None:
    own = [event for event in EventLog(run).read(engine="trainer") if event.event not in ("metrics_logged", "started")]
    started = [index for index, event in enumerate(own) if event.event == "rollout_started"]
    assert len(started) == len(RETURNS)
    for index in started:
        assert [event.event for event in own[index : index + 4]] == [*ROLLOUT, "iteration_started"]
        assert len({event.iteration for event in own[index : index + 3]}) == 1
        assert own[index + 3].iteration == own[index].iteration + 1
    updated = [index for index, event in enumerate(own) if event.event == "policy_updated"]
    assert [own[index - 1].event for index in updated] == ["iteration_completed"] * len(RETURNS)
    assert [own[index].iteration for index in updated] == [BATCHES * (n + 1) for n in range(len(RETURNS))]


def test_the_log_holds_their_metrics_and_what_was_measured_beside_them(run: Path) -> None:
    rollouts = list(EventLog(run).read(event="rollout_completed"))
    reported = [event.payload["metrics"].get("rollout/return") for event in rollouts]
    assert reported == list(RETURNS)
    assert {event.payload["seconds"] for event in rollouts} == {0.25}
    assert all(event.observed == {"seconds": 0.25} and event.ord >= 0 for event in rollouts)
    assert rollouts[3].metrics["rollout/return"] == 2.0  # state.metrics: of the one before
    assert rollouts[3].metrics["policy/kl"] == 0.03
    assert next(EventLog(run).read(event="rewards_computed")).payload["count"] == 4


def test_what_the_recorder_writes_state_metrics_with_is_what_a_replay_reads() -> None:
    assert frozenset(event.value for event in MEASURED) == REPLAYED_METRIC_EVENTS
    assert set(METRIC_EVENTS) < set(MEASURED)


@pytest.mark.slow
def test_handlers_find_in_a_replay_what_they_found_in_the_run(tmp_path: Path) -> None:
    live, played = io.StringIO(), io.StringIO()
    handlers = observers(tmp_path / "live", live)
    acting(val_loader=loader(8), handlers=[EventRecorder(tmp_path / "run"), *handlers]).train()
    replay, again = Replay(tmp_path / "run"), observers(tmp_path / "replay", played)
    for handler in again:
        handler.attach(replay)
    replay.run()
    assert again[-1].found == handlers[-1].found
    assert again[-1].found[-1][3] == [4, 21, 21, 4, 7]
    assert files(tmp_path / "replay") == files(tmp_path / "live")
    assert _without_times(played) == _without_times(live)


def _without_times(stream: Any) -> list[Any]:
    lines = stream.getvalue().splitlines()
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    return [
        # a replay has neither an optimizer nor a seed
        [{k: v for k, v in each.items() if k not in ("timestamp", "optimizer", "seed")} for each in objects],
        [line for line in lines if not line.startswith("{")],
    ]


@pytest.mark.slow
def test_the_files_of_loggers_hold_the_metrics(tmp_path: Path) -> None:
    stream = io.StringIO()
    acting(handlers=observers(tmp_path, stream)).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rollouts = [line for line in lines if line["event"] == "rollout_completed"]
    assert [line.get("rollout/return") for line in rollouts] == list(RETURNS)
    assert [line["iteration"] for line in rollouts] == [BATCHES * n for n in range(len(RETURNS))]
    assert {line["seconds"] for line in rollouts} == {0.25}
    assert [line["policy/kl"] for line in lines if line["event"] == "policy_updated"][:2] == [0.01, 0.02]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["rollout/return"]) for row in rows if row["rollout/return"]] == [r for r in RETURNS if r]
    assert [float(row["policy/kl"]) for row in rows if row["policy/kl"]] == pytest.approx(
        [0.01 * n for n in range(1, 8)]
    )
    assert {"metrics.svg", "loss.svg"} <= set(files(tmp_path))
    reported = [line for line in _without_times(stream)[0] if line["event"] in ("rollout", "policy")]
    assert [line["event"] for line in reported] == ["rollout", "policy"] * len(RETURNS)
    assert "rollout/return 0.5" in _without_times(stream)[1][-1]


class TestEarlyStopping:
    @staticmethod
    def stopped(folder: Path, **resume: Any) -> Trainer:
        stopping = EarlyStopping("rollout/return", patience=3, mode="max")
        run = acting(handlers=[Checkpointer(folder), stopping])
        run.train(**resume)
        return run

    def test_a_replay_stops_where_the_run_did(self, tmp_path: Path) -> None:
        stopping = EarlyStopping("rollout/return", patience=3, mode="max")
        live = acting(handlers=[EventRecorder(tmp_path), stopping])
        live.train()
        # 2.0 in the third rollout is the best; the fourth reports no return, and does not count
        assert (live.state.rollout_round, live.state.iteration) == (7, 18)
        assert live.state.stop_reason == "early stopping: rollout/return has not improved on 2 for 3 rollouts"
        replay = Replay(tmp_path, obey_terminate=True)
        EarlyStopping("rollout/return", patience=3, mode="max").attach(replay)
        assert replay.run().stop_reason == live.state.stop_reason
        assert (replay.state.iteration, replay.state.rollout_round) == (18, 7)

    def test_other_settings_stop_a_replay_elsewhere(self, run: Path) -> None:
        replay = Replay(run, obey_terminate=True)
        EarlyStopping("policy/kl", patience=2).attach(replay)
        assert replay.run().iteration == 3 * BATCHES

    def test_a_stopped_run_stays_stopped_after_its_checkpoint(self, tmp_path: Path) -> None:
        reasons = [self.stopped(tmp_path).state.stop_reason, self.stopped(tmp_path, resume="latest").state.stop_reason]
        assert reasons == ["early stopping: rollout/return has not improved on 2 for 3 rollouts"] * 2

    def test_a_checkpoint_after_the_rollout_that_ended_the_run_includes_the_end(self, tmp_path: Path) -> None:
        first = self.stopped(tmp_path)
        again = self.stopped(tmp_path, resume=first.save_checkpoint("stopped"))
        assert again.state.stop_reason == first.state.stop_reason
        assert (again.state.rollout_round, again.train_loader.rollouts, again.state.iteration) == (7, 7, 18)

    def test_validations_beside_rollouts_need_not_report_the_metrics_of_rollouts(self) -> None:
        run = acting(val_loader=loader(8), handlers=[EarlyStopping("rollout_return", patience=3, mode="max")])
        run.train()
        assert run.state.iteration == 18

    def test_a_metric_of_the_validation_that_it_lacks_is_an_error_beside_rollouts_too(self) -> None:
        run = acting(val_loader=loader(8), handlers=[EarlyStopping("val/los", mode="min")])
        with pytest.raises(MetricNotFoundError, match=r"EarlyStopping\(metric='val/los'\).*did you mean 'val/loss'"):
            run.train()
        assert run.state.validation_round == 1


def test_the_rate_falls_where_returns_do_not_rise() -> None:
    run = acting(5, handlers=[ReduceLROnPlateau("rollout/return", factor=0.5, patience=0, mode="max")])
    run.train()
    # 1.0 and 2.0 are improvements, 1.5 is not
    assert run.optimizer.param_groups[0]["lr"] == 0.005


@pytest.mark.parametrize("averages", [[], [EMA]])
def test_the_best_models_weights_are_those_that_acted(averages: list[Any]) -> None:
    best = BestModel("rollout/return", mode="max")
    run = acting(handlers=[*(make() for make in averages), best])
    weights: dict[int, Any] = {}
    run.on(Events.ROLLOUT_COMPLETED)(
        lambda: weights.update({run.state.iteration: {k: v.clone() for k, v in run.model.state_dict().items()}})
    )
    run.train()
    assert (best.best_value, best.best_iteration) == (2.0, 6)
    assert all(torch.equal(value, weights[6][name]) for name, value in run.model.state_dict().items())
    assert not all(torch.equal(value, weights[18][name]) for name, value in run.model.state_dict().items())


class TestCheckpointer:
    def test_each_return_is_ranked_once(self, tmp_path: Path) -> None:
        keeping = Checkpointer(tmp_path, EACH_ROLLOUT, keep_last=1, keep_best=3, metric="rollout/return", mode="max")
        acting(handlers=[keeping]).train()
        # saved after each rollout's batches; the first and the fourth rollout reported no return
        found = [(value, int(folder.split("-")[0])) for value, folder in keeping.best]
        assert found == [(2.0, 9), (2.0, 18), (1.5, 15)]
        assert keeping.manager.get_best().name == keeping.best[0][1]

    def test_validations_do_not_rank_a_return_again(self, tmp_path: Path) -> None:
        keeping = Checkpointer(tmp_path, EACH_ROLLOUT, keep_last=1, keep_best=9, metric="rollout/return", mode="max")
        # the first of them, and a save after it, come before any return
        acting(val_loader=loader(8), config={"validate_every": Every(iterations=2)}, handlers=[keeping]).train()
        assert sorted(value for value, _ in keeping.best) == sorted(value for value in RETURNS if value is not None)

    def test_rollouts_do_not_rank_a_validation_again(self, tmp_path: Path) -> None:
        keeping = Checkpointer(tmp_path, EACH_ROLLOUT, keep_last=1, keep_best=9, metric="val/loss")
        run = acting(val_loader=loader(8), handlers=[keeping])
        run.train()
        assert len(keeping.best) == run.state.validation_round == 4
        assert sorted(value for value, _ in keeping.best) == sorted(run.history["val/loss"])

    def test_the_ranking_continues_after_a_checkpoint(self, tmp_path: Path) -> None:
        def keeping() -> Checkpointer:
            return Checkpointer(tmp_path, EACH_ROLLOUT, keep_last=1, keep_best=3, metric="rollout/return", mode="max")

        acting(4, handlers=[keeping()]).train()
        second = keeping()
        acting(handlers=[second]).train(resume="latest")
        assert [value for value, _ in second.best] == [2.0, 2.0, 1.5]

    def test_a_state_of_an_earlier_version_has_no_rollouts(self, tmp_path: Path) -> None:
        first, second = Checkpointer(tmp_path / "a"), Checkpointer(tmp_path / "b")
        state = first.state_dict()
        del state["rollouts"]
        second.load_state_dict(state)
        assert second.state_dict() == first.state_dict()


class TestResume:
    def fails(self, folder: Path, at: int) -> None:
        run = acting(handlers=self.handlers(folder))

        @run.on(Events.ITERATION_COMPLETED(once=at))
        def fail() -> None:
            raise RuntimeError("the power went")

        with pytest.raises(RuntimeError, match="the power went"):
            run.train()
        run.handlers[0].detach()

    @staticmethod
    def handlers(folder: Path) -> list[Any]:
        loggers = [JSONLinesLogger(folder), CSVLogger(folder)]
        return [EventRecorder(folder), *loggers, Checkpointer(folder, Every(iterations=2))]

    @pytest.mark.slow
    @pytest.mark.parametrize("at", [5, 7, 9])
    def test_a_resumed_run_equals_the_run_that_was_never_stopped(self, tmp_path: Path, at: int) -> None:
        whole = acting(handlers=self.handlers(tmp_path / "whole"))
        whole.train()
        self.fails(tmp_path / "run", at)
        run = acting(handlers=self.handlers(tmp_path / "run"))
        run.train(resume="latest")
        assert (run.state.rollout_round, run.state.iteration) == (7, 21)
        assert run.history.get_history() == whole.history.get_history()
        assert not diff(tmp_path / "run", tmp_path / "whole")
        assert table(tmp_path / "run") == table(tmp_path / "whole")
        replay = Replay(tmp_path / "run")
        assert replay.run().rollout_round == 7

    def test_a_filter_on_rollouts_continues_its_count(self, tmp_path: Path) -> None:
        self.fails(tmp_path, 9)
        run = acting(handlers=self.handlers(tmp_path))
        rounds: list[int] = []
        run.on(Events.ROLLOUT_COMPLETED(every=3))(lambda: rounds.append(run.state.rollout_round))
        run.train(resume="latest")
        assert rounds == [6]  # the last checkpoint was made after the eighth iteration, in the third rollout

    @pytest.mark.parametrize("form", [3, 4])
    def test_a_checkpoint_of_an_earlier_version_has_counted_none(self, form: int) -> None:
        state = acting(1).checkpoint_state()
        del state["counters"]["rollout_round"]
        run = acting(1)
        run.state.rollout_round = 5
        run.load_checkpoint_state(downgraded(state, form))
        assert run.state.rollout_round == 0

    def test_a_counter_that_does_not_exist_is_still_an_error(self) -> None:
        state = acting(1).checkpoint_state()
        del state["counters"]["validation_round"]
        with pytest.raises(CheckpointError, match=r"lacks counters\.validation_round"):
            acting(1).load_checkpoint_state(state)


class TestDebugger:
    def test_the_round_and_the_metrics_are_shown(self, run: Path) -> None:
        debugger = Debugger(run)
        debugger.add_break("rollout_completed", 'payload["metrics"]["rollout/return"] == 1.5')
        assert debugger.continue_() is not None
        assert debugger.facts()["rollout_round"] == 5
        assert debugger.value("rollout_return") == 1.5
        assert debugger.value("policy/kl") == 0.04
        debugger.back_to("policy_updated")
        assert debugger.facts()["rollout_round"] == 4
        assert debugger.value("rollout/return") == 2.0  # reported by the third

    def test_a_live_session_stops_at_rollout_events(self) -> None:
        live = LiveDebugger(lambda folder: acting(3, handlers=[EventRecorder(folder)]))
        try:
            event = live.next_to("rollout_completed")
            assert event is not None
            assert event.payload["metrics"] == {"rollout/reward": 0.5}
            assert live.evaluate("state.rollout_round") == 1
            assert list(live.metric_names) == ["rollout/reward"]
            assert live.facts()["metrics"] == {"rollout/reward": 0.5}
        finally:
            live.close()
