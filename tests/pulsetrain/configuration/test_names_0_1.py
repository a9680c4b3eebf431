"""The names of version 0.1: in class paths, in run folders, and in users' imports."""

from __future__ import annotations

import importlib
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pulsetrain import EventLog, Events, Trainer, diff, verify
from pulsetrain.cli import main
from pulsetrain.configuration.class_paths import find
from pulsetrain.configuration.names_0_1 import MODULES, current_module, current_path
from pulsetrain.configuration.rebuild import rebuild
from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.engine.checkpoint import load_checkpoint
from pulsetrain.engine.recording.diff.fields import differing_fields
from pulsetrain.handlers import EventRecorder

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "runs" / "0.1"
CHECKPOINT = "checkpoints/000000005-checkpoint"
EVENTS = 111  # deterministic ones in the golden log
# Relative. The CPU's vector instructions change losses and norms by up to 2e-7 (ATEN_CPU_CAPABILITY=default); gradients
# scaled by 1.001 before the update change the losses by up to 5e-4.
ROUNDING = 1e-5
ROWS = [  # of the data set, in the batch of each iteration
    [1, 13, 10, 14], [18, 3, 7, 2], [17, 0, 8, 6], [5, 4, 16, 15], [12, 11, 19, 9],
    [13, 16, 11, 19], [8, 10, 17, 18], [14, 1, 12, 15], [3, 6, 9, 5], [4, 7, 2, 0],
    [10, 6, 3, 14], [11, 2, 5, 18], [19, 15, 0, 7], [12, 13, 8, 9], [4, 16, 17, 1],
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of a run that version 0.1 trained; its newest checkpoint is from iteration 5 of 15."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copytree(GOLDEN, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path / "run"
    for name in {"model", "engine"} & (set(sys.modules) - before):
        del sys.modules[name]


def trained_rows(trainer: Trainer) -> list[list[int] | None]:
    """The rows of each batch that it trains on."""
    rows: list[list[int] | None] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: rows.append(engine.data.rows(engine.state.iteration))
    )
    trainer.train()
    return rows


def test_every_renamed_module_is_there() -> None:
    for name in MODULES.values():
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("engine.strategies.SFTStrategy", "pulsetrain.engine.strategies.SFTStrategy"),
        ("engine.strategies.sft.SFTStrategy", "pulsetrain.engine.strategies.sft.SFTStrategy"),
        ("engine.SFTStrategy", "pulsetrain.engine.SFTStrategy"),
        ("engine.metrics.Accuracy", "pulsetrain.engine.metrics.Accuracy"),
        ("engine.schedules.shapes.Cosine", "pulsetrain.engine.schedules.decay.Cosine"),
        ("engine.accumulation.Accumulate", "pulsetrain.engine.step.accumulation.Accumulate"),
        ("engine.loop.Engine", "pulsetrain.engine.events.engine.Engine"),
        ("engine.batches.KeyedLoader", "pulsetrain.engine.data.keyed_loader.KeyedLoader"),
        ("handlers.Checkpointer", "pulsetrain.handlers.Checkpointer"),
        ("handlers.checkpointer.Checkpointer", "pulsetrain.handlers.Checkpointer"),
        ("handlers.loggers.CSVLogger", "pulsetrain.handlers.loggers.CSVLogger"),
        ("pulsetrain.loop.Loop", "pulsetrain.manual_loop.Loop"),
    ],
)
def test_a_class_path_is_found_under_its_new_name(old: str, new: str) -> None:
    assert current_path(old) == new
    assert find(old, "model", {}) is find(new, "model", {})


@pytest.mark.parametrize(
    "path", ["Checkpointer", "model.Net", "pulsetrain.Trainer", "torch.nn.Linear", "engines.Engine"]
)
def test_other_class_paths_stay(path: str) -> None:
    assert current_path(path) == path


def test_a_name_that_is_gone_is_reported_under_its_new_module() -> None:
    with pytest.raises(ValueError, match=r"unknown name in pulsetrain.engine.schedules.decay; choose one of"):
        find("engine.schedules.shapes.Cosin", "model", {})


@pytest.mark.parametrize("layout", ["engine.py", "engine/parts.py"])
def test_a_user_s_own_module_of_that_name_comes_first(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / layout).parent.mkdir(exist_ok=True)
    (tmp_path / layout).write_text("class Net: ...\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "engine"]:
        monkeypatch.delitem(sys.modules, name)
    path = layout.removesuffix(".py").replace("/", ".") + ".Net"
    try:
        assert current_module("engine") is None
        assert find(path, "model", {}).__module__ == path.removesuffix(".Net")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "engine"]:
            del sys.modules[name]


