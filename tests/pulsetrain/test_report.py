"""`pulsetrain report`: what stands on the page, what is never lost from a curve, and what is refused."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from benchmarks.report import measure
from engine.errors import ConfigurationError, RecordingError, RunFolderError
from engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.cli import main
from pulsetrain.report import write_report
from pulsetrain.report.curve import POINTS, Curve
from pulsetrain.report.facts import compared, read_facts, settings_of
from pulsetrain.report.figure import PALETTE, ReportedRun, figure_of
from pulsetrain.report.marks import LIMIT, Marks
from pulsetrain.report.record import RunRecord

T = 1_763_000_000_000_000_000
ERROR = {"__type__": "builtins.ValueError", "message": "no such row"}


class Run:
    """Writes a run's log event by event."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = LogWriter(folder / "events")

    def add(self, event: str, iteration: int, epoch: int = 1, engine: str = "trainer", **fields: Any) -> LoggedEvent:
        seq = self.log.last_seq + 1
        logged = LoggedEvent(seq, engine, event, epoch, iteration, seq=seq, t=T + 10**9 * iteration, **fields)
        self.log.add(logged)
        return logged

    def step(self, iteration: int, loss: Any, rates: tuple[float, ...] = (0.1, 0.1)) -> None:
        self.add("gradients_ready", iteration, payload={"grad_norm": 2.0})
        self.add("iteration_completed", iteration, output={"loss": loss}, lr=list(rates))

    def end(self) -> Path:
        self.log.end()
        self.log.close()
        return self.folder


def small_run(folder: Path, iterations: int = 12) -> Path:
    run = Run(folder)
    run.add("started", 0, 0)
    for iteration in range(1, iterations + 1):
        run.step(iteration, 3.0 / iteration)
    metrics = {"train/loss": 0.5, "learning_rate": 0.1, "grad_norm": 2.0}
    observed = {"metrics": {"samples_per_second": 800.0}}
    run.add("metrics_logged", iterations, payload={"metrics": metrics}, observed=observed)
    run.add("epoch_completed", iterations, metrics={"val/loss": 0.7, "train/perplexity": 2.0})
    run.add("epoch_completed", 3, engine="evaluator", metrics={"loss": 0.7})
    run.add(
        "validation_completed", iterations, payload={"metrics": {"val/loss": 0.7, "val/accuracy": 0.8}, "seconds": 1}
    )
    saved = {"path": "x/checkpoints/000012-best", "iteration": iterations, "bytes": 2_000_000, "is_best": True}
    run.add("checkpoint_saved", iterations, payload=saved)
    run.add("completed", iterations)
    return run.end()


def record(folder: Path) -> RunRecord:
    return RunRecord(EventLog(folder))


def reported(folder: Path, name: str = "run") -> ReportedRun:
    return ReportedRun(name, PALETTE[0], record(folder), read_facts(folder))


def texts(found: RunRecord, row: str) -> list[tuple[int, str]]:
    return [(mark.iteration, str(mark)) for mark in found.marks[row]]


def values(curve: Curve) -> list[tuple[float, float]]:
    return list(zip(*(each.tolist() for each in curve.points()), strict=True))


