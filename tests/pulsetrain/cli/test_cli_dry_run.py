"""`pulsetrain train --dry-run`: it runs every part and leaves no files."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import pytest

from pulsetrain.cli import main
from tests.support.programs_command_line import files, train

SPIES = """
from pulsetrain.engine import Events
from pulsetrain.engine.events.cadence import Every

class Spy:
    seen, folders, due = [], [], []

    def __init__(self, folder, every: Every = Every(iterations=50)):
        self.folders.append(folder)
        self.every = every

    def attach(self, engine):
        for event in Events:
            engine.bus.subscribe(event, lambda engine, event: self.seen.append(event.type))
        engine.add_event_handler(self.every.events(), lambda engine: self.due.append(engine.state.iteration))
        return self

class Unsaid(Spy):
    def __init__(self, folder, every: Every | None = None):
        super().__init__(folder, Every(iterations=7, epochs=3) if every is None else every)

    def detach(self):
        self.seen.append("detached")

class Quit:
    def attach(self, engine):
        engine.add_event_handler(Events.STARTED, lambda engine: engine.terminate(reason="no more"))

class Service:
    reaches_out = True

    def __init__(self, address: str = "here"):
        if not address:
            raise ValueError("needs an address")

    def attach(self, engine):
        raise AssertionError("it was attached")
"""
DATA = """
import torch

class Counted(list):
    def __init__(self, rows):
        super().__init__([(torch.ones(4, 4), torch.ones(4, 1))] * rows)
        self.given = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.given += 1
            yield batch

TRAIN, VAL = Counted(40), Counted(30)

def loaders():
    return TRAIN, {"clean": VAL, "other": VAL}