class TestRunFolder:
    def test_resumed_it_trains_on_the_same_rows_and_repeats_each_event_within_rounding(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["train", "run/config.yaml", "--run", "run", "--resume", "latest"]) == 0
        assert "15 iterations, 15 updates, 3 epochs" in capsys.readouterr().out
        resumed = EventLog("run")
        assert all(resumed.is_superseded(event.seq) for event in EventLog(GOLDEN).read() if event.iteration > 5)
        difference = diff(GOLDEN, resumed, rtol=ROUNDING)
        assert not difference, difference.report()
        assert (difference.agreed, difference.unread) == (EVENTS, 0)
        trainer = rebuild(run, Path("again")).trainer
        trainer.load_checkpoint(GOLDEN / CHECKPOINT)
        assert trained_rows(trainer) == ROWS[5:]

    def test_trained_again_it_reaches_the_recorded_checkpoint_within_rounding(self, run: Path) -> None:
        trainer = rebuild(run, Path("again")).trainer
        (recorder,) = (each for each in trainer.handlers if isinstance(each, EventRecorder))
        recorder.repeat(EventLog(GOLDEN))  # a recorder of 0.1 measured each gradient norm
        assert trained_rows(trainer) == ROWS
        difference = diff(GOLDEN, "again", rtol=ROUNDING)
        assert not difference, difference.report()
        assert (difference.agreed, difference.unread) == (EVENTS, 0)
        recorded, now = load_checkpoint(GOLDEN / CHECKPOINT), load_checkpoint(Path("again") / CHECKPOINT)
        assert (now["counters"], now["data"]) == (recorded["counters"], recorded["position"])
        torch.testing.assert_close(now["rng"], recorded["rng"], rtol=0, atol=0)
        assert now["optimizer"].pop("initial_rates")  # which a checkpoint of 0.1 lacks
        for part in ("model", "optimizer"):
            torch.testing.assert_close(now[part], recorded[part], rtol=ROUNDING, atol=ROUNDING / 10)

    @pytest.mark.slow
    def test_verify_reproduces_it_or_stops_at_a_difference_of_rounding(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = verify(run, lambda folder: rebuild(run, folder).trainer)
        assert (found.start, found.end) == (0, 15) or found.divergence is not None
        assert found.missing is None
        if found.divergence is not None:  # on a CPU that rounds differently
            a, b = found.divergence.a, found.divergence.b
            assert not differing_fields(a, b, rtol=ROUNDING), found.report()
        capsys.readouterr()  # what the run logged
        reproduced = main(["verify", "run"]) == 0
        assert reproduced == bool(found)
        assert found.report() == capsys.readouterr().out.removesuffix("\n").replace("run, ", f"{run}, ", 1)

    def test_replays_with_handlers_by_their_old_names(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        handlers = ["handlers.early_stopping.EarlyStopping:patience=1", "handlers.EarlyStopping:patience=2"]
        assert main(["replay", "run", *(word for each in handlers for word in ("--handler", each))]) == 0
        assert capsys.readouterr().out.count("nowhere in 15 iterations") == 2

    def test_is_reported(self, run: Path) -> None:
        pytest.importorskip("plotly")
        assert main(["report", "run", "--into", "page.html"]) == 0
        assert "val/accuracy" in Path("page.html").read_text()

    def test_its_configuration_is_printed_in_new_names(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["config", "run/config.yaml"]) == 0
        config = load_yaml(capsys.readouterr().out)
        assert config["strategy"]["class_path"] == "pulsetrain.engine.strategies.SupervisedStrategy"
        schedule = config["handlers"][2]["init_args"]["schedule"]
        assert schedule["class_path"] == "pulsetrain.engine.schedules.decay.Cosine"

    def test_is_forked(self, run: Path) -> None:
        assert main(["fork", "run", "--at", "5", "--into", "new"]) == 0
        assert main(["train", "new/config.yaml", "--run", "new", "--resume", "latest"]) == 0


@pytest.mark.parametrize("in_checkout", [False, True])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from engine import Events", "'engine' is a name of version 0.1; import pulsetrain.engine\n"),
        ("import handlers", "'handlers' is a name of version 0.1; import pulsetrain.handlers\n"),
        (
            "from pulsetrain.loop import Loop",
            "'pulsetrain.loop' is a name of version 0.1; import pulsetrain.m",
        ),
    ],
)
def test_an_old_name_in_a_users_module_is_one_error_with_file_and_line(
    line: str,
    message: str,
    in_checkout: bool,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    monkeypatch.setattr(sys, "path", [*others, str(ROOT)] if in_checkout else others)
    module = run / "model.py"
    module.write_text(f"import torch\n{line}\n")
    assert main(["train", "run/config.yaml", "--run", "new"]) == 2
    said = capsys.readouterr().err
    assert f"class_path='model.Net': importing model failed: {module}, line 2: {message}" in said
    assert "Traceback" not in said
    module.write_text(
        textwrap.dedent(f"""
        def loaders():
            {line}

        class Net:
            def __init__(self, width: int):
                {line}
    """)
    )
    assert main(["train", "run/config.yaml", "--run", "new"]) == 2
    assert f"in model: {module}, line 7: {message}" in capsys.readouterr().err
