"""`pulsetrain report`: curves that preserve extremes, timelines, and the figure."""

from __future__ import annotations

import json
import math
import random

import pytest

pytest.importorskip("plotly")

from pulsetrain.engine import Events
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents
from pulsetrain.report.curve import POINTS, Curve
from pulsetrain.report.facts import compared, read_facts, settings_of
from pulsetrain.report.figure import figure_of
from pulsetrain.report.marks import CUSTOM_ROWS, LIMIT, OTHERS, Marks
from tests.support.recordings_report import ERROR, Run, T, record, reported, small_run, texts, values


class TestCurve:
    def test_up_to_2000_points_are_drawn_as_they_are(self):
        curve = Curve()
        points = [(3 * n, math.sin(n)) for n in range(POINTS)]
        for at, value in points:
            curve.add(at, value)
        assert values(curve) == points

    @pytest.mark.slow
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
    def test_drawn_points_are_points_of_the_curve_in_order_with_the_extremes_of_every_interval(self, count, limit):
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

    def test_drawing_a_growing_curve_does_not_make_it_coarser(self):
        once, often = Curve(), Curve()
        for n in range(100_000):
            once.add(n, math.sin(n))
            often.add(n, math.sin(n))
            if not n % 100:
                often.points()
        assert values(once) == values(often)

    def test_non_finite_values_are_gaps(self):
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
        # the first has its full weight, each later one `share` of the rest
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
    def test_any_number_of_marks_is_counted(self):
        marks = Marks()
        for n in range(50_000):
            marks.add(n, f"checkpoint {n}")
        assert len(marks) <= LIMIT
        assert sum(mark.count for mark in marks) == 50_000
        first, *_, last = marks
        assert str(first) == "checkpoint 0, and 63 more up to iteration 63"
        assert last.last == 49_999