"""


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def dry(*words: str) -> int:
    return train("--dry-run", *words)


def rows(text: str) -> dict[str, str]:
    return {line[:12].strip(): line[12:] for line in text.splitlines()[1:]}


def test_it_reports_what_was_checked_and_leaves_nothing(
    folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files()
    assert dry() == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0] == "dry run; nothing is kept, and the run folder would be runs/tiny-1"
    found = rows(output)
    assert found["model"] == "Net, 49 parameters, fp32 on cpu"
    assert found["batch"] == "(float32 (4, 4), float32 (4, 1))"
    assert found["trained"].startswith("2 batches, 2 updates, mean loss ")
    assert found["validated"].startswith("val: 2 of 5 batches, val/loss ")
    assert found["handlers"].startswith("Checkpointer, CSVLogger, RunSummary, ProgressBar: attached")
    assert found["checkpoint"].startswith("0.0")
    assert " s a batch, and " in found["speed"]
    assert "GB of this machine's" in found["memory"]
    assert found["the run"].startswith("10 batches, about ")
    assert files() == before
    assert not list(temporary.glob("pulsetrain-*"))


def test_no_number_is_used_up(folder: Path, temporary: Path) -> None:
    assert dry() == dry() == train() == 0
    assert [path.name for path in Path("runs").iterdir()] == ["tiny-1"]


def test_handlers_receive_every_kind_of_event_and_their_cadence(folder: Path, temporary: Path) -> None:
    (folder / "spies.py").write_text(SPIES)
    assert dry("--handlers", "[spies.Spy, Checkpointer]") == 0
    import spies  # type: ignore[import-not-found]

    assert {
        "started", "epoch_started", "iteration_completed", "gradients_ready", "optimizer_step_completed",
        "metrics_logged", "validation_completed", "epoch_completed", "checkpoint_saved", "checkpoint_loaded",
        "completed",
    } <= set(spies.Spy.seen)  # fmt: skip
    assert spies.Spy.due == [1, 2]
    assert spies.Spy.folders[0].startswith(str(temporary))


@pytest.mark.parametrize(
    ("every", "due"), [("{iterations: 7}", [1, 2]), ("{epochs: 3}", [2]), ("{updates: 9, seconds: 60}", [1, 2, 2])]
)
def test_a_cadence_is_due_at_each_of_its_units(every: str, due: list[int], folder: Path, temporary: Path) -> None:
    (folder / "spies.py").write_text(SPIES)
    assert dry("--handlers", f"[{{class_path: spies.Spy, init_args: {{every: {every}}}}}, GradientMonitor]") == 0
    import spies  # type: ignore[import-not-found]

    assert spies.Spy.due == due


def test_a_cadence_in_the_constructor_is_shortened_too(folder: Path, temporary: Path) -> None:
    (folder / "spies.py").write_text(SPIES)
    for spec in ("spies.Unsaid", "{class_path: spies.Unsaid, init_args: {every: null}}"):
        assert dry("--handlers", f"[{spec}]") == 0
    import spies  # type: ignore[import-not-found]

    assert spies.Spy.due == [1, 2, 2] * 2


def test_handlers_that_publish_do_so(folder: Path, temporary: Path) -> None:
    (folder / "spies.py").write_text(
        SPIES.replace("self.seen.append(event.type)", 'self.seen.extend(getattr(event.payload, "metrics", ()))')
    )
    assert dry("--handlers", "[spies.Spy, GradientMonitor, Throughput, MemoryMonitor, LRMonitor]") == 0
    import spies  # type: ignore[import-not-found]

    published = {name.partition("/")[0] for name in spies.Spy.seen}
    assert {"grad_norm", "throughput", "memory", "learning_rate"} <= published


def test_a_sweep_of_learning_rates_is_as_short_as_possible(
    folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[int] = []
    monkeypatch.setattr(
        "pulsetrain.handlers.learning_rate.lr_finder.LRFinder.attach",
        lambda self, engine: swept.append(self.iterations),
    )
    for spec in ("LRFinder", "{class_path: LRFinder, init_args: {iterations: 500}}"):
        assert dry("--handlers", f"[{spec}]") == 0
    assert swept == [20, 20]
    assert dry("--handlers", "[{class_path: LRFinder, init_args: {iterations: 3}}]") == 2


def test_handlers_are_detached_at_the_end(folder: Path, temporary: Path) -> None:
    (folder / "spies.py").write_text(SPIES)
    assert dry("--handlers", "[spies.Unsaid]") == 0
    import spies  # type: ignore[import-not-found]

    assert spies.Spy.seen[-1] == "detached"


def test_only_two_batches_are_read_of_each_set(
    folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "counted.py").write_text(DATA)
    assert dry("--data", "counted.loaders", "--handlers=[]") == 0
    import counted  # type: ignore[import-not-found]

    assert (counted.TRAIN.given, counted.VAL.given) == (2, 4)
    output = capsys.readouterr().out
    assert "clean: 2 of 30 batches" in output
    assert "other: 2 of 30 batches" in output
    assert "80 batches, about" in output
    assert "none: no handler is a Checkpointer" in output


HELD_OUT = """
import torch
from pulsetrain.engine.rollouts import TextRollouts

asked = []

class Table(torch.nn.Embedding):
    def __init__(self):
        super().__init__(8, 8)

def reward(prompts, completions):
    asked.append(len(prompts))
    return [1.0] * len(prompts)

def data():
    options = {"max_new_tokens": 2, "prompts_per_rollout": 3}
    return TextRollouts([[1], [2]], reward, **options), TextRollouts([[1]] * 50, reward, **options)
