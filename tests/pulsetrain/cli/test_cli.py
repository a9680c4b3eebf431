"""The command line: results, bad input, and resuming."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain.cli import main
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine.checkpoint import CheckpointManager, find_checkpoints, resolve
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.recording.log.run_file import read_run_file
from tests.support.programs_command_line import files, train


def weights(run: str | Path) -> dict[str, Any]:
    manager = CheckpointManager(Path(run) / "checkpoints")
    latest = manager.get_latest()
    assert latest is not None
    return manager.load(latest)["model"]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


CONFUSION = """
    import torch
    from pulsetrain import Events

    class Confusion:
        def attach(self, engine):
            self.handle = engine.add_event_handler(Events.COMPLETED, self.put)
            return self

        def detach(self):
            self.handle.remove()

        def put(self, engine):
            engine.state.metrics |= {"matrix": torch.eye(2), "text": "good", "list": [1.0], "none": None}
            engine.state.metrics |= {"one": torch.tensor([0.5]), "whole": 3}

        def summary(self, columns):
            return ", ".join(columns)
"""


class TestResults:
    def test_a_run_says_where_it_is_and_what_came_out(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert train() == 0
        output = capsys.readouterr()
        inferred = "[info] smaller values are better handler=Checkpointer metric=val/loss"
        progress = next(line for line in output.err.splitlines() if "100%" in line)
        assert progress.startswith("epoch 2/2, iteration 10/10 (100%), val/loss 0.")
        begun = [
            "Training Net with 49 parameters on cpu in fp32, seed 3.",
            "SGD(lr=0.01, momentum=0.9, weight_decay=0), 10 iterations in 2 epochs, 20 samples an epoch, 20 samples in "
            "'val'.",
        ]
        assert output.err.splitlines() == [inferred, "run folder: runs/tiny-1", *begun, progress]
        rows = [line.split(maxsplit=1) for line in output.out.splitlines() if line]
        assert rows[0] == ["stopped", "after 2 epochs"]
        assert rows[1][1].startswith("10 iterations, 10 updates, 2 epochs, ")
        assert float(rows[2][1]) > 0
        assert output.out.splitlines()[-1] == "run folder  runs/tiny-1"
        assert all(line[10:12] == "  " and line[12] != " " for line in output.out.splitlines()[1:])

    def test_the_best_value_and_what_can_be_done_next_are_said(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["pulsetrain"])
        monkeypatch.setattr("shutil.which", lambda name: None)
        handlers = "[{class_path: Checkpointer, init_args: {metric: val/loss, every: {epochs: 1}}}, EventRecorder]"
        assert train("--handlers", handlers, "--training.learning_rate", "0.05", "--training.max_epochs", "6") == 0
        rows = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
        last, best = re.fullmatch(r"(\S+) \(best (\S+)\)", rows["val/loss"]).groups()
        assert float(best) < float(last), "the test needs a run that gets worse"
        assert Path(rows["best saved"]) == resolve("runs/tiny-1/best")
        for name in ("report", "verify"):
            _, _, words = rows[name].partition("pulsetrain ")
            assert words == f"{name} runs/tiny-1"
            assert main(shlex.split(words)) == 0

    def test_the_summary_leaves_out_what_is_not_a_number(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("confusion.py").write_text(textwrap.dedent(CONFUSION))
        assert train("--handlers=[confusion.Confusion]") == 0
        rows = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
        assert (rows["one"], rows["whole"]) == ("0.5000", "3.0000")
        assert not {"matrix", "text", "list", "none"} & set(rows)
        assert "run folder" in rows

    def test_a_final_state_that_could_not_be_saved_has_an_exit_status(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit = Disk.commit

        def full(self: Disk, target: Path, *rest: Any) -> None:
            if int(target.name[:9]) > 5:
                raise OSError(28, "No space left on device")
            commit(self, target, *rest)

        monkeypatch.setattr(Disk, "commit", full)
        assert train() == 4
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("not saved"))
        assert "No space left on device" in line
        assert line.endswith("the newest checkpoint is of iteration 5")

    def test_the_same_command_gives_the_same_run(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        losses = []
        torch.manual_seed(1)
        for _ in range(2):
            assert train() == 0
            losses.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("val/loss")])
        assert losses[0] == losses[1]
        assert equal(weights("runs/tiny-1"), weights("runs/tiny-2"))
        assert train("--training.seed", "4") == 0
        assert not equal(weights("runs/tiny-1"), weights("runs/tiny-3"))

    @pytest.mark.slow
    def test_another_process_gives_the_same_run_too(self, folder: Path) -> None:
        assert train() == 0
        subprocess.run([sys.executable, "-m", "pulsetrain", "train", "config.yaml"], check=True, timeout=300)
        assert equal(weights("runs/tiny-1"), weights("runs/tiny-2"))

    def test_a_setting_may_precede_the_file(self, folder: Path) -> None:
        assert main(["train", "--training.max_epochs", "1", "config.yaml", "--training.learning_rate=3e-4"]) == 0
        saved = (folder / "runs" / "tiny-1" / "config.yaml").read_text()
        assert "max_epochs: 1\n" in saved
        assert "learning_rate: 0.0003\n" in saved


BAD = {
    "optimizer": ("--training.optimizer adamm", "training.optimizer='adamm': unknown; choose one of"),
    "schedule": ("--training.schedule cosin", "training.schedule='cosin': unknown; choose one of"),
    "strategy": ("--strategy supervisd", "strategy: class_path='supervisd': unknown name; choose one of"),
    "handler": ("--handlers [CSVLoger]", "handlers[0]: class_path='CSVLoger': unknown name; choose one of"),
    "handler with a slip": ("--handlers [Chekpointer]", "ProgressBar, "),
    "the nearest handler": ("--handlers [Chekpointer]", "; did you mean 'Checkpointer'?"),
    "a strange handler": ("--handlers [7]", "handlers[0]=7: needs a class path, or a mapping with class_path"),
    "handler beside the file": ("--handlers [beside.Spyy]", "handlers[0]: class_path='beside.Spyy': unknown name in"),
    "its argument": (
        "--handlers '[{class_path: beside.Spy, init_args: {evry: 1}}]'",
        "handlers[0].init_args.evry: unknown argument of Spy; choose one of every, note; did you mean 'every'?",
    ),
    "its type": (
        "--handlers '[{class_path: beside.Spy, init_args: {note: [1]}}]'",
        "handlers[0].init_args.note=[1]: needs text or null",
    ),
    "its cadence": (
        "--handlers '[{class_path: beside.Spy, init_args: {every: 5}}]'",
        "handlers[0].init_args.every=5: needs a mapping with iterations, epochs, updates, seconds",
    ),
    "its cadence's unit": (
        "--handlers '[{class_path: beside.Spy, init_args: {every: {iteration: 5}}}]'",
        "handlers[0].init_args.every.iteration: unknown argument of Every; choose one of epochs, iterations",
    ),
    "loss": ("--strategy.init_args.loss msee", "strategy.init_args.loss='msee': unknown; choose one of "),
    "section": ("--trainig.x 3", "--trainig.x: unknown section; choose one of"),
    "training key": ("--training.max_epoch 3", "training.max_epoch: unknown argument of TrainingConfig"),
    "model key": ("--model.init_args.widht 3", "model.init_args.widht: unknown argument of Net; choose one of width"),
    "spec key": ("--model.init_arg.width 3", "model.init_arg: unknown key; choose one of class_path, init_args"),
    "handler key": (
        "--handlers '[{class_path: CSVLogger, init_args: {evry: 3}}]'",
        "handlers[0].init_args.evry: unknown argument of CSVLogger",
    ),
    "type": ("--training.max_epochs many", "training.max_epochs='many': needs a whole number or null"),
    "range": ("--training.accumulate 0", "training.accumulate=0: needs to be a whole number of at least 1"),
    "two bounds": ("--training.max_updates 3", "training.max_epochs=2, training.max_updates=3: a run has one bound"),
    "warm-up": (
        "--training.warmup_steps 10",
        "training.warmup_steps=10: leaves nothing of the run's total_steps=10; pass a shorter",
    ),
    "schedule option": (
        "--training.schedule linear --training.schedule_options.gamma 1",
        "training.schedule_options.gamma=1: unknown to the schedule 'linear'",
    ),
    "optimizer option": ("--training.optimizer_options.gamma 1", "training.optimizer_options.gamma=1: unknown to"),
    "device": ("--training.device cuda:7", "training.device='cuda:7': is not on this machine"),
    "constructor": ("--model.init_args.width 7", "in model: Net(width=7): needs an even width"),
    "data": ("--data.init_args.rows -1", "in data: RuntimeError: "),
    "no data": ("--data data.nothing", "data: the training set has no batch, its length is 0"),
    "module": ("--model nowhere.Net", "model: class_path='nowhere.Net': there is no module 'nowhere'"),
    "no value": ("--training.seed", "--training.seed: needs a value"),
    "a section": ("--training", "--training: needs a value"),
    "a section's value": ("--training 3", "--training 3: names a whole section"),
    "into a list": ("--handlers.0.every 3", "--handlers.0.every: handlers is a list; set it as a whole"),
    "YAML": ("--training.seed [1", "--training.seed '[1': not valid YAML"),
    "a file as folder": ("--run config.yaml", "run folder config.yaml: is a file; choose another with --run"),
    "a file above": ("--run config.yaml/x", "run folder config.yaml/x: cannot be made: Not a directory"),
    "a URL as folder": ("--run memory://x/run", "run folder memory://x/run: is a URL, and a run folder is on this"),
    "a configured URL": ("--resume latest --run=s3://b/run-{n}", "Checkpoints may be elsewhere: give the URL to the"),
    "a checkpoint's URL": ("--resume nothing://x", "folder 'nothing://x': Protocol not known: nothing; use a path"),
    "no checkpoint there": ("--resume memory://x/000000001-a", "memory://x/000000001-a"),
    "no checkpoint at a file's URL": ("--resume file:///nowhere", "/nowhere: does not exist; "),
    "a run": ("--run old", "run folder old: already holds a run, which is not overwritten; resume it by"),
    "no checkpoint": ("--resume nowhere", "nowhere: does not exist; pass a checkpoint's folder"),
    "latest misspelt": ("--resume lates", "lates: does not exist; pass a checkpoint's folder"),
    "the nearest of latest and best": ("--resume bets", "; did you mean 'best'?"),
    "deep folder": ("--run a/b/c --handlers [CSVLoger]", "unknown name"),
    "shapes": ("--data.init_args.features 3", "shapes cannot be multiplied"),
}


SPY = """
from pulsetrain.engine.events.cadence import Every

