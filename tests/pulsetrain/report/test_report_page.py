"""The content of the report's page, and bad input."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

pytest.importorskip("plotly")

from pulsetrain.cli import main
from pulsetrain.engine.errors import ConfigurationError, RecordingError, RunFolderError
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import Checkpointer, EventRecorder
from pulsetrain.report import write_report
from pulsetrain.report.figure import figure_of
from tests.support.models import loader, trainer
from tests.support.recordings_report import Run, reported, small_run


class TestPage:
    def test_a_page_shows_one_run(self, tmp_path, capsys):
        folder = small_run(tmp_path / "one")
        assert main(["report", str(folder), "--into", str(tmp_path / "page.html")]) == 0
        said = capsys.readouterr()
        assert said.out.startswith(f"{tmp_path / 'page.html'}: 1 run, 8 curves, ")
        assert said.err == ""
        page = (tmp_path / "page.html").read_text()
        assert "epoch 1, iteration 12: completed after 1 epoch" in page
        assert '<th scope="row">val/loss <small>lowest</small></th><td>0.7 <small>at 12</small></td>' in page
        assert '<th scope="row">val/accuracy <small>highest</small></th><td>0.8 <small>at 12</small></td>' in page

    def test_the_page_counts_the_events_that_diff_compares(self, tmp_path, capsys):
        for name in ("a", "b"):
            trainer({"max_epochs": 2}, val_loader=loader(8), handlers=[EventRecorder(tmp_path / name)]).train()
        assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
        compared = re.search(r"agree: (\d+) deterministic events", capsys.readouterr().out)
        page = write_report(tmp_path / "a", tmp_path / "page.html").path.read_text()
        counted = re.search(r"<dd>(\d+), of which (\d+) are deterministic", page)
        assert compared is not None
        assert counted is not None
        assert counted[2] == compared[1]
        assert int(counted[1]) == len(EventLog(tmp_path / "a")) > int(compared[1])

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

    @pytest.mark.parametrize("higher", [True, False])
    @pytest.mark.parametrize("metric", ["neg_loss", "loss_of_words", "accuracy_b", "score"])
    def test_the_best_value_is_the_best_in_the_eyes_of_the_run(self, metric, higher, tmp_path):
        class Falling:
            higher_is_better = higher
            value = 1.0

            def reset(self): ...

            def update(self, predicted, true): ...

            def compute(self):
                self.value -= 0.25
                return self.value

        handlers = [EventRecorder(tmp_path / "run"), Checkpointer(tmp_path / "run", metric=f"val/{metric}")]
        run = trainer({"max_epochs": 3}, val_loader=loader(8), metrics={metric: Falling()}, handlers=handlers)
        run.train()
        page = write_report(tmp_path / "run", tmp_path / "page.html").path.read_text()
        rows = re.findall(rf'<th scope="row">val/{metric} <small>(\w+)</small></th><td>(\S+) <small>at (\d+)', page)
        best = handlers[1].manager.get_best()
        expected = ("highest", "0.75", "10") if higher else ("lowest", "0.25", "30")
        assert rows == [expected]
        assert int(best.name.partition("-")[0]) == int(expected[2])

    def test_names_are_text(self, tmp_path):
        name = "<script>alert(1)<"
        run = Run(tmp_path / name)
        run.add("iteration_completed", 1, output={"</script><b>": 1.0})
        run.add("terminate", 1, payload={"reason": "</script><script>alert(2)"})
        page = write_report(run.end(), tmp_path / "page.html").path.read_text()
        assert not re.search(r"<script>alert|</script><b>", page)
        assert "&lt;script&gt;alert(1)&lt;" in page

    def test_two_runs_of_one_name_are_distinguished(self, tmp_path):
        folders = [small_run(tmp_path / name / "run") for name in ("a", "b")]
        page = write_report(folders, tmp_path / "page.html").path.read_text()
        assert f"<title>Report: {folders[0]}, {folders[1]}</title>" in page

    def test_the_lineage_of_forks_is_shown(self, tmp_path):
        parent = small_run(tmp_path / "parent")
        child = Run(tmp_path / "child")
        for n in range(9, 13):
            child.step(n, 1.0)
        child.end()
        facts = {
            "parent": {
                "run": str(parent),
                "iteration": 8,
                "changed": ["training.learning_rate: 1 -> 2"],
                "id": "of the parent",
            }
        }
        (child.folder / "run.json").write_text(json.dumps(facts))
        page = write_report([parent, child.folder], tmp_path / "page.html").path.read_text()
        assert "forked from parent at iteration 8; changed: training.learning_rate: 1 -&gt; 2" in page
        (parent / "run.json").write_text(json.dumps({"id": "of the parent"}))
        moved = parent.rename(tmp_path / "moved")
        page = write_report([moved, child.folder], tmp_path / "after.html").path.read_text()
        assert "forked from moved at iteration 8" in page
        figure = figure_of([reported(moved), reported(child.folder, "child")])
        marks = [trace for trace in figure["data"] if "hovertext" in trace]
        fork = next(trace for trace in marks if trace["name"] == "child")
        assert fork["x"][0] == 8
        assert fork["hovertext"][0].startswith("forked from")
        lines = [shape for shape in figure["layout"]["shapes"] if shape["type"] == "line"]
        assert {line["x0"] for line in lines} == {8}

    @pytest.mark.parametrize("rate", [0.001, -2.0])
    def test_the_axis_of_a_constant_is_near_its_value(self, rate, tmp_path):
        run = Run(tmp_path / "a")
        for iteration in range(1, 4):
            run.step(iteration, 3.0 / iteration, (rate,))
        layout = figure_of([reported(run.end())])["layout"]
        axes = [axis for name, axis in layout.items() if name.startswith("yaxis")]
        limits = [axis["autorangeoptions"] for axis in axes if "autorangeoptions" in axis]
        near = {"clipmin": pytest.approx(rate - 0.1 * abs(rate)), "clipmax": pytest.approx(rate + 0.1 * abs(rate))}
        assert near in limits
        assert len(limits) == 2  # the gradient norm is a constant as well

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

    def test_a_damaged_log_is_reported_and_drawn_as_far_as_it_goes(self, tmp_path, capsys):
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

    def test_an_unreadable_log_is_reported(self, tmp_path):
        sealed = small_run(tmp_path / "run") / "events" / "events.jsonl.zst"
        content = bytearray(sealed.read_bytes())
        magic = content.rindex(b"\x28\xb5\x2f\xfd")
        content[magic + 20] ^= 1
        sealed.write_bytes(content)
        assert write_report(tmp_path / "run", tmp_path / "page.html").damage


class TestBadInput:
    def test_a_folder_without_a_log_is_refused(self, tmp_path, capsys):
        assert main(["report", str(tmp_path), "--into", str(tmp_path / "page.html")]) == 2
        assert "holds no event log" in capsys.readouterr().err
        assert not (tmp_path / "page.html").exists()

    def test_an_empty_log_is_refused(self, tmp_path):
        Run(tmp_path / "run").end()
        with pytest.raises(RecordingError, match="run/events: the log holds no event"):
            write_report(tmp_path / "run", tmp_path / "page.html")

    def test_an_existing_file_is_not_overwritten(self, tmp_path, capsys):
        folder, page = small_run(tmp_path / "run"), tmp_path / "page.html"
        page.write_text("mine")
        assert main(["report", str(folder), "--into", str(page)]) == 2
        assert "exists; choose another file with --into" in capsys.readouterr().err
        assert page.read_text() == "mine"
        assert main(["report", str(folder), "--into", str(page), "--force"]) == 0
        assert page.stat().st_size > 10**6

    @pytest.mark.parametrize(
        ("into", "said"),
        [
            ("", "is a folder"),
            ("missing/page.html", "is not a folder; create it first"),
            ("/proc/page.html", "cannot be written"),
            ("run/run.json", "which is only read"),
            ("run/events/page.html", "which is only read"),
        ],
    )
    def test_paths_that_cannot_be_written_are_refused(self, tmp_path, into, said):
        folder = small_run(tmp_path / "run")
        with pytest.raises(RunFolderError, match=said):
            write_report(folder, tmp_path / into, force=True)

    def test_a_run_named_twice_is_refused(self, tmp_path):
        folder = small_run(tmp_path / "run")
        with pytest.raises(ConfigurationError, match="is named twice"):
            write_report([folder, tmp_path / "." / "run"], tmp_path / "page.html")
        with pytest.raises(ConfigurationError, match="names no run"):
            write_report([], tmp_path / "page.html")

    def test_without_plotly_the_extra_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'pulsetrain\[report\]'"):
            write_report(small_run(tmp_path / "run"), tmp_path / "page.html")

    def test_an_option_of_train_is_refused(self, tmp_path, capsys):
        assert main(["report", str(tmp_path), "--training.seed", "1"]) == 2
        assert "report has no such option" in capsys.readouterr().err
