"""What a trainer adds to a step: ours with each handler, ours with the full set, and the other frameworks.

    python -m benchmarks trainers             # prints a table and exits with 1 if a bound is missed
    python benchmarks/trainers.py --json      # the same as one JSON object
    python benchmarks/trainers.py --only ours ignite "handlers: EMA"

Each contestant trains the same linear model with SGD on the same batches, on the CPU with one thread. The model notes
the time of two of its calls, between which lie the measured iterations: so whatever owns the loop is measured alike,
without its start and end. All take turns in every round; a figure is the median over the rounds of the difference from
the bare loop of that round. Frameworks that are not installed are named (pip install -e '.[bench]').
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import pulsetrain.handlers as shipped
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every, SupervisedStrategy
from pulsetrain.engine.schedules import Cosine

FIRST, MEASURED = 300, 1_500  # iterations before the measurement, and in it
LAST = FIRST + MEASURED + 1
BATCHES = 100  # in an epoch
FULL_SET = 20.0  # microseconds that the full set may add

Batch = tuple[Tensor, Tensor]
Contestant = Callable[["Timed", list[Batch], Path], object]


class Timed(nn.Module):
    """A linear model that notes when the measured iterations began and ended."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 4)
        self.calls, self.noted = 0, list[float]()

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs, shape (batch, 4)."""
        if self.training:
            self.calls += 1
            if self.calls in (FIRST, FIRST + MEASURED):
                self.noted.append(time.perf_counter())
        outputs: Tensor = self.linear(inputs)
        return outputs

    def optimizer(self) -> torch.optim.Optimizer:
        """The same for every contestant."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Batches(Dataset[Batch]):
    """The batches as a data set, for frameworks that want a DataLoader: `DataLoader(..., batch_size=None)`."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


def loader(batches: list[Batch]) -> DataLoader[Any]:
    """A DataLoader that gives the batches as they are."""
    return DataLoader(Batches(batches), batch_size=None)


# ------------------------------------------------------------------------------------------------ the contestants


def bare(model: Timed, batches: list[Batch], folder: Path) -> None:
    """The loop that a user would write."""
    optimizer, done = model.optimizer(), 0
    while done < LAST:
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def ours(*make: Callable[[Path], Any]) -> Contestant:
    """Our Trainer with these handlers."""

    def train(model: Timed, batches: list[Batch], folder: Path) -> None:
        Trainer(
            model,
            batches,
            strategy=SupervisedStrategy("mse"),
            optimizer=model.optimizer(),
            config=TrainingConfig(max_iterations=LAST, device="cpu", seed=0),
            handlers=[each(folder) for each in make],
        ).train()

    return train


def validated(*make: Callable[[Path], Any]) -> Contestant:
    """Our Trainer with these handlers, which judge a validation at the end of the run."""

    def train(model: Timed, batches: list[Batch], folder: Path) -> None:
        Trainer(
            model,
            batches,
            batches[:1],
            strategy=SupervisedStrategy("mse"),
            optimizer=model.optimizer(),
            config=TrainingConfig(max_iterations=LAST, device="cpu", seed=0, validate_every=Every(iterations=LAST)),
            handlers=[each(folder) for each in make],
        ).train()

    return train


def ignite(model: Timed, batches: list[Batch], folder: Path) -> None:
    """Pytorch-ignite's supervised trainer."""
    from ignite.engine import create_supervised_trainer

    engine = create_supervised_trainer(model, model.optimizer(), nn.functional.mse_loss)
    engine.run(batches, max_iters=LAST)


