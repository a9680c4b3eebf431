"""What HuggingFaceExporter writes, when, and what is there after a failure."""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, Every, SupervisedStrategy
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.handlers import EMA, Checkpointer, HuggingFaceExporter
from tests.support.runs import cut_after


class Model(nn.Linear):
    """Has what the handler asks of a model of transformers."""

    on_save: Callable[[Path], None] | None = None

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), Path(folder, "weights.pt"))
        if self.on_save is not None:
            self.on_save(Path(folder))


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


def model() -> Model:
    torch.manual_seed(0)
    return Model(4, 1)


def trainer(*handlers: Any, epochs: int = 3, made: nn.Module | None = None) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 4, generator=generator), torch.ones(8, 1)) for _ in range(4)]
    config = TrainingConfig(max_epochs=epochs, optimizer="sgd", learning_rate=0.1, seed=0, device="cpu")
    return Trainer(made or model(), data, data, strategy=SupervisedStrategy("mse"), config=config, handlers=handlers)


def facts(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "pretrained" / name / "export.json").read_text())
    return found


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "pretrained" / name / "weights.pt", weights_only=True)
    return found


def test_last_is_written_at_the_cadence_and_at_the_end_once_each(tmp_path: Path) -> None:
    written: list[int] = []
    made = model()
    run = trainer(HuggingFaceExporter(tmp_path, Every(iterations=5)), made=made)
    made.on_save = lambda folder: written.append(run.state.iteration)
    run.train()
    assert written == [5, 10, 12]
    assert facts(tmp_path, "last") == {"iteration": 12, "update": 12}
    for name, each in run.model.state_dict().items():
        assert torch.equal(weights(tmp_path, "last")[name], each)
    assert [each.name for each in (tmp_path / "pretrained").iterdir()] == ["last"]


def test_a_cadence_that_meets_the_end_writes_once_and_without_one_only_the_end_writes(tmp_path: Path) -> None:
    written: list[str] = []
    for every in (Every(iterations=4), None):
        made = model()
        made.on_save = lambda folder: written.append(folder.name)
        trainer(HuggingFaceExporter(tmp_path / str(every), every), epochs=2, made=made).train()
    assert len(written) == 2 + 1


def test_the_tokenizer_is_in_each_folder(tmp_path: Path) -> None:
    trainer(HuggingFaceExporter(tmp_path, tokenizer=Tokenizer(), metric="val/loss")).train()
    for name in ("last", "best"):
        found = {each.name for each in (tmp_path / "pretrained" / name).iterdir()}
        assert found == {"weights.pt", "tokenizer.json", "export.json"}


def test_best_has_the_weights_of_the_best_validation_and_its_value(tmp_path: Path) -> None:
    exporter = HuggingFaceExporter(tmp_path, metric="val/loss", mode="max")
    run = trainer(exporter)
    seen: list[dict[str, torch.Tensor]] = []
    run.add_event_handler(Events.VALIDATION_COMPLETED, lambda: seen.append(copy.deepcopy(run.model.state_dict())))
    values = run.train()["val/loss"]
    best = values.index(max(values))
    assert best < len(values) - 1, "else it would be the last one, too"
    iteration = 4 * (best + 1)
    expected = {"iteration": iteration, "update": iteration, "metric": "val/loss", "value": values[best]}
    assert facts(tmp_path, "best") == expected
    assert (exporter.best_iteration, exporter.best_value) == (iteration, values[best])
    for name, each in seen[best].items():
        assert torch.equal(weights(tmp_path, "best")[name], each)
        assert not torch.equal(weights(tmp_path, "last")[name], each)


def test_best_has_the_averages_that_were_validated(tmp_path: Path) -> None:
    average = EMA(0.5)
    run = trainer(average, HuggingFaceExporter(tmp_path, metric="val/loss"), epochs=1)
    run.train()
    with average.applied():
        expected = {name: each.clone() for name, each in run.model.state_dict().items()}
    for name, each in expected.items():
        assert torch.equal(weights(tmp_path, "best")[name], each)
        assert not torch.equal(weights(tmp_path, "last")[name], each)


def test_an_export_that_fails_leaves_the_old_one_and_the_run(tmp_path: Path) -> None:
    made = model()

    def full(folder: Path) -> None:
        if run.state.iteration > 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    made.on_save = full
    run = trainer(HuggingFaceExporter(tmp_path), made=made)
    run.train()
    assert run.state.iteration == 12
    assert facts(tmp_path, "last")["iteration"] == 4
    assert [each.name for each in (tmp_path / "pretrained").iterdir()] == ["last"]


