"""`pulsetrain export`: the tools that its files are made for read them back."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import sys
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.cli import export
from pulsetrain.cli.commands.export import add_arguments
from pulsetrain.engine import Events
from pulsetrain.engine.errors import ConfigurationError, RecordingError, RunFolderError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.blocks import SEAM
from pulsetrain.export import perfetto, scalars, scalars_of, write_csv, write_perfetto, write_tensorboard
from pulsetrain.export.scalars import FirstSources
from pulsetrain.handlers.metric_values.step_values import METRIC_EVENTS
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents

T = 1_763_000_000_000_000_000
MS = 1_000_000


class Run:
    """Writes a log with one event per millisecond."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, LogWriter(folder / "events")

    def add(self, event: str, epoch: int = 0, iteration: int = 0, engine: str = "trainer", **fields: Any) -> Run:
        seq = self.log.last_seq + 1
        observed = event in ("started", "completed", "checkpoint_saved", "exception_raised")
        fields = {"t": T + seq * MS, "ord": -1 if observed else seq, **fields}
        self.log.add(LoggedEvent(engine=engine, event=event, epoch=epoch, iteration=iteration, seq=seq, **fields))
        return self

    def iterations(self, epoch: int, first: int, last: int) -> Run:
        for n in range(first, last + 1):
            self.add("iteration_started", epoch, n)
            self.add("gradients_ready", epoch, n, payload={"grad_norm": 0.5 * n})
            loss = "NaN" if n == 3 else 1.0 / n
            self.add("iteration_completed", epoch, n, output={"loss": loss, "accuracy": 0.25 * n}, lr=[0.1, 0.01])
        return self

    def validation(self, epoch: int, n: int) -> Run:
        self.add("validation_started", epoch, n).add("started", 0, 0, "evaluator")
        for batch in (1, 2):
            self.add("iteration_completed", 1, batch, "evaluator", output={"loss": 2.0 * batch})
        metrics = {"val/loss": 3.0 / epoch}
        self.add("completed", 1, 2, "evaluator")
        return self.add(
            "validation_completed", epoch, n, payload={"metrics": metrics}, metrics=metrics, observed={"seconds": 0.5}
        )

    def end(self) -> Path:
        self.log.end()
        self.log.close()
        return self.folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = Run(tmp_path / "run").add("started")
    for epoch in (1, 2):
        run.add("epoch_started", epoch, 2 * epoch - 2).iterations(epoch, 2 * epoch - 1, 2 * epoch)
        run.add("metrics_logged", epoch, 2 * epoch, payload={"metrics": {"train/loss": 99.0, "tokens_per_second": 7.5}})
        run.add("epoch_completed", epoch, 2 * epoch, metrics={"val/loss": 0.0}).validation(epoch, 2 * epoch)
        run.add(
            "checkpoint_saved", epoch, 2 * epoch, payload={"bytes": 10, "iteration": 2}, observed={"seconds": 0.002}
        )
    run.add("reward_measured", 2, 4, payload={"mean": 0.7, "name": "x", "done": True}).add("completed", 2, 4)
    return run.end()