class TestCurve:
    def test_up_to_2000_points_are_drawn_as_they_are(self):
        curve = Curve()
        points = [(3 * n, math.sin(n)) for n in range(POINTS)]
        for at, value in points:
            curve.add(at, value)
        assert values(curve) == points

    @pytest.mark.parametrize("place", [0, 1, 4095, 77_777, 123_456, 199_999])
    def test_a_single_spike_is_never_lost(self, place):
        curve = Curve()
        for n in range(200_000):
            curve.add(n, {place: 50.0, 199_999 - place: -50.0}.get(n, math.sin(n)))
        drawn = values(curve)
        assert (place, 50.0) in drawn
        assert (199_999 - place, -50.0) in drawn
        assert POINTS / 2 < len(drawn) <= POINTS + 2

    @pytest.mark.parametrize("count", [1, 2001, 4096, 4097, 9001, 50_003])
    @pytest.mark.parametrize("limit", [100, POINTS])
    def test_what_is_drawn_is_of_the_curve_in_its_order_with_every_stretch_s_extremes(self, count, limit):
        draw = random.Random(count)
        points = [(2 * n, draw.gauss(0, 1)) for n in range(count)]
        curve = Curve()
        for point in points:
            curve.add(*point)
        at, drawn = curve.points(limit)
        found = list(zip(at.tolist(), drawn.tolist(), strict=True))
        assert found == sorted(set(found) & set(points))
        assert len(found) <= limit + 2
        assert [found[0], found[-1]] == [points[0], points[-1]]
        extremes = [min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])]
        assert [curve.least, curve.greatest] == [(value, at) for at, value in extremes]
        assert set(extremes) <= set(found)

    def test_memory_does_not_grow(self):
        curve = Curve()
        for n in range(300_000):
            curve.add(n, float(n % 7))
        assert curve._buckets.shape[1] <= POINTS
        assert len(curve._values) <= 2 * 4096

    def test_what_is_not_finite_is_a_gap(self):
        curve = Curve()
        for n in range(10_000):
            curve.add(n, math.nan if 3000 <= n < 6000 or n == 8888 else 1.0)
        at, drawn = curve.points()
        assert all(math.isnan(value) == (3000 <= x < 6000) for x, value in zip(at[1:-1], drawn[1:-1], strict=True))
        smooth_at, smooth = curve.smoothed(100.0, 1.0)
        assert {value for value in smooth if not math.isnan(value)} == {1.0}
        assert any(math.isnan(value) for value in smooth)
        assert smooth_at[-1] == 9999

    def test_smoothing_is_an_exponential_average_over_iterations(self):
        curve = Curve()
        series = [(10 * n, float(n % 3)) for n in range(40)]
        for point in series:
            curve.add(*point)
        _, found = curve.smoothed(length=25.0, most=1.0)
        share = 1 - math.exp(-10 / 25)
        numbers = [value for _, value in series]
        # the first has its whole weight, all later ones `share` of what is left
        expected = numbers[0]
        for place, value in enumerate(numbers):
            expected = value if place == 0 else expected + share * (value - expected)
            assert found[place] == pytest.approx(expected)

    def test_no_point_weighs_more_than_it_may(self):
        curve = Curve()
        for at, value in [(0, 0.0), (10**6, 1.0)]:
            curve.add(at, value)
        _, found = curve.smoothed(length=1.0, most=0.5)
        assert found.tolist() == pytest.approx([0.0, 0.5 / 0.75])


class TestMarks:
    def test_they_are_counted_however_many_there_are(self):
        marks = Marks()
        for n in range(50_000):
            marks.add(n, f"checkpoint {n}")
        assert len(marks) <= LIMIT
        assert sum(mark.count for mark in marks) == 50_000
        first, *_, last = marks
        assert str(first) == "checkpoint 0, and 63 more up to iteration 63"
        assert last.last == 49_999


