"""From a configuration to a trainer: class paths, checked arguments, and run folders."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsetrain.config import TrainingConfig
from pulsetrain.configuration.assemble import assemble
from pulsetrain.configuration.claim import Claim, resolve_folder
from pulsetrain.configuration.class_paths import look_in
from pulsetrain.configuration.instantiate import instantiate
from pulsetrain.configuration.messages import in_settings
from pulsetrain.configuration.parse import read_config
from pulsetrain.configuration.rebuild import rebuild
from pulsetrain.engine import Every, PretrainStrategy, SupervisedStrategy
from pulsetrain.engine.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    MetricNotFoundError,
    PulsetrainError,
    RunFolderError,
)
from pulsetrain.engine.step.accumulation import Accumulate
from pulsetrain.handlers import Checkpointer, CSVLogger, ProgressBar, RunSummary

MODEL = """
    from torch import nn

    class Net(nn.Linear):
        width = {width}

        def __init__(self, bias: bool = True):
            super().__init__({width}, 1, bias)
"""
DATA = """
    import torch

    def batches(rows: int = 8):
        inputs = torch.randn(rows, {width})
        return [(inputs, inputs.sum(1, keepdim=True))]
"""
CONFIG = """
    run: runs/a-{n}
    model: model.Net
    data: data.batches
    strategy: {class_path: supervised, init_args: {loss: mse}}
    handlers: [CSVLogger]