def command(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args([*map(str, words)])
    return export.run(arguments)


def trace_of(run: Path, path: Path) -> list[dict[str, Any]]:
    write_perfetto(EventLog(run), path, "run")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(content)["traceEvents"]
    assert isinstance(events, list)
    return events


def slices_of(events: list[dict[str, Any]]) -> dict[str, list[tuple[str, float, float]]]:
    """Name, start and end in ms of each slice by its track; every slice must end, and slices must nest."""
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    lasting, found = defaultdict(list), defaultdict(list)
    for each in events:
        if each["ph"] == "B":
            lasting[each["tid"]].append(each)
        elif each["ph"] == "E":
            begun = lasting[each["tid"]].pop()
            assert begun["name"] == each["name"]
            assert begun["ts"] <= each["ts"]
            found[tracks[each["tid"]]].append((each["name"], begun["ts"] / 1e3, each["ts"] / 1e3))
        elif each["ph"] == "X":
            found[tracks[each["tid"]]].append((each["name"], each["ts"] / 1e3, (each["ts"] + each["dur"]) / 1e3))
    assert not any(lasting.values())
    return found


class TestPerfetto:
    def test_engines_are_tracks_and_intervals_are_slices(self, run, tmp_path):
        events = trace_of(run, tmp_path / "trace.json")
        slices = slices_of(events)
        assert set(slices) == {"trainer", "evaluator", "trainer: checkpoints"}
        names = [name for name, _, _ in slices["trainer"]]
        assert {name: names.count(name) for name in names} == {"iteration": 4, "epoch": 2, "validation": 2, "run": 1}
        assert slices["trainer"][0] == ("iteration", 2.0, 4.0)
        assert [name for name, _, _ in slices["evaluator"]] == ["run", "run"]
        saved = slices["trainer: checkpoints"][0]
        assert saved[2] - saved[1] == pytest.approx(2.0)

    def test_counters_hold_finite_values_of_each_iteration(self, run, tmp_path):
        counters = defaultdict(list)
        for each in trace_of(run, tmp_path / "trace.json"):
            if each["ph"] == "C":
                counters[each["name"]].append(each["args"]["value"])
        assert counters["train/loss"] == [1.0, 0.5, 0.25]
        assert counters["grad_norm"] == [0.5, 1.0, 1.5, 2.0]
        assert counters["learning_rate"] == [0.1]
        assert counters["val/loss"] == [0.0, 3.0, 1.5]  # without the repetition of the epoch

    def test_other_events_are_instants_with_their_payload(self, run, tmp_path):
        instants = [each for each in trace_of(run, tmp_path / "trace.json") if each["ph"] == "i"]
        reward = next(each for each in instants if each["name"] == "reward_measured")
        assert reward["args"] == {"seq": 33, "epoch": 2, "iteration": 4, "mean": 0.7, "name": "x", "done": True}
        assert "gradients_ready" not in [each["name"] for each in instants]

    def test_the_file_is_compressed_if_its_name_ends_in_gz(self, run, tmp_path):
        assert trace_of(run, tmp_path / "a.json.gz") == trace_of(run, tmp_path / "a.json")

    def test_an_interrupted_run_ends_where_the_log_does(self, tmp_path):
        run = Run(tmp_path / "run").add("started").add("epoch_started", 1).iterations(1, 1, 2)
        run.add("iteration_started", 1, 3)
        slices = slices_of(trace_of(run.end(), tmp_path / "trace.json"))["trainer"]
        assert [name for name, _, _ in slices] == ["iteration", "iteration", "iteration", "epoch", "run"]
        assert {end for _, _, end in slices[2:]} == {8.0}

    def test_an_exception_and_a_new_start_end_open_slices(self, tmp_path):
        run = Run(tmp_path / "run").add("started").add("epoch_started", 1).iterations(1, 1, 1)
        run.add("exception_raised", 1, 1, payload={"error": {"__type__": "ValueError"}})
        run.add("started").add("epoch_started", 1, 1).add("started").iterations(1, 2, 2)
        slices = slices_of(trace_of(run.end(), tmp_path / "trace.json"))["trainer"]
        assert [name for name, _, _ in slices].count("run") == 3

    def test_a_clock_that_was_set_back_makes_no_slice_that_ends_before_it_begins(self, tmp_path):
        run = Run(tmp_path / "run").add("started", t=T + 9 * MS).add("iteration_started", 1, 1, t=T)
        run.add("iteration_completed", 1, 1, t=T + MS)
        slices_of(trace_of(run.end(), tmp_path / "trace.json"))


class TestTensorBoard:
    def read(self, folder: Path) -> dict[str, list[tuple[int, float, float]]]:
        reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        found = reading.EventAccumulator(str(folder), size_guidance={"scalars": 0})
        found.Reload()
        return {
            tag: [(each.step, each.value, each.wall_time) for each in found.Scalars(tag)]
            for tag in found.Tags()["scalars"]
        }

    def test_every_scalar_has_its_name_iteration_and_time(self, run, tmp_path):
        pytest.importorskip("tensorboard")
        count = write_tensorboard(EventLog(run), tmp_path / "board")
        scalars = self.read(tmp_path / "board")
        assert count == sum(map(len, scalars.values()))
        assert [step for step, _, _ in scalars["train/loss"]] == [1, 2, 3, 4]
        assert [value for _, value, _ in scalars["train/accuracy"]] == [0.25, 0.5, 0.75, 1.0]
        assert math.isnan(scalars["train/loss"][2][1])
        assert scalars["train/loss"][0][2] == pytest.approx(T / 1e9 + 0.004, abs=1e-6)
        assert scalars["learning_rate/1"][0][:2] == (1, pytest.approx(0.01))
        assert scalars["grad_norm"][3][:2] == (4, 2.0)
        assert [step for step, _, _ in scalars["val/loss"]] == [2, 4]
        assert scalars["reward_measured/mean"][0][:2] == (4, pytest.approx(0.7))
        assert scalars["tokens_per_second"][0][:2] == (2, 7.5)

    def test_an_evaluators_iterations_count_continuously(self, run, tmp_path):
        pytest.importorskip("tensorboard")
        write_tensorboard(EventLog(run), tmp_path / "board")
        assert [each[:2] for each in self.read(tmp_path / "board")["evaluator/loss"]] == [
            (1, 2),
            (2, 4),
            (3, 2),
            (4, 4),
        ]

    def test_if_it_is_missing_the_extra_is_named(self, run, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
        with pytest.raises(ConfigurationError, match=r"pulsetrain\[tensorboard\]"):
            write_tensorboard(EventLog(run), tmp_path / "board")
        assert not (tmp_path / "board").exists()


class TestCsv:
    def test_each_event_is_a_row_and_each_scalar_a_column(self, run, tmp_path):
        size = write_csv(EventLog(run), tmp_path / "a.csv")
        with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert size == (len(rows), len(rows[0]))
        assert list(rows[0])[:5] == ["epoch", "iteration", "engine", "event", "time"]
        iterated = [row for row in rows if row["event"] == "iteration_completed" and row["engine"] == "trainer"]
        assert [row["iteration"] for row in iterated] == ["1", "2", "3", "4"]
        assert [row["train/loss"] for row in iterated] == ["1.0", "0.5", "nan", "0.25"]
        assert iterated[0]["val/loss"] == ""
        assert datetime.fromisoformat(iterated[0]["time"]).timestamp() == pytest.approx(T / 1e9 + 0.004, abs=1e-5)
        assert "iteration_started" not in {row["event"] for row in rows}

    def test_commas_and_newlines_are_quoted(self, tmp_path):
        run = Run(tmp_path / "run").add("iteration_completed", 1, 1, 'a,"b"\n', output={"x,y": 1})
        write_csv(EventLog(run.end()), tmp_path / "a.csv")
        with (tmp_path / "a.csv").open(encoding="utf-8", newline="") as file:
            [row] = csv.DictReader(file)
        assert row["train/x,y"] == "1"
        assert row["engine"] == 'a,"b"\n'


@pytest.mark.parametrize(
    ("event", "scalars"),
    [
        (LoggedEvent(engine="trainer", event="iteration_completed", output={"train/x": 1, "s": "t"}), {"train/x": 1}),
        (LoggedEvent(engine="trainer", event="iteration_completed", output=0.5), {"train/loss": 0.5}),
        (LoggedEvent(engine="gan", event="gradients_ready", payload={"grad_norm": 1.0}), {"gan/grad_norm": 1.0}),
        (LoggedEvent(engine="trainer", event="e", payload={"a": {"b": 1, "c": [2]}, "f": False}), {"e/a/b": 1}),
        (LoggedEvent(engine="trainer", event="e", payload={"a": "-Infinity", "iteration": 3}), {"e/a": -math.inf}),
        (LoggedEvent(engine="trainer", event="started", payload={"max_epochs": 3}), {}),
        (LoggedEvent(engine="trainer", event="batch_fingerprinted", payload={"batch": 3}), {}),
        (LoggedEvent(engine="trainer", event="e", payload=3, metrics=None, lr=None), {}),
        (LoggedEvent(engine="trainer", event="optimizer_step_completed", payload={"learning_rates": [1.0, 2.0]}),
         {"learning_rate": 1.0, "learning_rate/1": 2.0}),
    ],
)  # fmt: skip
def test_columns_have_the_full_names_of_scalars(event, scalars):
    assert scalars_of(event, "trainer") == scalars


class TestRollouts:
    @pytest.fixture
    def run(self, tmp_path):
        """Two rollouts, one with a return, and a validation; state.metrics holds the latest values."""
        run = Run(tmp_path / "run").add("started").add("epoch_started", 1)
        known: dict[str, float] = {}

        def record(event: str, n: int, **metrics: float) -> None:
            named = {name.replace("__", "/"): value for name, value in metrics.items()}
            known.update(named)
            run.add(event, 1, n, payload={"metrics": named}, metrics={**known})

        for n, returns in ((0, {"rollout__return": 7.0}), (1, {})):
            run.add("rollout_started", 1, n).add("rewards_computed", 1, n, payload={"mean": 0.5, "count": 3})
            record("rollout_completed", n, rollout__reward=0.5 + n, **returns)
            run.iterations(1, n + 1, n + 1)
            record("policy_updated", n + 1, policy__kl=0.25 + n)
        record("validation_completed", 2, val__loss=3.0)
        return run.add("epoch_completed", 1, 2, metrics={**known}).add("completed", 1, 2).end()

    def test_each_event_exports_only_what_it_measured(self, run):
        sources = FirstSources()
        exported = [(event.event, sources.scalars(event, "trainer")) for event in EventLog(run).read()]
        assert [scalars for event, scalars in exported if event == "rollout_completed"] == [
            {"rollout/reward": 0.5, "rollout/return": 7.0},
            {"rollout/reward": 1.5},
        ]
        assert [scalars for event, scalars in exported if event == "policy_updated"] == [
            {"policy/kl": 0.25},
            {"policy/kl": 1.25},
        ]
        assert [scalars for event, scalars in exported if event == "validation_completed"] == [{"val/loss": 3.0}]
        assert [scalars for event, scalars in exported if event == "epoch_completed"] == [{}]

    def test_metrics_computed_by_receivers_are_exported_with_each_validation(self):
        sources = FirstSources()
        for event, accuracy in (
            ("validation_completed", 0.5),
            ("epoch_completed", 0.5),
            ("validation_completed", 0.75),
        ):
            payload = {"metrics": {"val/loss": 1.0}} if event == "validation_completed" else None
            known = {"val/loss": 1.0, "accuracy": accuracy}
            logged = LoggedEvent(engine="trainer", event=event, payload=payload, metrics=known)
            assert sources.scalars(logged, "trainer") == (known if payload else {})

    def test_a_rollout_is_a_slice_in_the_run_and_returns_are_counters(self, run, tmp_path):
        events = trace_of(run, tmp_path / "trace.json")
        names = [name for name, _, _ in slices_of(events)["trainer"]]
        assert names == ["rollout", "iteration", "rollout", "iteration", "epoch", "run"]
        counters = [(each["name"], each["args"]["value"]) for each in events if each["ph"] == "C"]
        assert [value for name, value in counters if name == "rollout/return"] == [7.0]
        assert [value for name, value in counters if name == "policy/kl"] == [0.25, 1.25]
        instants = [each["name"] for each in events if each["ph"] == "i"]
        assert instants.count("rewards_computed") == instants.count("policy_updated") == 2


class TestCommand:
    @pytest.mark.parametrize(
        ("form", "name"),
        [("perfetto", "run.perfetto.json.gz"), ("tensorboard", "run.tensorboard"), ("csv", "run.csv")],
    )
    def test_writes_next_to_the_run_under_its_name_and_leaves_it_unchanged(
        self, run, tmp_path, form, name, monkeypatch
    ):
        pytest.importorskip("tensorboard")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        assert command(run, "--format", form) == 0
        assert [path.name for path in (tmp_path / "here").iterdir()] == [name]
        with pytest.raises(ConfigurationError, match="already exists"):
            command(run / "events", "--format", form)
        assert command(run, "--format", form, "--force") == 0
        assert [path.name for path in (tmp_path / "here").iterdir()] == [name]
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files

    def test_a_path_in_the_run_is_refused(self, run):
        for into in (run, run / "a.csv", run / "events" / "events.jsonl.zst"):
            with pytest.raises(ConfigurationError, match="is in the run folder"):
                command(run, "--format", "csv", "--into", into, "--force")

    def test_force_replaces_only_files_of_its_own_kind(self, run, tmp_path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "thesis.tex").write_text("")
        for form, message in (("csv", "is not a file"), ("tensorboard", r"holds thesis\.tex")):
            with pytest.raises(ConfigurationError, match=message):
                command(run, "--format", form, "--into", tmp_path / "folder", "--force")
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="is not a folder"):
            command(run, "--format", "tensorboard", "--into", tmp_path / "file", "--force")
        assert (tmp_path / "folder" / "thesis.tex").exists()

    def test_a_missing_folder_is_refused(self, run, tmp_path):
        with pytest.raises(ConfigurationError, match="there is no folder"):
            command(run, "--format", "csv", "--into", tmp_path / "nowhere" / "a.csv")

    def test_a_disk_that_cannot_be_written_leaves_nothing(self, run, tmp_path, monkeypatch):
        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(export, "write_csv", full)
        with pytest.raises(RunFolderError, match="No space left on device"):
            command(run, "--format", "csv", "--into", tmp_path / "a.csv")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def test_a_folder_without_a_log_is_refused(self, tmp_path):
        with pytest.raises(RecordingError):
            command(tmp_path, "--format", "csv", "--into", tmp_path / "a.csv")

    @pytest.mark.parametrize("form", ["perfetto", "csv", "tensorboard"])
    def test_the_readable_part_of_a_damaged_log_is_written(self, tmp_path, form, capsys):
        pytest.importorskip("tensorboard")
        run = Run(tmp_path / "run").iterations(1, 1, 1000).end()
        sealed = run / "events" / "events.jsonl.zst"
        content = bytearray(sealed.read_bytes())
        content[len(content) // 2] ^= 1
        sealed.write_bytes(content)
        into = tmp_path / f"out.{form}"
        assert command(run, "--format", form, "--into", into) == 3
        assert "damaged" in capsys.readouterr().err
        if form == "csv":
            assert 1000 < len(into.read_text(encoding="utf-8").splitlines()) < 2000
        elif form == "perfetto":
            slices_of(json.loads(into.read_bytes())["traceEvents"])
        else:
            assert len(TestTensorBoard().read(into)["grad_norm"]) > 500

    def test_an_empty_log_is_exported(self, tmp_path):
        LogWriter(tmp_path / "run" / "events").close()
        assert command(tmp_path / "run", "--format", "csv", "--into", tmp_path / "a.csv") == 0
        assert (tmp_path / "a.csv").read_text() == "epoch,iteration,engine,event,time\n"
        assert trace_of(tmp_path / "run", tmp_path / "a.json")[0]["name"] == "process_name"


def test_the_events_that_an_export_names_exist():
    named = {each for first, last, *_ in perfetto._SPANS for each in (first, last)}
    named |= {perfetto._RAISED, perfetto._SAVED, *perfetto._COUNTED, *scalars.SUMMARIES, *scalars._NOT_MEASURED}
    named |= {*scalars._FULL, scalars._UPDATED, *scalars._ROUNDS}
    assert named - {SEAM} <= {event.value for event in (*Events, *FingerprintEvents)}
    assert {event.value for event in METRIC_EVENTS} == scalars._ROUNDS
    assert {event.value for event in FingerprintEvents} <= scalars._NOT_MEASURED