class TestRecord:
    def test_the_curves_of_a_run_are_read(self, tmp_path):
        found = record(small_run(tmp_path))
        assert list(found.curves) == [
            "grad_norm", "loss, each iteration", "train/loss", "samples_per_second", "val/loss", "val/accuracy",
            "learning_rate", "train/perplexity",
        ]  # fmt: skip
        assert values(found.curves["loss, each iteration"]) == [(n, 3.0 / n) for n in range(1, 13)]
        assert values(found.curves["val/accuracy"]) == [(12, 0.8)]
        assert list(found.validated) == ["val/loss", "val/accuracy"]
        assert len(found.curves["grad_norm"].points()[0]) == 12, "of every update, and not the logged ones"

    def test_the_timeline_shows_what_happened(self, tmp_path):
        found = record(small_run(tmp_path))
        assert texts(found, "start and end") == [(0, "started"), (12, "completed after 1 epoch")]
        assert texts(found, "epochs") == [(12, "epoch 1 completed")]
        assert texts(found, "validations") == [(12, "validated: val/loss 0.7, val/accuracy 0.8")]
        assert texts(found, "checkpoints") == [(12, "checkpoint 000012-best saved, 2.0 MB, best so far")]
        assert texts(found, "anomalies") == []

    def test_rollouts_are_curves_and_marks(self, tmp_path):
        run = Run(tmp_path)
        for n, returns in enumerate([{}, {"rollout/return": 2.5}]):
            run.add("rollout_completed", n, payload={"metrics": {"rollout/reward": 0.5, **returns}, "seconds": 1.0})
            run.step(n + 1, 1.0)
            run.add("policy_updated", n + 1, payload={"metrics": {"policy/kl": 0.25}})
        found = record(run.end())
        assert texts(found, "rollouts") == [
            (0, "rollout: rollout/reward 0.5"),
            (1, "rollout: rollout/reward 0.5, rollout/return 2.5"),
        ]
        assert values(found.curves["rollout/return"]) == [(1, 2.5)]
        assert values(found.curves["policy/kl"]) == [(1, 0.25), (2, 0.25)]
        assert list(found.rolled_out) == ["rollout/reward", "rollout/return"]
        assert (list(found.validated), texts(found, "validations")) == ([], [])

    def test_anomalies_are_marked(self, tmp_path):
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
    def test_the_end_of_the_run_is_marked(self, tmp_path, events, ending):
        run = Run(tmp_path)
        run.step(1, 1.0)
        for event, payload in events:
            run.add(event, 1, payload=payload)
        assert record(run.end()).ending == ending

    def test_events_of_the_user_are_marked_in_a_row_for_each_type(self, tmp_path):
        run = Run(tmp_path)
        run.step(1, 1.0)
        run.add("reward_measured", 1, payload={"mean": 0.25, "note": "first"})
        run.step(2, 1.0)
        run.add("reward_measured", 2, payload={"mean": 0.5})
        run.add("game_won", 7, engine="player")
        found = record(run.end())
        assert {row: [(mark.iteration, str(mark)) for mark in marks] for row, marks in found.custom.items()} == {
            "reward_measured": [(1, "reward_measured: mean 0.25, note first"), (2, "reward_measured: mean 0.5")],
            "game_won": [(2, "game_won of player")],
        }

    def test_the_memory_for_events_of_the_user_is_bounded(self, tmp_path):
        run = Run(tmp_path)
        for n in range(3 * CUSTOM_ROWS):
            run.add(f"event_{n}", n, payload=[n] * 1000)
        found = record(run.end())
        assert [*found.custom] == [*(f"event_{n}" for n in range(CUSTOM_ROWS)), OTHERS]
        assert len(found.custom[OTHERS]) == 2 * CUSTOM_ROWS
        assert all(len(str(mark)) < 100 for marks in found.custom.values() for mark in marks)

    def test_none_of_our_own_events_is_taken_for_one_of_the_user(self, tmp_path):
        run = Run(tmp_path)
        for event in (*Events, *FingerprintEvents):
            run.add(event.value, 1)
        run.log.rewind(after=1, ord=2, seq=run.log.last_seq + 1, t=T)
        assert record(run.end()).custom == {}

    def test_one_checkpoint_of_a_folder_is_the_best_so_far(self, tmp_path):
        run = Run(tmp_path)
        for iteration, folder, is_best in ((1, "a", True), (1, "b", True), (2, "a", True), (3, "a", False)):
            saved = {"path": f"{folder}/00{iteration}", "iteration": iteration, "bytes": 10**6, "is_best": is_best}
            run.add("checkpoint_saved", iteration, payload=saved)
        found = record(run.end())
        assert texts(found, "checkpoints") == [
            (1, "checkpoint 001 saved, 1.0 MB, best until 2"),
            (1, "checkpoint 001 saved, 1.0 MB, best so far"),
            (2, "checkpoint 002 saved, 1.0 MB, best so far"),
            (3, "checkpoint 003 saved, 1.0 MB"),
        ]
        assert [mark.kind for mark in found.marks["checkpoints"]] == ["", "best", "best", ""]

    def test_of_many_checkpoints_one_is_the_best_so_far(self, tmp_path):
        run = Run(tmp_path)
        for n in range(3 * LIMIT):
            saved = {"path": f"a/{n}", "iteration": n, "bytes": 10**6, "is_best": n % 3 == 0}
            run.add("checkpoint_saved", n, payload=saved)
        found = record(run.end())
        best = [mark for mark in found.marks["checkpoints"] if mark.kind == "best"]
        assert [mark.iteration <= 3 * LIMIT - 3 <= mark.last for mark in best] == [True]
        assert str(best[0]).endswith(", best so far among them")

    def test_superseded_events_are_left_out(self, tmp_path):
        run = Run(tmp_path)
        for loss in (1.0, 2.0, 3.0):
            run.step(int(loss), loss)
        run.log.rewind(after=1, ord=2, seq=run.log.last_seq + 1, t=T)
        run.step(2, 20.0)
        found = record(run.end())
        assert values(found.curves["loss, each iteration"]) == [(1, 1.0), (2, 20.0)]

    def test_each_parameter_groups_rate_is_a_curve(self, tmp_path):
        run = Run(tmp_path)
        for n in range(1, 4):
            run.step(n, 1.0, rates=(0.1 * n, 0.1 * n, 0.01 * n))
        found = record(run.end())
        assert [name for name in found.curves if "rate" in name] == ["learning_rate", "learning_rate, group 1"]

    def test_engines_of_any_name_and_outputs_of_any_form_are_read(self, tmp_path):
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

    def test_a_setting_that_a_configuration_leaves_out_has_the_default_it_was_trained_with(self, tmp_path):
        configs = "training: {max_epochs: 2, accumulate: {tokens: 64}}", "training: {optimizer_options: {eps: 0.1}}"
        trained = {"max_epochs": 10, "accumulate": 1, "optimizer_options": {"eps": 0.2, "amsgrad": True}, "seed": 1}
        for folder, config in zip((tmp_path / "given", tmp_path / "left_out"), configs, strict=True):
            folder.mkdir()
            (folder / "config.yaml").write_text(config)
            (folder / "run.json").write_text(json.dumps({"format": 1, "settings": trained}))
        given, left_out = (read_facts(tmp_path / name) for name in ("given", "left_out"))
        rows = {row.key: row.values for row in compared(settings_of([given, left_out]))}
        assert rows == {
            "training.max_epochs": ("2", "10"),
            "training.accumulate.tokens": ("64", "-"),
            "training.optimizer_options.eps": ("0.2", "0.1"),
        }

    @pytest.mark.parametrize("text", ["{", "a: 1\na: 2", "just text", "\x00", pytest.param("[" * 100_000, id="nests")])
    def test_a_broken_configuration_is_reported_on_the_page(self, tmp_path, text):
        (tmp_path / "config.yaml").write_text(text)
        (tmp_path / "run.json").write_text('"text"')
        facts = read_facts(tmp_path)
        assert list(facts.config) == ["config.yaml"]
        assert facts.environment == {}


class TestFigure:
    def test_the_timeline_has_a_row_for_each_event_of_the_user_and_says_what_its_symbols_mean(self, tmp_path):
        one, other = Run(tmp_path / "one"), Run(tmp_path / "other")
        saved = {"path": "a/1", "iteration": 1, "bytes": 10**6, "is_best": True}
        one.add("started", 0)
        one.add("checkpoint_saved", 1, payload=saved)
        one.add("<b>reward_measured_by_the_user", 1, payload={"mean": 0.25})
        other.add("epoch_completed", 1)
        figure = figure_of([reported(run.end(), run.folder.name) for run in (one, other)])
        names = ["start and end", "epochs", "checkpoints", "&lt;b&gt;reward_measured_..."]
        assert figure["layout"]["yaxis"]["ticktext"] == names
        marked = [trace for trace in figure["data"] if trace.get("mode") == "markers"]
        assert [(trace["name"], trace["marker"]["symbol"], int(trace["y"][0])) for trace in marked] == [
            ("one", ["triangle-right"], 0), ("one", ["star"], 2), ("one", ["hexagon"], 3), ("other", ["line-ns"], 1),
        ]  # fmt: skip
        heading = next(each["text"] for each in figure["layout"]["annotations"] if "timeline" in each["text"])
        assert "★ the best checkpoint so far" in heading
        assert "stopped" not in heading

    @pytest.mark.parametrize("metrics", [0, 1, 2, 3, 30])
    @pytest.mark.parametrize("runs", [1, 5])
    def test_panels_do_not_overlap_and_zoom_together(self, tmp_path, metrics, runs):
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