"""


def test_two_batches_of_held_out_prompts_are_answered(
    folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "held_out.py").write_text(HELD_OUT)
    strategy = "--strategy={class_path: GRPOStrategy, init_args: {group_size: 2}}"
    assert dry("--model", "held_out.Table", "--data", "held_out.data", strategy, "--handlers=[]") == 0
    import held_out  # type: ignore[import-not-found]

    assert held_out.asked == [6, 3, 3]  # a rollout, and two batches of the other prompts
    assert rows(capsys.readouterr().out)["validated"].startswith("val: 6 of 50 prompts, val/reward 1, ")


def test_accumulation_continues_to_an_update(folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry("--training.accumulate", "4") == 0
    assert rows(capsys.readouterr().out)["trained"].startswith("4 batches, 1 update, ")


def test_a_bound_that_comes_before_is_kept(folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry("--training.max_epochs=null", "--training.max_iterations=1") == 0
    found = rows(capsys.readouterr().out)
    assert found["trained"].startswith("1 batch, 1 update, ")
    assert found["validated"].startswith("val: 2 of 5")


def test_a_run_that_a_handler_ends_early_is_validated_nevertheless(
    folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry("--handlers", "[{class_path: StepLimit, init_args: {iterations: 1}}]") == 0
    assert rows(capsys.readouterr().out)["validated"].startswith("val: 2 of 5 batches, val/loss ")


def test_a_run_that_is_stopped_before_a_batch_says_so(
    folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "spies.py").write_text(SPIES)
    assert dry("--handlers", "[spies.Quit]") == 0
    assert rows(capsys.readouterr().out)["stopped"] == "before a batch was trained: no more"


def test_nothing_is_sent(folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "spies.py").write_text(SPIES)
    alert = "{class_path: Alert, init_args: {command: [touch, alerted]}}"
    assert dry("--handlers", f"[spies.Service, {alert}, Checkpointer]") == 0
    assert rows(capsys.readouterr().out)["not attached"].startswith("Service, Alert: only made")
    assert not Path("alerted").exists()


def test_arguments_of_handlers_that_are_not_attached_are_checked_too(
    folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "spies.py").write_text(SPIES)
    assert dry("--handlers", "[{class_path: spies.Service, init_args: {address: ''}}]") == 2
    assert "in handlers[0]: ValueError: needs an address" in capsys.readouterr().err


def test_a_folder_of_a_handlers_own_is_left_alone(folder: Path, temporary: Path) -> None:
    before = files()
    elsewhere = "{class_path: Checkpointer, init_args: {folder: elsewhere}}"
    assert dry("--handlers", f"[{elsewhere}, CSVLogger]") == 0
    assert dry("--training.save_every_n_epochs=1", "--training.run_dir=there", "--handlers=[]") == 0
    assert files() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--training.optimizer adamm",
        "--training.warmup_steps 10",
        "--model.init_args.widht 3",
        "--model nowhere.Net",
        "--handlers [CSVLoger]",
        "--data data.nothing",
        "--data.init_args.features 3",
        "--run old",
        "--run config.yaml/x",
        "--run memory://x",
        "--handlers '[{class_path: EarlyStopping, init_args: {metric: val/accuracy}}]'",
    ],
)
def test_errors_are_those_of_the_run(
    words: str, folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "old").mkdir()
    (folder / "old" / "metrics.csv").touch()
    before = files()
    assert dry(*shlex.split(words)) == 2
    output = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert files() == before
    assert not list(temporary.glob("pulsetrain-*"))
    assert train(*shlex.split(words)) == 2
    assert output == [line for line in capsys.readouterr().err.splitlines() if "error: " in line]


def test_a_step_that_fails_leaves_no_bundle_and_mentions_none(
    folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "early.py").write_text(
        "from model import Net\n\nclass Early(Net):\n    def forward(self, x): return 1 / 0\n"
    )
    assert dry("--model", "early.Early", "--handlers", "[CrashBundle, EventRecorder]") == 2
    output = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in output
    assert "bundle" not in output
    assert not list(temporary.glob("pulsetrain-*"))


def test_it_starts_from_the_beginning(folder: Path, temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry("--resume", "latest") == 2
    assert "--dry-run: starts a new run; leave --resume out" in capsys.readouterr().err


def test_the_run_afterwards_is_the_run_without_it(folder: Path, temporary: Path) -> None:
    assert train("--run", "a") == 0
    assert dry() == 0
    assert main(["train", "config.yaml", "--run", "b"]) == 0
    tables = [Path(run, "metrics.csv").read_text().splitlines() for run in ("a", "b")]
    assert tables[0][0] == tables[1][0]
    column = tables[0][0].split(",").index("val/loss")
    assert [line.split(",")[column] for line in tables[0]] == [line.split(",")[column] for line in tables[1]]