"""


@pytest.fixture(autouse=True)
def imports_of_this_test_alone() -> Iterator[None]:
    path, names = list(sys.path), ("model", "data", "parts", "parts.model")
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield
    sys.path[:] = path
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def write(folder: Path, width: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(textwrap.dedent(MODEL.format(width=width)))
    (folder / "data.py").write_text(textwrap.dedent(DATA.format(width=width)))
    (folder / "config.yaml").write_text(textwrap.dedent(CONFIG))
    return folder / "config.yaml"


def assembled(path: Path, folder: str | Path, resume: str | None = None, **overrides: str) -> Any:
    config = read_config(path, {key.replace("__", "."): value for key, value in overrides.items()})
    return assemble(config, path.parent, folder, resume=resume)


class TestClassPaths:
    def test_modules_are_found_beside_the_configuration(self, tmp_path: Path) -> None:
        trainer = assembled(write(tmp_path / "one"), tmp_path / "run").trainer
        assert trainer.model.width == 4
        assert sys.modules["model"].__file__ == str(tmp_path / "one" / "model.py")

    def test_two_configurations_may_call_their_modules_the_same(self, tmp_path: Path) -> None:
        one, two = write(tmp_path / "one", width=4), write(tmp_path / "two", width=5)
        widths = [assembled(path, tmp_path / f"run{i}").trainer.model.width for i, path in enumerate((one, two, one))]
        assert widths == [4, 5, 4]

    def test_packages_are_found_too(self, tmp_path: Path) -> None:
        for width in (4, 5):
            path = write(tmp_path / str(width), width)
            package = path.parent / "parts"
            package.mkdir()
            (path.parent / "model.py").rename(package / "model.py")
            trainer = assembled(path, tmp_path / f"run{width}", model="parts.model.Net").trainer
            assert trainer.model.width == width

    def test_modules_that_were_already_imported_are_left_alone(self, tmp_path: Path) -> None:
        here = sys.modules[__name__]
        look_in(Path(__file__).parent)
        look_in(tmp_path)
        assert sys.modules[__name__] is here
        assert str(Path(__file__).parent) not in sys.path[:1]

    def test_a_module_that_fails_says_so(self, tmp_path: Path) -> None:
        path = write(tmp_path / "one")
        (path.parent / "model.py").write_text("def broken(:")
        with pytest.raises(
            ConfigurationError, match=r"model: class_path='model.Net': importing model failed: SyntaxErr"
        ):
            assembled(path, tmp_path / "run")

    @pytest.mark.parametrize(
        ("statement", "remedy"),
        [
            ("import mod", "install the package that provides 'mod', or put the module beside the configuration file"),
            ("from sklearn.datasets import load_digits", "pip install scikit-learn"),
        ],
    )
    def test_a_missing_package_is_named_with_what_installs_it(
        self, statement: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("sklearn", "sklearn.datasets"):  # another test may have imported it
            monkeypatch.setitem(sys.modules, name, None)
        path = write(tmp_path / "one")
        (path.parent / "model.py").write_text(statement)
        with pytest.raises(ConfigurationError, match=r"importing model failed: ") as raised:
            assembled(path, tmp_path / "run")
        assert str(raised.value).endswith(f"; {remedy}")

    @pytest.mark.parametrize(
        ("name", "kind"), [("pretrain", PretrainStrategy), ("SupervisedStrategy", SupervisedStrategy)]
    )
    def test_parts_of_the_library_need_no_module(self, tmp_path: Path, name: str, kind: type) -> None:
        handlers = "[CSVLogger, {class_path: Checkpointer, init_args: {every: {epochs: 2}}}]"
        trainer = assembled(write(tmp_path), tmp_path / "run", strategy=name, handlers=handlers).trainer
        assert type(trainer.strategy) is kind
        assert [type(handler) for handler in trainer.handlers] == [CSVLogger, Checkpointer, RunSummary, ProgressBar]
        assert trainer.handlers[1].every == Every(epochs=2)
        assert trainer.handlers[0].path.parent == trainer.handlers[1].folder == tmp_path / "run"

    def test_values_with_fields_are_written_as_mappings(self, tmp_path: Path) -> None:
        path = write(tmp_path)
        for text, rule in (
            ("4", Accumulate(batches=4)),
            ("{tokens: 4096}", Accumulate(tokens=4096)),
            ("{schedule: {0: 1, 5: 2}}", Accumulate(schedule={0: 1, 5: 2})),
        ):
            section = read_config(path, {"training.accumulate": text})["training"]
            config = instantiate({"class_path": TrainingConfig, "init_args": section}, "training", settings="training")
            assert config.accumulation == rule


class TestMessages:
    def test_a_schedule_among_the_handlers_is_located_there(self, tmp_path: Path) -> None:
        step = "{class_path: pulsetrain.engine.schedules.Step, init_args: {initial_lr: 0.1, step_size: 0}}"
        handlers = f"[{{class_path: LRScheduler, init_args: {{schedule: {step}}}}}]"
        with pytest.raises(ConfigurationError, match=r"^handlers\[0\]\.init_args\.schedule\.init_args\.step_size=0: "):
            assembled(write(tmp_path), tmp_path / "run", handlers=handlers, training__schedule="null")

    def test_two_schedulers_are_rejected_under_the_section_they_are_in(self, tmp_path: Path) -> None:
        constant = "{class_path: pulsetrain.engine.schedules.Constant, init_args: {initial_lr: 0.1}}"
        one = f"{{class_path: LRScheduler, init_args: {{schedule: {constant}}}}}"
        with pytest.raises(ConfigurationError, match=r"^handlers=\[LRScheduler, LRScheduler\]: .*composed by >>"):
            assembled(write(tmp_path), tmp_path / "run", handlers=f"[{one}, {one}]")
        with pytest.raises(
            ConfigurationError, match=r"^training.schedule='linear': a handler LRScheduler .*null in YAML\) leaves it"
        ):
            assembled(write(tmp_path), tmp_path / "run", handlers=f"[{one}]", training__schedule="linear")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (
                ConfigurationError("the strategy", "TrainingConfig", accumulate=Accumulate(tokens=64)),
                "training.accumulate.tokens=64: the strategy",
            ),
            (ConfigurationError("needs", "TrainingConfig", optimizer="lion"), "training.optimizer='lion': needs"),
            (
                ConfigurationError("needs", "TrainingConfig", schedule_options={"gamma": 2}),
                "training.schedule_options.gamma=2: needs",
            ),
            (
                ConfigurationError(
                    "of {the run's total_steps}", "TrainingConfig", warmup_steps=1, **{"the run's total_steps": 2}
                ),
                "training.warmup_steps=1: of the run's total_steps=2",
            ),
            (
                ConfigurationError("PretrainStrategy", "Trainer", metrics={"perplexity": ...}),
                "metrics.perplexity: PretrainStrategy",
            ),
            (ArgumentTypeError("needs", "Trainer.train", resume="latest"), "--resume='latest': needs"),
            (
                MetricNotFoundError("waits", "EarlyStopping", metric="val/loss"),
                "EarlyStopping(metric='val/loss'): waits",
            ),
        ],
    )
    def test_errors_that_depend_on_the_machine_or_the_run_name_settings_too(
        self, error: PulsetrainError, message: str
    ) -> None:
        error.add_note("at iteration 3")
        found = in_settings(error)
        assert (type(found), str(found), found.__notes__) == (type(error), message, ["at iteration 3"])


class TestReproducibility:
    def test_the_seed_decides_the_first_weights(self, tmp_path: Path) -> None:
        path = write(tmp_path)
        first, again, other = (
            assembled(path, tmp_path / f"run{index}", training__seed=str(seed)).trainer.model.weight
            for index, seed in enumerate((1, 1, 2))
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_what_the_data_draws_does_not_depend_on_the_model(self, tmp_path: Path) -> None:
        path = write(tmp_path)
        one = assembled(path, tmp_path / "one", model__init_args__bias="true").trainer
        two = assembled(path, tmp_path / "two", model__init_args__bias="false").trainer
        assert torch.equal(one.train_loader[0][0], two.train_loader[0][0])

    @pytest.mark.parametrize("given", [{}, {"training__seed": "null"}])
    def test_a_seed_that_is_not_configured_is_torchs_and_is_recorded_and_used_again(
        self, tmp_path: Path, given: dict[str, str]
    ) -> None:
        path, made = write(tmp_path), {}
        for seed in (11, 12):
            torch.manual_seed(seed)  # as each process has its own
            made[seed] = assembled(path, tmp_path / f"run{seed}", **given).trainer
            assert made[seed].seed == seed
            assert read_config(tmp_path / f"run{seed}" / "config.yaml", {})["training"] == {"seed": seed}
        assert not torch.equal(made[11].model.weight, made[12].model.weight)
        again = {
            "resumed": assembled(path, tmp_path / "run11", resume="latest", **given),
            "rebuilt": rebuild(tmp_path / "run11", tmp_path / "other"),
        }
        for assembly in again.values():
            assert assembly.trainer.seed == 11
            assert torch.equal(assembly.trainer.model.weight, made[11].model.weight)


class TestFolders:
    def test_the_next_free_number_is_taken(self, tmp_path: Path) -> None:
        path = write(tmp_path)
        for taken in ("a-1", "a-7", "a-x", "b-9"):
            (tmp_path / "runs" / taken).mkdir(parents=True)
        assert assembled(path, f"{tmp_path}/runs/a-{{n}}").folder == tmp_path / "runs" / "a-8"
        assert assembled(path, f"{tmp_path}/new/a-{{n}}").folder == tmp_path / "new" / "a-1"

    def test_latest_is_the_highest_number_with_a_run_or_the_first(self, tmp_path: Path) -> None:
        pattern = f"{tmp_path}/runs/a-{{n}}"
        assert resolve_folder(pattern, resume="latest") == tmp_path / "runs" / "a-1"
        for number in (2, 10):
            (tmp_path / "runs" / f"a-{number}" / "checkpoints").mkdir(parents=True)
        (tmp_path / "runs" / "a-11").mkdir()
        assert resolve_folder(pattern, resume="latest") == tmp_path / "runs" / "a-10"

    def test_a_checkpoint_by_its_path_stays_in_its_run_by_default(self, tmp_path: Path) -> None:
        checkpoint = tmp_path / "a-1" / "checkpoints" / "000000004-checkpoint"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
        (tmp_path / "a-2" / "events").mkdir(parents=True)
        pattern = f"{tmp_path}/a-{{n}}"
        assert resolve_folder(pattern, resume=str(checkpoint), chosen=False) == tmp_path / "a-1"
        assert resolve_folder(pattern, resume=str(checkpoint)) == tmp_path / "a-3"
        assert resolve_folder(str(tmp_path / "a-1"), resume=str(checkpoint)) == tmp_path / "a-1"
        with pytest.raises(RunFolderError, match="a-2: already holds a run"):
            resolve_folder(str(tmp_path / "a-2"), resume=str(checkpoint))
        for other in (tmp_path / "a-1" / "checkpoints" / "best", tmp_path / "a-2"):
            with pytest.raises((RunFolderError, CheckpointError), match=f"{other.name}: "):
                resolve_folder(pattern, resume=str(other))
        with pytest.raises(RunFolderError, match=r"is not a checkpoint; .*checkpoints has 000000004-checkpoint"):
            resolve_folder(pattern, resume=str(checkpoint.with_name("000000005-checkpoint")))

    def test_a_number_that_another_process_takes_meanwhile_is_skipped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def claim(folder: Path, *, new: bool = False) -> Claim:
            if folder.name == "a-1":
                folder.mkdir(parents=True, exist_ok=True)
            return Claim(folder, new=new)

        monkeypatch.setattr("pulsetrain.configuration.assemble.Claim", claim)
        assert assembled(write(tmp_path), f"{tmp_path}/runs/a-{{n}}").folder == tmp_path / "runs" / "a-2"

    @pytest.mark.parametrize(
        ("pattern", "message"),
        [("file", "is a file"), ("file/x", "cannot be made: Not a directory"), ("a-{n}/b", "only in its last part")],
    )
    def test_bad_patterns_are_refused(self, tmp_path: Path, pattern: str, message: str) -> None:
        path = write(tmp_path)
        (tmp_path / "file").touch()
        with pytest.raises(RunFolderError, match=message):
            assembled(path, tmp_path / pattern)

    def test_releasing_a_folder_removes_what_was_created_and_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "plots").mkdir()
        (tmp_path / "mine" / "notes.txt").touch()
        before = sorted(tmp_path.rglob("*"))
        for folder in (tmp_path / "mine", tmp_path / "a" / "b" / "c"):
            claim = Claim(folder)
            (folder / "config.yaml").touch()
            (folder / "checkpoints" / "x").mkdir(parents=True)
            claim.release()
            assert sorted(tmp_path.rglob("*")) == before

    def test_a_parent_folder_that_is_in_use_stays(self, tmp_path: Path) -> None:
        claim = Claim(tmp_path / "a" / "b")
        (tmp_path / "a" / "other").touch()
        claim.release()
        assert [path.name for path in tmp_path.rglob("*")] == ["a", "other"]


class TestParallel:
    @pytest.mark.parametrize(
        ("backend", "said"),
        [
            ("jax", "parallel: JaxBackend does not take it; leave it out, or choose backend: torch"),
            ("torch", "parallel.shard=2: does not fit 1 process"),
        ],
    )
    def test_what_cannot_be_shared_out_is_refused(self, backend: str, said: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError) as refused:
            assembled(write(tmp_path), tmp_path / "run", backend=backend, parallel="{shard: 2}")
        assert said in str(refused.value)

    def test_one_copy_on_one_process_is_what_there_is_without_it(self, tmp_path: Path) -> None:
        trainer = assembled(write(tmp_path), tmp_path / "run", parallel="{shard: 1}").trainer
        assert trainer.backend.topology.sizes(1) == (1, 1)