class TestRecord:
    def test_the_curves_of_a_run(self, tmp_path):
        found = record(small_run(tmp_path))
        assert list(found.curves) == [
            "grad_norm", "loss, each iteration", "train/loss", "samples_per_second", "val/loss", "val/accuracy",
            "learning_rate", "train/perplexity",
        ]  # fmt: skip
        assert values(found.curves["loss, each iteration"]) == [(n, 3.0 / n) for n in range(1, 13)]
        assert values(found.curves["val/accuracy"]) == [(12, 0.8)]
        assert list(found.validated) == ["val/loss", "val/accuracy"]
        assert len(found.curves["grad_norm"].points()[0]) == 12, "of every update, and not the logged ones"

    def test_the_timeline(self, tmp_path):
        found = record(small_run(tmp_path))
        assert texts(found, "start and end") == [(0, "started"), (12, "completed after 1 epoch")]
        assert texts(found, "epochs") == [(12, "epoch 1 completed")]
        assert texts(found, "validations") == [(12, "validated: val/loss 0.7, val/accuracy 0.8")]
        assert texts(found, "checkpoints") == [(12, "checkpoint 000012-best saved, 2.0 MB, the best so far")]
        assert texts(found, "anomalies") == []

    def test_anomalies(self, tmp_path):
        run = Run(tmp_path)
        for iteration, loss in enumerate([1.0, "NaN", "Infinity", "NaN", 1.0, "-Infinity"], 1):
            run.step(iteration, loss)
        run.add("anomaly_detected", 6, payload={"kind": "loss_spike", "value": 9.0, "batch_indices": [4, 2]})
        failed = {"handler": "WandbLogger", "event": "metrics_logged", "error": ERROR}
        run.add("handler_failed", 6, payload=failed)
        run.add("exception_raised", 2, engine="evaluator", payload={"error": ERROR})
        run.add("exception_raised", 6, payload={"error": ERROR})
        found = record(run.end())
        assert texts(found, "anomalies") == [
            (2, "loss, each iteration: NaN, and 2 more up to iteration 4"),
            (6, "loss, each iteration: minus infinite"),
            (6, "loss_spike: 9, batch rows 4, 2"),
            (6, "handler WandbLogger failed at metrics_logged: ValueError: no such row"),
            (6, "exception in evaluator: ValueError: no such row"),
            (6, "exception: ValueError: no such row"),
        ]
        assert found.ending == ("failed", "ValueError: no such row")

    @pytest.mark.parametrize(
        ("events", "ending"),
        [
            ([("completed", None)], ("completed", "completed after 1 epoch")),
            ([("terminate", {"reason": "EarlyStopping: val/loss"}), ("completed", None)],
             ("stopped", "EarlyStopping: val/loss")),
            ([("terminate", {"reason": "max_tokens=9 was reached"}), ("completed", None)],
             ("completed", "max_tokens=9 was reached")),
            ([("terminate", None)], ("stopped", "no reason was given")),
            ([("interrupt", None)], ("stopped", "interrupted")),
            ([("preempted", {"signal": "SIGTERM"})], None),
            ([("completed", None), ("started", None)], None),
        ],
    )  # fmt: skip
    def test_where_it_ended(self, tmp_path, events, ending):
        run = Run(tmp_path)
        run.step(1, 1.0)
        for event, payload in events:
            run.add(event, 1, payload=payload)
        assert record(run.end()).ending == ending

    def test_what_was_computed_again_counts_once(self, tmp_path):
        run = Run(tmp_path)
        for loss in (1.0, 2.0, 3.0):
            run.step(int(loss), loss)
        run.log.rewind(after=1, ord=2, seq=run.log.last_seq + 1, t=T)
        run.step(2, 20.0)
        found = record(run.end())
        assert values(found.curves["loss, each iteration"]) == [(1, 1.0), (2, 20.0)]

    def test_groups_of_parameters_with_rates_of_their_own(self, tmp_path):
        run = Run(tmp_path)
        for n in range(1, 4):
            run.step(n, 1.0, rates=(0.1 * n, 0.1 * n, 0.01 * n))
        found = record(run.end())
        assert [name for name in found.curves if "rate" in name] == ["learning_rate", "learning_rate, group 1"]

    def test_engines_of_other_names_and_outputs_of_other_forms(self, tmp_path):
        run = Run(tmp_path)
        run.add("iteration_completed", 1, engine="gan", output=0.5)
        run.add("iteration_completed", 2, engine="gan", output={"g": 1, "d": "text", "on": True})
        run.add("metrics_logged", 7, engine="other", payload={"metrics": {"fid": 3.0}})
        run.add("metrics_logged", 7, engine="other", payload={"metrics": None})
        found = record(run.end())
        assert list(found.curves) == ["output, each iteration", "g, each iteration", "other: fid"]
        assert values(found.curves["other: fid"]) == [(2, 3.0)]


