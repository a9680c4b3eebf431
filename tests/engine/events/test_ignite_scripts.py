"""A script in the style of ignite's examples runs on our engine by changing its imports alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.metrics import Average, RunningAverage
from torch import nn

from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.engine import Engine, Events, Every
from pulsetrain.engine.recording import Replay
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.ignite_examples import changed

SCRIPT = """
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from ignite.engine import Engine, Events, convert_tensor, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, ModelCheckpoint, Timer
from ignite.handlers.param_scheduler import LRScheduler
from ignite.metrics import Accuracy, Loss, RunningAverage

torch.manual_seed(0)
features = torch.randn(96, 8)
classes = (features.sum(1) > 0).long()
train_loader = DataLoader(TensorDataset(features[:64], classes[:64]), batch_size=16, shuffle=True)
val_loader = DataLoader(TensorDataset(features[64:], classes[64:]), batch_size=16)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device="cpu")
metrics = {"accuracy": Accuracy(), "nll": Loss(nn.CrossEntropyLoss())}
evaluator = create_supervised_evaluator(model, metrics=metrics, device="cpu")
RunningAverage(output_transform=lambda x: x).attach(trainer, "loss")
trainer.add_event_handler(Events.ITERATION_STARTED, LRScheduler(StepLR(optimizer, step_size=6, gamma=0.5)))
to_save = {"model": model, "optimizer": optimizer, "trainer": trainer}
saver = Checkpoint(to_save, DiskSaver("saved", create_dir=True), n_saved=2)
trainer.add_event_handler(Events.EPOCH_COMPLETED(every=2), saver)
stopper = EarlyStopping(patience=2, score_function=lambda engine: engine.state.metrics["accuracy"], trainer=trainer)
evaluator.add_event_handler(Events.COMPLETED, stopper)
timer = Timer(average=True)
timer.attach(trainer, start=Events.EPOCH_STARTED, resume=Events.ITERATION_STARTED,
             pause=Events.ITERATION_COMPLETED, step=Events.ITERATION_COMPLETED)

@trainer.on(Events.ITERATION_COMPLETED(every=3))
def log_loss(engine):
    print(engine.state.iteration, engine.state.output, engine.state.metrics["loss"], optimizer.param_groups[0]["lr"])

@trainer.on(Events.EPOCH_COMPLETED | Events.COMPLETED)
def validate(engine):
    evaluator.run(val_loader)
    print(engine.state.epoch, evaluator.state.metrics, timer.step_count)

def scale(engine, batch):
    x, y = (convert_tensor(each, device=torch.device("cpu"), non_blocking=True) for each in batch)
    return (x * 2).mean().item()

print(Engine(scale).run(val_loader).output)
trainer.run(train_loader, max_epochs=8)
print(sorted(trainer.state_dict()), trainer.should_terminate, saver.last_checkpoint)
"""


def test_a_script_prints_the_same_with_our_imports(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    printed = []
    for code in (SCRIPT, changed(SCRIPT)):
        monkeypatch.chdir(tmp_path_factory.mktemp("script"))
        exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
        printed.append(capsys.readouterr().out)
    assert changed(SCRIPT) != SCRIPT
    assert len(printed[0].splitlines()) > 10
    assert printed[1] == printed[0]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(5)]


def trained(attach: Callable[[Trainer], object], *handlers: Any) -> Trainer:
    torch.manual_seed(0)
    config = TrainingConfig(max_epochs=2, progress=False, optimizer="sgd", learning_rate=0.1, device="cpu")
    trainer = Trainer(nn.Linear(3, 1), batches(), strategy=SupervisedStrategy("mse"), config=config, handlers=handlers)
    attach(trainer)
    trainer.train()
    return trainer


@pytest.mark.parametrize("metric", [RunningAverage, Average])
def test_a_metric_of_one_number_reads_the_loss_of_a_trainer(metric: Any):
    losses: list[float] = []

    def attach(trainer: Trainer) -> None:
        metric(output_transform=lambda x: x).attach(trainer, "by_default")
        metric(output_transform=lambda x: x.loss).attach(trainer, "by_name")
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: losses.append(float(engine.state.output["loss"]))
        )

    metrics = trained(attach).state.metrics
    assert metrics["by_default"] == metrics["by_name"]
    expected = losses[0]
    for loss in losses[1:]:
        expected = 0.98 * expected + 0.02 * loss
    if metric is Average:
        expected = sum(losses[5:]) / 5
    assert float(metrics["by_default"]) == pytest.approx(expected, abs=1e-6)


def test_a_running_average_is_the_same_in_a_replay(tmp_path: Path):
    def attach(engine: Any) -> None:
        RunningAverage(output_transform=lambda x: x).attach(engine, "loss")

    live = trained(attach, EventRecorder(tmp_path / "events"))
    replay = Replay(tmp_path / "events")
    attach(replay)
    replay.run()
    assert float(replay.state.metrics["loss"]) == pytest.approx(float(live.state.metrics["loss"]), abs=1e-6)


def test_a_running_average_continues_after_a_resume(tmp_path: Path):
    def averaged(*epochs: int) -> float:
        folder = tmp_path / str(len(epochs))
        for bound in epochs:
            torch.manual_seed(0)
            config = TrainingConfig(max_epochs=bound, progress=False, seed=0, device="cpu")
            saver = Checkpointer(folder, every=Every(epochs=1))
            trainer = Trainer(
                nn.Linear(3, 1), batches(), strategy=SupervisedStrategy("mse"), config=config, handlers=[saver]
            )
            RunningAverage(output_transform=lambda x: x).attach(trainer, "loss")
            trainer.train(resume="latest")
        return float(trainer.state.metrics["loss"])

    assert averaged(1, 3) == averaged(3)


def test_a_mapping_without_a_loss_is_refused_as_by_ignite():
    engine = Engine(lambda engine, batch: {"generator": 1.0})
    RunningAverage(output_transform=lambda x: x).attach(engine, "loss")
    with pytest.raises(TypeError, match="should be a tuple/list"):
        engine.run([1])


def test_a_metric_reads_the_loss_once_however_often_it_is_attached():
    metric = RunningAverage(output_transform=lambda x: x)
    engines = [Engine(lambda engine, batch: {"loss": batch}), Engine(lambda engine, batch: batch)]
    for engine in engines:
        metric.attach(engine, "loss")
        metric.attach(engine, "again")
    assert [engine.run([2.0, 2.0]).metrics["loss"] for engine in engines] == [2.0, 2.0]
    assert metric._output_transform({"loss": {"loss": 3.0}}) == {"loss": 3.0}