def test_an_export_that_failed_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    made = model()
    failures = [(4, "best"), (12, "last")]

    def full_once(folder: Path) -> None:
        for failure in failures:
            if run.state.iteration == failure[0] and folder.name.endswith(failure[1]):
                failures.remove(failure)
                raise OSError(errno.ENOSPC, "No space left on device")

    made.on_save = full_once
    exporter = HuggingFaceExporter(tmp_path, metric="val/loss")
    run = trainer(exporter, made=made)
    values = run.train()["val/loss"]
    assert values[0] == min(values), "else the failed export would be replaced in any case"
    assert facts(tmp_path, "best")["value"] == exporter.best_value == min(values[1:])
    assert facts(tmp_path, "last")["iteration"] == 12, "the end writes what the last epoch could not"
    assert not failures


def test_a_process_that_ends_while_it_replaces_a_folder_loses_nothing(tmp_path: Path) -> None:
    def make(made: Model, epochs: int) -> Trainer:
        return trainer(Checkpointer(tmp_path), HuggingFaceExporter(tmp_path, every=None), epochs=epochs, made=made)

    make(model(), 1).train()
    held = tmp_path / "pretrained"
    (held / "last").rename(held / ".partial-last.replaced")  # between the two renames
    (held / ".partial-last").mkdir()
    made = model()
    made.on_save = lambda folder: 1 / 0  # type: ignore[assignment]  # nothing is written in this run
    make(made, 2).train(resume="latest")
    assert facts(tmp_path, "last")["iteration"] == 4
    assert [each.name for each in held.iterdir()] == ["last"]


def test_a_new_run_does_not_begin_where_one_has_exported(tmp_path: Path) -> None:
    trainer(HuggingFaceExporter(tmp_path), epochs=1).train()
    with pytest.raises(RunFolderError, match="already holds a run"):
        trainer(HuggingFaceExporter(tmp_path), epochs=1).train()
    assert facts(tmp_path, "last")["iteration"] == 4


def test_a_replaced_folder_is_the_new_one_alone(tmp_path: Path) -> None:
    target = tmp_path / "last"
    for content in ("one", "two"):
        Disk().replace_folder(target, lambda folder, name=content: (folder / name).write_text(name))
    assert [each.name for each in target.iterdir()] == ["two"]
    with pytest.raises(ZeroDivisionError):
        Disk().replace_folder(target, lambda folder: 1 / 0)
    assert [each.name for each in tmp_path.iterdir()] == ["last"]
    assert [each.name for each in target.iterdir()] == ["two"]


def test_a_resumed_run_goes_by_the_best_value_of_its_checkpoint(tmp_path: Path) -> None:
    def make(folder: str) -> tuple[Trainer, HuggingFaceExporter]:
        exporter = HuggingFaceExporter(tmp_path / folder, metric="val/loss", mode="max")
        return trainer(Checkpointer(tmp_path / folder), exporter, epochs=4), exporter

    whole, expected = make("whole")
    whole.train()
    cut_after(make("cut")[0], 9)
    resumed, found = make("cut")
    resumed.train(resume="latest")
    assert found.state_dict() == expected.state_dict()
    assert facts(tmp_path / "cut", "best") == facts(tmp_path / "whole", "best")
    assert facts(tmp_path / "cut", "last") == facts(tmp_path / "whole", "last")


def test_losses_are_those_without_it(tmp_path: Path) -> None:
    assert trainer(HuggingFaceExporter(tmp_path, metric="val/loss")).train() == trainer().train()


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the model of 'trainer', Linear, has no save_pretrained\(folder\)"):
        trainer(HuggingFaceExporter(tmp_path), made=nn.Linear(4, 1))
    with pytest.raises(TypeError, match=r"HuggingFaceExporter\(tokenizer=int\): needs an object with save_pretrained"):
        HuggingFaceExporter(tmp_path, tokenizer=3)
    with pytest.raises(TypeError, match=r"HuggingFaceExporter\(every=3\): needs an Every"):
        HuggingFaceExporter(tmp_path, 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="mode='best'"):
        HuggingFaceExporter(tmp_path, mode="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="waits for a validation, and the Trainer has no val_loader"):
        Trainer(model(), [1], handlers=[HuggingFaceExporter(tmp_path, metric="val/loss")])