def fabric(model: Timed, batches: list[Batch], folder: Path) -> None:
    """A loop on Lightning Fabric."""
    from lightning.fabric import Fabric

    helper = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = helper.setup(model, model.optimizer())
    data, done = helper.setup_dataloaders(loader(batches)), 0
    while done < LAST:
        for inputs, targets in data:
            loss = nn.functional.mse_loss(wrapped(inputs), targets)
            helper.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def lightning(model: Timed, batches: list[Batch], folder: Path) -> None:
    """Lightning's Trainer, without logger, checkpoints and progress bar."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return model.optimizer()

    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    LightningTrainer(accelerator="cpu", devices=1, max_steps=LAST, **options).fit(Module(), loader(batches))


def accelerate(model: Timed, batches: list[Batch], folder: Path) -> None:
    """A loop on Hugging Face's accelerate."""
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    wrapped, optimizer, data = helper.prepare(model, model.optimizer(), loader(batches))
    done = 0
    while done < LAST:
        for inputs, targets in data:
            loss = nn.functional.mse_loss(wrapped(inputs), targets)
            helper.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1


def hugging_face(model: Timed, batches: list[Batch], folder: Path) -> None:
    """The Trainer of transformers, without reports and checkpoints."""
    from transformers import Trainer as HFTrainer
    from transformers import TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = self.model(inputs)
            return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}

    class OnBatches(HFTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(_Named(batches), batch_size=None)

    arguments = TrainingArguments(
        str(folder), max_steps=LAST, report_to=[], save_strategy="no", logging_strategy="no", use_cpu=True,
        disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    module = WithLoss()
    OnBatches(module, arguments, train_dataset=_Named(batches), optimizers=(model.optimizer(), None)).train()


class _Named(Batches):
    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.batches[index]
        return {"inputs": inputs, "labels": targets}


def torchtnt(model: Timed, batches: list[Batch], folder: Path) -> None:
    """An AutoUnit of torchtnt, without callbacks."""
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train

    class Unit(AutoUnit):  # type: ignore[misc]
        def compute_loss(self, state: Any, data: Batch) -> tuple[Tensor, Tensor]:
            outputs = self.module(data[0])
            return nn.functional.mse_loss(outputs, data[1]), outputs

        def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
            return model.optimizer(), None

    train(Unit(module=model, device=torch.device("cpu")), loader(batches), max_steps=LAST)


def schedule(folder: Path) -> Any:
    """A rate that changes with each update."""
    return shipped.LRScheduler(Cosine(initial_lr=0.01, total_steps=LAST))


def console(folder: Path) -> Any:
    """A line each 50 iterations."""
    return shipped.ConsoleLogger(Every(iterations=50), stream=io.StringIO())


def checkpointer(folder: Path) -> Any:
    """It saves at the end."""
    return shipped.Checkpointer(folder, Every(seconds=1000))


# the handlers at the cadence of their defaults, where that has none per iteration
ALONE: dict[str, Contestant] = {
    "BestModel": validated(lambda folder: shipped.BestModel("val/loss")),
    "CSVLogger": ours(shipped.CSVLogger),
    "Checkpointer": ours(checkpointer),
    "ConsoleLogger": ours(console),
    "CrashBundle": ours(shipped.CrashBundle),
    "EMA": ours(lambda folder: shipped.EMA()),
    "EarlyStopping": validated(lambda folder: shipped.EarlyStopping("val/loss")),
    "EventRecorder": ours(shipped.EventRecorder),
    "EventRecorder with norms": ours(lambda folder: shipped.EventRecorder(folder, grad_norm=True)),
    "Garbage": ours(lambda folder: shipped.Garbage()),
    "GradientMonitor": ours(lambda folder: shipped.GradientMonitor()),
    "HangWatchdog": ours(shipped.HangWatchdog),
    "JSONLinesLogger": ours(shipped.JSONLinesLogger),
    "LRMonitor": ours(lambda folder: shipped.LRMonitor()),
    "LRScheduler": ours(schedule),
    "LossSpikeGuard": ours(checkpointer, lambda folder: shipped.LossSpikeGuard()),
    "MemoryMonitor": ours(lambda folder: shipped.MemoryMonitor()),
    "NaNGuard": ours(lambda folder: shipped.NaNGuard()),
    "ProgressBar": ours(lambda folder: shipped.ProgressBar(stream=io.StringIO())),
    "ReduceLROnPlateau": validated(lambda folder: shipped.ReduceLROnPlateau("val/loss")),
    "SWA": ours(lambda folder: shipped.SWA(after_epoch=1)),
    "StepLimit": ours(lambda folder: shipped.StepLimit(iterations=10 * LAST)),
    "Throughput": ours(lambda folder: shipped.Throughput()),
    "TimeLimit": ours(lambda folder: shipped.TimeLimit("1h")),
}
# they draw, send or stop a run, or need a service: not a cost of an iteration, or not one of this machine's
NOT_ALONE = (
    "Alert", "Fingerprints", "LRFinder", "MLflowLogger", "Plots", "Profiler", "SampleText", "TensorBoardLogger",
    "TrackioLogger", "WandbLogger",
)  # fmt: skip
CONTESTANTS: dict[str, Contestant] = {
    "bare loop": bare,
    "ours": ours(),
    "ours, the full set": validated(
        schedule,
        console,
        shipped.EventRecorder,
        lambda folder: shipped.EarlyStopping("val/loss", patience=10**6),
        checkpointer,
    ),
    "ignite": ignite,
    "Fabric": fabric,
    "Lightning": lightning,
    "accelerate": accelerate,
    "HF Trainer": hugging_face,
    "torchtnt": torchtnt,
    **{f"handlers: {name}": contestant for name, contestant in ALONE.items()},
}


# ------------------------------------------------------------------------------------------------- the measurement


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the frameworks print, log and warn of."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def step_of(contestant: Contestant, batches: list[Batch]) -> float:
    """Microseconds per measured iteration."""
    model = Timed()
    with tempfile.TemporaryDirectory() as folder, quiet():
        contestant(model, batches, Path(folder))
    first, last = model.noted
    return (last - first) / MEASURED * 1e6


def measure(names: list[str], rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The microseconds of each contestant in each round, and why the others are absent."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(BATCHES)
    ]
    found: dict[str, list[float]] = {name: [] for name in names}
    absent: dict[str, str] = {}
    for number in range(rounds + 1):  # the first warms up
        for name in names:
            if name in absent:
                continue
            try:
                step = step_of(CONTESTANTS[name], batches)
            except ImportError as error:
                absent[name] = str(error)
                del found[name]
                continue
            if number:
                found[name].append(step)
    return found, absent


def summary(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """For each contestant the median step, and the median, least and most of what it adds to the bare loop's."""
    rows = {}
    for name, steps in found.items():
        added = [step - base for step, base in zip(steps, found["bare loop"], strict=True)]
        rows[name] = {
            "step_us": statistics.median(steps),
            "added_us": statistics.median(added),
            "least_us": min(added),
            "most_us": max(added),
        }
    return rows


def missed(rows: dict[str, dict[str, float]]) -> list[str]:
    """The bounds that do not hold."""
    added = {name: row["added_us"] for name, row in rows.items()}
    found = []
    if {"ours", "ignite"} <= added.keys() and added["ours"] >= added["ignite"]:
        found.append(f"ours adds {added['ours']:.1f} us, and ignite {added['ignite']:.1f}")
    full = added.get("ours, the full set", 0.0)
    if full > FULL_SET:
        found.append(f"the full set adds {full:.1f} us; the bound is {FULL_SET:.0f}")
    if full >= added.get("Fabric", float("inf")):
        found.append(f"the full set adds {full:.1f} us, and Fabric {added['Fabric']:.1f}")
    return found


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    found, absent = measure(["bare loop", *(name for name in arguments.only if name != "bare loop")], arguments.rounds)
    rows, problems = summary(found), []
    problems = missed(rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "absent": absent, "missed": problems, "load": load}, indent=2))
        return int(bool(problems))
    print(f"{'a step of a linear model':<36}{'us':>9}{'added, us':>12}{'least':>9}{'most':>9}")
    for name, row in rows.items():
        print(f"{name:<36}{row['step_us']:>9.1f}{row['added_us']:>12.1f}{row['least_us']:>9.1f}{row['most_us']:>9.1f}")
    for name, why in absent.items():
        print(f"{name:<36}   absent: {why}")
    print(f"the machine's load before: {load:.1f}")
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