class TestFacts:
    def test_rows_that_differ_come_first(self):
        rows = compared([{"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}])
        assert [(row.key, row.values, row.differs) for row in rows] == [
            ("b", ("2", "9"), True), ("c", ("3", "-"), True), ("d", ("-", "4"), True), ("a", ("1", "1"), False),
        ]  # fmt: skip

    def test_settings_are_compared_from_files_of_one_kind(self, tmp_path):
        folders = [tmp_path / name for name in ("both", "plain", "none")]
        for folder in folders:
            folder.mkdir()
        for folder in folders[:2]:
            (folder / "run.json").write_text(json.dumps({"settings": {"seed": 1}, "environment": {"threads": 2}}))
        config = "run: x\ntraining: {learning_rate: 3e-4}\nhandlers: [A, {b: [1, 2]}]\n"
        (folders[0] / "config.yaml").write_text(config)
        both, plain, none = (read_facts(folder) for folder in folders)
        written = {"training.learning_rate": "0.0003", "handlers.0": "A", "handlers.1.b": "[1, 2]"}
        assert settings_of([both]) == [written]
        assert settings_of([both, plain]) == [{"training.seed": "1"}] * 2
        assert settings_of([both, none]) == [written, {}]
        assert plain.environment == {"threads": "2"}

    @pytest.mark.parametrize("text", ["{", "a: 1\na: 2", "just text", "\x00"])
    def test_a_broken_configuration_is_said_on_the_page(self, tmp_path, text):
        (tmp_path / "config.yaml").write_text(text)
        (tmp_path / "run.json").write_text('"text"')
        facts = read_facts(tmp_path)
        assert list(facts.config) == ["config.yaml"]
        assert facts.environment == {}


class TestFigure:
    @pytest.mark.parametrize("metrics", [0, 1, 2, 3, 30])
    @pytest.mark.parametrize("runs", [1, 5])
    def test_panels_stand_apart_and_zoom_together(self, tmp_path, metrics, runs):
        found = []
        for number in range(runs):
            run = Run(tmp_path / str(number))
            for n in range(1, 100):
                run.add("metrics_logged", n, payload={"metrics": {f"train/m{k}": n * 1.0 for k in range(metrics)}})
            found.append(reported(run.end(), str(number)))
        layout = figure_of(found)["layout"]
        panels = [axis for axis in layout if axis.startswith("yaxis")]
        assert len(panels) == metrics + 1
        assert all(layout[f"xaxis{n + 2}"]["matches"] == "x" for n in range(metrics))
        places = sorted(
            (*layout[panel]["domain"], *layout[panel.replace("y", "x")].get("domain", (0, 1))) for panel in panels
        )
        for place, (low, high, left, right) in enumerate(places):
            assert 0 <= low < high <= 1
            assert 0 <= left < right <= 1
            for other in places[place + 1 :]:
                assert other[0] > high or other[2] > right or other[3] < left

    def test_a_button_leaves_one_smoothing_to_be_seen(self, tmp_path):
        run = Run(tmp_path)
        for n in range(1, 3000):
            run.step(n, math.sin(n))
        figure = figure_of([reported(run.end())])
        smoothing = figure["layout"]["updatemenus"][0]
        assert [button["label"] for button in smoothing["buttons"]] == ["no smoothing", "light", "strong"]
        seen = []
        for button in smoothing["buttons"]:
            change, traces = button["args"]
            names = [figure["data"][index]["name"] for index in traces]
            seen.append([name for name, opacity in zip(names, change["opacity"], strict=True) if opacity == 1.0][:1])
        assert seen == [["run"], ["run, lightly smoothed"], ["run, strongly smoothed"]]


class TestPage:
    def test_a_page_of_one_run(self, tmp_path, capsys):
        folder = small_run(tmp_path / "one")
        assert main(["report", str(folder), "--into", str(tmp_path / "page.html")]) == 0
        said = capsys.readouterr()
        assert said.out.startswith(f"{tmp_path / 'page.html'}: 1 run, 8 curves, ")
        assert said.err == ""
        page = (tmp_path / "page.html").read_text()
        assert "epoch 1, iteration 12: completed after 1 epoch" in page
        assert '<th scope="row">val/loss <small>lowest</small></th><td>0.7 <small>at 12</small></td>' in page
        assert '<th scope="row">val/accuracy <small>highest</small></th><td>0.8 <small>at 12</small></td>' in page

    def test_nothing_is_loaded_from_anywhere(self, tmp_path):
        page = write_report(small_run(tmp_path / "one"), tmp_path / "page.html").path.read_text()
        assert "default-src 'none'" in page
        assert not re.search(r"<(script|img|iframe)[^>]*\ssrc\s*=|<link\b|@import|url\(http", page)

    def test_the_best_run_and_the_settings_that_differ_are_marked(self, tmp_path):
        folders = [small_run(tmp_path / name) for name in ("a", "b")]
        for rate, folder in enumerate(folders):
            (folder / "config.yaml").write_text(f"run: {folder}\ntraining: {{seed: 0, learning_rate: {rate}}}\n")
        page = write_report(folders, tmp_path / "page.html").path.read_text()
        differing = re.findall(r"<tr class=differs>(.*?)</tr>", page)
        assert differing == ['<th scope="row">training.learning_rate</th><td>0</td><td>1</td>']
        assert page.index("training.learning_rate") < page.index("training.seed")
        assert page.count('<td class="top">') == 4

    def test_names_are_text(self, tmp_path):
        name = "<script>alert(1)<"
        run = Run(tmp_path / name)
        run.add("iteration_completed", 1, output={"</script><b>": 1.0})
        run.add("terminate", 1, payload={"reason": "</script><script>alert(2)"})
        page = write_report(run.end(), tmp_path / "page.html").path.read_text()
        assert not re.search(r"<script>alert|</script><b>", page)
        assert "&lt;script&gt;alert(1)&lt;" in page

    def test_two_runs_of_one_name(self, tmp_path):
        folders = [small_run(tmp_path / name / "run") for name in ("a", "b")]
        page = write_report(folders, tmp_path / "page.html").path.read_text()
        assert f"<title>Report: {folders[0]}, {folders[1]}</title>" in page

    def test_lineage(self, tmp_path):
        parent = small_run(tmp_path / "parent")
        child = Run(tmp_path / "child")
        for n in range(9, 13):
            child.step(n, 1.0)
        child.end()
        facts = {"parent": {"run": str(parent), "iteration": 8, "changed": ["training.learning_rate: 1 -> 2"]}}
        (child.folder / "run.json").write_text(json.dumps(facts))
        page = write_report([parent, child.folder], tmp_path / "page.html").path.read_text()
        assert "forked from parent at iteration 8; changed: training.learning_rate: 1 -&gt; 2" in page
        figure = figure_of([reported(parent), reported(child.folder, "child")])
        marks = [trace for trace in figure["data"] if "hovertext" in trace]
        fork = next(trace for trace in marks if trace["name"] == "child")
        assert fork["x"][0] == 8
        assert fork["hovertext"][0].startswith("forked from")
        lines = [shape for shape in figure["layout"]["shapes"] if shape["type"] == "line"]
        assert {line["x0"] for line in lines} == {8}

    def test_the_run_is_not_changed(self, tmp_path):
        folder = small_run(tmp_path / "run")

        def state() -> dict[str, Any]:
            return {
                str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")
            }

        before = state()
        write_report(folder, tmp_path / "page.html")
        assert state() == before
        assert write_report(folder, folder / "report.html").path.is_file()

    def test_a_damaged_log(self, tmp_path, capsys):
        run = Run(tmp_path / "run")
        for n in range(1, 4000):
            run.step(n, 1.0)
        sealed = run.end() / "events" / "events.jsonl.zst"
        content = bytearray(sealed.read_bytes())
        content[len(content) // 2] ^= 1
        sealed.write_bytes(content)
        assert main(["report", str(run.folder), "--into", str(tmp_path / "page.html")]) == 3
        said = capsys.readouterr().err
        assert said.startswith("pulsetrain: damaged: run: events.jsonl.zst, bytes ")
        page = (tmp_path / "page.html").read_text()
        assert '<div class="damage">' in page
        assert "iteration 3,999" in page

    def test_a_log_of_which_nothing_can_be_read(self, tmp_path):
        sealed = small_run(tmp_path / "run") / "events" / "events.jsonl.zst"
        content = bytearray(sealed.read_bytes())
        magic = content.rindex(b"\x28\xb5\x2f\xfd")
        content[magic + 20] ^= 1
        sealed.write_bytes(content)
        assert write_report(tmp_path / "run", tmp_path / "page.html").damage


class TestBadInput:
    def test_a_folder_without_a_log(self, tmp_path, capsys):
        assert main(["report", str(tmp_path), "--into", str(tmp_path / "page.html")]) == 2
        assert "holds no event log" in capsys.readouterr().err
        assert not (tmp_path / "page.html").exists()

    def test_an_empty_log(self, tmp_path):
        Run(tmp_path / "run").end()
        with pytest.raises(RecordingError, match="run/events: the log holds no event"):
            write_report(tmp_path / "run", tmp_path / "page.html")

    def test_a_file_that_is_there(self, tmp_path, capsys):
        folder, page = small_run(tmp_path / "run"), tmp_path / "page.html"
        page.write_text("mine")
        assert main(["report", str(folder), "--into", str(page)]) == 2
        assert "is there already; choose another file, or write over it with --force" in capsys.readouterr().err
        assert page.read_text() == "mine"
        assert main(["report", str(folder), "--into", str(page), "--force"]) == 0
        assert page.stat().st_size > 10**6

    @pytest.mark.parametrize(
        ("into", "said"),
        [
            ("", "is a folder"),
            ("missing/page.html", "is no folder; make it first"),
            ("/proc/page.html", "cannot be written"),
            ("run/run.json", "whose files stay as they are"),
            ("run/events/page.html", "whose files stay as they are"),
        ],
    )
    def test_places_that_cannot_be_written(self, tmp_path, into, said):
        folder = small_run(tmp_path / "run")
        with pytest.raises(RunFolderError, match=said):
            write_report(folder, tmp_path / into, force=True)

    def test_a_run_that_is_named_twice(self, tmp_path):
        folder = small_run(tmp_path / "run")
        with pytest.raises(ConfigurationError, match="is named twice"):
            write_report([folder, tmp_path / "." / "run"], tmp_path / "page.html")
        with pytest.raises(ConfigurationError, match="names no run"):
            write_report([], tmp_path / "page.html")

    def test_without_plotly(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'pulsetrain\[report\]'"):
            write_report(small_run(tmp_path / "run"), tmp_path / "page.html")

    def test_an_option_of_train(self, tmp_path, capsys):
        assert main(["report", str(tmp_path), "--training.seed", "1"]) == 2
        assert "report has no such option" in capsys.readouterr().err


def test_the_benchmark_runs():
    figures = measure(3000)
    assert set(figures) == {"report, s", "page, MB", "memory, MB"}