class Spy:
    seen = []

    def __init__(self, every: Every = Every(iterations=50), note: str | None = None):
        self.every, self.note = every, note

    def attach(self, engine):
        engine.add_event_handler(self.every.events(), lambda engine: self.seen.append(engine.state.iteration))
        return self
"""


class TestHandlersBesideTheFile:
    def test_an_own_handler_is_found_and_takes_a_cadence(self, folder: Path) -> None:
        (folder / "beside.py").write_text(SPY)
        assert train("--handlers", "[{class_path: beside.Spy, init_args: {every: {iterations: 4}}}]") == 0
        import beside  # type: ignore[import-not-found]

        assert beside.Spy.seen == [4, 8]

    def test_a_module_is_found_beside_the_file_wherever_the_command_runs(
        self, folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (folder / "beside.py").write_text(SPY)
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        words = ["--handlers", "[beside.Spy]", "--run", str(folder / "run")]
        assert main(["train", str(folder / "config.yaml"), *words]) == 0


class TestBadInput:
    @pytest.mark.parametrize("case", BAD)
    def test_a_mistake_is_one_error_and_leaves_nothing(
        self, case: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words, message = BAD[case]
        (folder / "old").mkdir()
        (folder / "old" / "metrics.csv").touch()
        (folder / "beside.py").write_text(SPY)
        before = files()
        assert train(*shlex.split(words)) == 2
        output = capsys.readouterr()
        assert message in output.err
        errors = [line for line in output.err.splitlines() if line.startswith("pulsetrain: error: ")]
        assert len(errors) == 1
        assert "Traceback" not in output.err + output.out
        assert "<class" not in output.err
        assert files() == before

    @pytest.mark.parametrize("name", ["nothing.yaml", "broken.yaml", "."])
    def test_a_file_that_cannot_be_read_is_named(
        self, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "broken.yaml").write_text("a: [1\nb: 2")
        assert main(["train", name]) == 2
        assert capsys.readouterr().err.startswith(f"pulsetrain: error: {name}: ")

    def test_a_batch_that_does_not_fit_is_described(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert train("--data.init_args.features", "3") == 2
        assert "given inputs float32 (4, 3), targets float32 (4, 1)" in capsys.readouterr().err

    def test_the_traceback_is_shown_on_request(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert train("--model.init_args.width", "7", "--traceback") == 2
        output = capsys.readouterr().err
        assert "model.py" in output
        assert output.count("pulsetrain: error: ") == 1

    def test_the_corrected_command_works_with_the_same_folder(self, folder: Path) -> None:
        (folder / "mine" / "run").mkdir(parents=True)
        (folder / "mine" / "run" / "notes.txt").touch()
        for run in ("new/run", "mine/run"):
            assert train("--run", run, "--data.init_args.features", "3") == 2
            assert train("--run", run) == 0
        assert (folder / "mine" / "run" / "notes.txt").exists()

    def test_a_missing_metric_is_reported_at_the_first_validation(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        handlers = "[{class_path: EarlyStopping, init_args: {metric: val/accuracy}}, CSVLogger]"
        assert train("--handlers", handlers) == 2
        output = capsys.readouterr().err.splitlines()[3:]
        assert output[1] == "epoch 1/2, iteration 5/10 (50%)"
        assert output[2] == (
            "pulsetrain: error: EarlyStopping(metric='val/accuracy'): this metric does not exist; there are: val/loss"
        )
        assert output[3:] == ["run folder runs/tiny-1: keeps the results up to the error"]

    def test_a_failure_right_after_a_rewind_keeps_the_run(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "spoil.py").write_text(
            textwrap.dedent("""
                from pulsetrain.engine import Events

                class Spoil:
                    def attach(self, engine):
                        @engine.on(Events.ITERATION_COMPLETED(once=4))
                        def back():
                            engine.rewind(3, 4, "asked to")

                        @engine.on(Events.ITERATION_STARTED)
                        def fail():
                            if engine.rewinds:
                                raise RuntimeError("it broke after the rewind")

                        return self
            """)
        )
        saves = "{class_path: Checkpointer, init_args: {every: {iterations: 1}, keep_last: 9}}"
        assert train("--handlers", f"[{saves}, spoil.Spoil]") == 1
        assert "it broke after the rewind" in capsys.readouterr().err
        assert list((folder / "runs" / "tiny-1" / "checkpoints").glob("000000002-*"))

    def test_a_failure_in_the_middle_keeps_the_run_and_its_traceback(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train("--model", "model.Late") == 1
        output = capsys.readouterr().err
        assert "pulsetrain: error: RuntimeError: it broke in the middle" in output
        assert "Traceback" not in output
        assert "the traceback is in runs/tiny-1/crash.txt" in output
        assert "it broke in the middle" in (folder / "runs" / "tiny-1" / "crash.txt").read_text()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_permission_is_named(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "locked").mkdir(mode=0o500)
        assert train("--run", "locked/run") == 2
        assert "run folder locked/run: cannot be made: Permission denied" in capsys.readouterr().err


class TestResuming:
    def test_latest_resumes_the_run_with_the_last_number(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train("--training.max_epochs", "4") == 0
        assert train() == 0
        assert train("--resume", "latest", "--training.max_epochs", "4") == 0
        assert sorted(os.listdir("runs")) == ["tiny-1", "tiny-2"]
        assert equal(weights("runs/tiny-1"), weights("runs/tiny-2"))
        assert "its config.yaml is kept as it was changed=training.max_epochs: 2 -> 4" in " ".join(
            capsys.readouterr().err.replace("'", "").split()
        )
        assert "max_epochs: 2" in (folder / "runs" / "tiny-2" / "config.yaml").read_text()

    def test_an_unchanged_configuration_is_not_reported(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert train() == train("--resume", "latest") == 0
        assert "changed" not in capsys.readouterr().err

    @pytest.mark.parametrize("words", [[], ["--run", "fixed"]])
    def test_latest_starts_a_run_if_there_is_none(
        self, words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train("--resume", "latest", *words) == 0
        assert "which has no checkpoint yet: starting from the beginning" in capsys.readouterr().err

    def test_a_run_without_a_checkpoint_starts_over_under_the_present_configuration(self, folder: Path) -> None:
        (folder / "fixed" / "checkpoints").mkdir(parents=True)
        (folder / "fixed" / "config.yaml").write_text("training: {seed: 99}\n")
        assert train("--run", "fixed", "--resume", "latest") == 0
        assert "seed: 3" in (folder / "fixed" / "config.yaml").read_text()

    @pytest.mark.slow
    def test_a_path_names_the_checkpoint_and_its_run(self, folder: Path) -> None:
        assert train("--training.max_epochs", "4") == 0
        assert train("--training.seed", "5") == 0
        before = weights("runs/tiny-1")
        checkpoints = sorted(path for path in os.listdir("runs/tiny-1/checkpoints") if path[0] == "0")
        path = f"runs/tiny-1/checkpoints/{checkpoints[-2]}"
        assert train("--resume", path, "--training.max_epochs", "4") == 0
        assert sorted(os.listdir("runs")) == ["tiny-1", "tiny-2"]
        assert equal(weights("runs/tiny-1"), before)
        assert train("--resume", path, "--run", "fork", "--training.max_epochs", "4") == 0
        assert equal(weights("fork"), before)

    @pytest.mark.parametrize("given", ["null", "5"])
    def test_a_run_that_continues_a_checkpoint_elsewhere_records_the_seed_of_the_checkpoint(
        self, given: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        torch.manual_seed(11)
        assert train("--training.seed", "null") == 0
        (path,) = find_checkpoints("runs/tiny-1/checkpoints")[-1:]
        capsys.readouterr()
        torch.manual_seed(12)  # as each process has its own
        longer = ["--training.max_epochs", "3", "--training.seed", given]
        assert train("--resume", str(path), "--run", "new", *longer) == 0
        assert load_yaml(Path("new/config.yaml").read_text())["training"] == {
            "max_epochs": 3, "learning_rate": 1e-2, "optimizer": "sgd", "seed": 11,
        }  # fmt: skip
        assert read_run_file(Path("new"))["seed"] == 11
        warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[warning]")]
        assert any("seed" in line for line in warned) == (given == "5")  # the settings differ by it, or not at all

    def test_a_checkpoint_may_be_named_by_a_url(self, folder: Path) -> None:
        elsewhere = "--handlers=[{class_path: Checkpointer, init_args: {folder: 'memory://cli/run'}}]"
        assert train("--training.max_epochs", "4") == 0
        assert train(elsewhere) == 0
        (path,) = find_checkpoints("memory://cli/run/checkpoints")[-1:]
        assert train("--resume", path, "--run", "fork", "--training.max_epochs", "4") == 0
        assert equal(weights("fork"), weights("runs/tiny-1"))

    def test_a_url_of_a_file_is_a_path(self, folder: Path) -> None:
        assert train() == 0
        before = weights("runs/tiny-1")
        assert train("--training.max_epochs", "1", "--run", "short") == 0
        (path,) = find_checkpoints("short/checkpoints")[-1:]
        assert train("--resume", (folder / path).as_uri()) == 0
        assert sorted(os.listdir("runs")) == ["tiny-1"]
        assert equal(weights("short"), before)

    def test_a_checkpoint_of_another_model_changes_nothing(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train() == 0
        before = {path: Path(path).read_bytes() for path in files() if Path(path).is_file()}
        assert train("--resume", "latest", "--model.init_args.width", "16") == 2
        assert "weights do not fit the model" in capsys.readouterr().err
        assert {path: Path(path).read_bytes() for path in files() if Path(path).is_file()} == before
