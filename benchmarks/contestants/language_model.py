"""The contestants of benchmarks/language_model.py, and what runs one of them in a process of its own."""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

EXAMPLE = Path(__file__).parents[2] / "examples" / "byte_lm"
SLICE = 25  # iterations of a turn
RATE, DECAY, BETAS, CLIP = 3e-3, 0.1, (0.9, 0.95), 1.0  # as in the example's config.yaml
SHOWN = 10  # iterations between two lines of the log

Train = Callable[[], object]


@dataclass(frozen=True)
class Task:
    """What is trained, and for how long."""

    iterations: int
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    vocabulary: int = 256
    batch_size: int = 8
    validation_batches: int = 16
    validate_every: int = 250
    warmup: int = 100
    sample: int = 400  # bytes generated at the end
    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False
    threads: int = 1

    @classmethod
    def demo(cls, iterations: int) -> Task:
        """The example's model and settings."""
        return cls(iterations, warmup=min(100, iterations // 4))

    @classmethod
    def tiny(cls, iterations: int) -> Task:
        """A small one, for tests."""
        return cls(iterations, layers=1, width=16, heads=2, context=16, validation_batches=1, warmup=10, sample=8)

    @classmethod
    def of_124_million(cls, iterations: int, *, compile: bool) -> Task:
        """The sizes of the smallest GPT-2, with a vocabulary that makes 124 million parameters, since none are tied."""
        return cls(
            iterations, layers=12, width=768, heads=12, context=1024, vocabulary=25_600, validation_batches=4,
            device="cuda", precision="bf16", compile=compile, threads=8,
        )  # fmt: skip

    def model_arguments(self) -> dict[str, int]:
        names = ("layers", "width", "heads", "context", "vocabulary")
        return {name: getattr(self, name) for name in names}

    def data_arguments(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("batch_size", "context", "validation_batches")}

    def make_model(self) -> Any:
        sys.path.insert(0, str(EXAMPLE))
        model = importlib.import_module("model")
        torch.manual_seed(0)
        return model.ByteGPT(**self.model_arguments()).to(self.device)


class Turns:
    """Waits for the turn of this process, and reports each slice when it is over."""

    def __init__(self, reports: IO[str]) -> None:
        self._reports, self._batches = reports, 0
        self._started, self._processor, self._faults = 0.0, 0.0, 0
        self.helpers = 0  # bytes

    def report(self, **facts: object) -> None:
        self._reports.write(json.dumps(facts) + "\n")
        self._reports.flush()

    def begin(self) -> None:
        """Wait for the turn."""
        if not sys.stdin.readline():
            raise SystemExit(1)  # nobody measures any more
        self._started, self._processor, self._faults = time.perf_counter(), time.process_time(), page_faults()

    def end(self, **facts: object) -> None:
        """Report the slice."""
        self.helpers = max(self.helpers, helpers_memory())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, processor = time.perf_counter() - self._started, time.process_time() - self._processor
        self.report(
            seconds=seconds, processor=processor, faults=page_faults() - self._faults,
            resident=memory_of("self", "VmRSS"), helpers=self.helpers, **facts,
        )  # fmt: skip

    def batch(self) -> None:
        """A batch of the training is about to be read."""
        if self._batches and self._batches % SLICE == 0:
            self.end()
            self.begin()
        self._batches += 1


TURNS: Turns  # of this process


class Gated(Dataset[Tensor]):
    """Training data that waits for this process's turn."""

    def __init__(self, windows: Dataset[Tensor]) -> None:
        self.windows: Any = windows

    def __len__(self) -> int:
        return len(cast(Sized, self.windows))

    def __getitem__(self, index: int) -> Tensor:
        window: Tensor = self.windows[index]
        return window

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        TURNS.batch()
        windows: list[Tensor] = self.windows.__getitems__(indices)
        return windows


def gated_loaders(
    *, batch_size: int, context: int, validation_batches: int
) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """The example's loaders; training waits for its turns."""
    sys.path.insert(0, str(EXAMPLE))
    loaders = importlib.import_module("data").loaders
    training, validation = loaders(batch_size=batch_size, context=context, validation_batches=validation_batches)
    gated = Gated(training.dataset)
    return DataLoader(gated, batch_size=batch_size, shuffle=True, drop_last=True), validation


def memory_of(process: int | str, entry: str) -> int:
    """Bytes, such as VmHWM, the peak of its resident memory; 0 where the process has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{entry}:")), 0)


def page_faults() -> int:
    """How many pages this process has got from the system so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def helpers_memory() -> int:
    """The peak of the resident memory of the processes that this one has started, of those that are running."""
    children = [each for task in Path("/proc/self/task").iterdir() for each in (task / "children").read_text().split()]
    return sum(memory_of(int(each), "VmHWM") for each in children)


def serve() -> None:
    """Train as one contestant, whenever the standard input has a line."""
    global TURNS
    asked = json.loads(sys.argv[1])
    task, folder = Task(**asked["task"]), Path(asked["folder"])
    TURNS = Turns(os.fdopen(os.dup(1), "w"))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what the trainers print
    warnings.simplefilter("ignore")
    torch.set_num_threads(task.threads)
    importlib.import_module("torch._dynamo")  # the first optimizer would import it: imports are not measured

    try:
        train = CONTESTANTS[asked["name"]](task, folder)
    except ImportError as error:
        TURNS.report(absent=str(error))
        return
    TURNS.report(ready=True)
    TURNS.begin()
    train()
    on_gpu = task.device == "cuda"
    TURNS.end(peak=torch.cuda.max_memory_allocated() if on_gpu else memory_of("self", "VmHWM"), last=True)


# ------------------------------------------------------------------------------------------------ the contestants


def optimizer_of(model: nn.Module, task: Task) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with the fused kernel, and the cosine schedule after a linear warm-up."""
    kept = [each for name, each in model.named_parameters() if "norm" in name or "embedding" in name]
    decayed = [each for name, each in model.named_parameters() if "norm" not in name and "embedding" not in name]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, fused=True)

    def factor(step: int) -> float:
        if step < task.warmup:
            return step / task.warmup
        done = min(1.0, (step - task.warmup) / max(1, task.iterations - task.warmup))
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Of the bytes that follow, mean over the batch."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def by_hand(task: Task, folder: Path, *, saves: bool = True) -> Train:
    """The loop that a user would write."""

    def train() -> None:
        model = task.make_model()
        training, validation = gated_loaders(**task.data_arguments())
        optimizer, schedule = optimizer_of(model, task)
        used: nn.Module = cast(nn.Module, torch.compile(model)) if task.compile else model
        half = torch.autocast(task.device, torch.bfloat16) if task.precision == "bf16" else nullcontext()

        def validate() -> float:
            used.eval()
            with torch.no_grad(), half:
                losses = [loss_of(used, windows.to(task.device)) for windows in validation]
            used.train()
            return float(torch.stack(losses).mean())

        used.train()
        done = 0
        while done < task.iterations:
            for windows in training:
                moved = windows.to(task.device)
                with half:
                    loss = loss_of(used, moved)
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                done += 1
                if done % SHOWN == 0:
                    print(f"iteration {done}, loss {loss.item():.4f}, gradient norm {norm.item():.3f}", flush=True)
                if done % task.validate_every == 0 or done == task.iterations:
                    print(f"iteration {done}, val/loss {validate():.4f}", flush=True)
                    if saves:
                        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                        torch.save({**state, "schedule": schedule.state_dict()}, folder / f"{done}.pt")
                if done == task.iterations:
                    break
        if saves:
            print(model.generate(b"def ", task.sample, temperature=0.7))

    return train


def validating_only(task: Task, folder: Path) -> Train:
    """The same without saving and without a sample."""
    return by_hand(task, folder, saves=False)


def ours(task: Task, folder: Path, *, handlers: bool = False) -> Train:
    """Our Trainer with the example's configuration, and none of its handlers, or all."""
    from pulsetrain.configuration.assemble import assemble
    from pulsetrain.configuration.parse import read_config

    config = read_config(EXAMPLE / "config.yaml", {})
    config["model"]["init_args"] = task.model_arguments()
    config["data"] = {"class_path": f"{__name__}.gated_loaders", "init_args": task.data_arguments()}
    del config["training"]["max_tokens"]
    config["training"] |= {
        "max_iterations": task.iterations, "validate_every": {"updates": task.validate_every},
        "warmup_steps": task.warmup, "device": task.device, "precision": task.precision,
        "compile": task.compile,
    }  # fmt: skip
    if not handlers:
        config["handlers"] = []
    for spec in config["handlers"]:
        if isinstance(spec, dict) and spec["class_path"] == "SampleText":
            spec["init_args"]["length"] = task.sample
    return lambda: assemble(config, EXAMPLE, folder / "run").trainer.train()


def with_handlers(task: Task, folder: Path) -> Train:
    """Our Trainer with the example's configuration."""
    return ours(task, folder, handlers=True)


def lightning(task: Task, folder: Path) -> Train:
    """Lightning's Trainer with what corresponds to the example's handlers."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = task.make_model()

        def training_step(self, windows: Tensor, index: int) -> Tensor:
            loss = loss_of(self.model, windows)
            self.log("train/loss", loss, prog_bar=True)
            return loss

        def validation_step(self, windows: Tensor, index: int) -> None:
            self.log("val/loss", loss_of(self.model, windows), prog_bar=True, batch_size=len(windows))

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizer_of(self.model, task)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train() -> None:
        module = Module()
        callbacks = [
            ModelCheckpoint(folder, monitor="val/loss", save_last="link"), EarlyStopping("val/loss", patience=3),
            LearningRateMonitor("step"),
        ]  # fmt: skip
        trainer = LightningTrainer(
            accelerator="cpu", devices=1, max_steps=task.iterations, callbacks=callbacks, logger=CSVLogger(str(folder)),
            val_check_interval=min(task.validate_every, task.iterations), check_val_every_n_epoch=None,
            num_sanity_val_steps=0, log_every_n_steps=SHOWN, gradient_clip_val=CLIP, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, *gated_loaders(**task.data_arguments()))
        print(module.model.generate(b"def ", task.sample, temperature=0.7))

    return train


def hugging_face(task: Task, folder: Path) -> Train:
    """The Trainer of transformers with what corresponds to the example's handlers."""
    from transformers import EarlyStoppingCallback, TrainingArguments
    from transformers import Trainer as HFTrainer

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.make_model()

        def forward(self, windows: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.model, windows)}

    def named(windows: list[Tensor]) -> dict[str, Tensor]:
        return {"windows": torch.stack(windows)}

    class OnWindows(HFTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(
                self.train_dataset, batch_size=task.batch_size, shuffle=True, drop_last=True, collate_fn=named
            )
            return self.accelerator.prepare(loader)

        def get_eval_dataloader(self, eval_dataset: object = None) -> Any:
            return self.accelerator.prepare(DataLoader(self.eval_dataset, batch_size=64, collate_fn=named))

        def prediction_step(self, model: nn.Module, inputs: Any, *others: object, **named: object) -> Any:
            with torch.no_grad():
                return model(**self._prepare_inputs(inputs))["loss"], None, None

    def train() -> None:
        module = WithLoss()
        training, validation = gated_loaders(**task.data_arguments())
        every = min(task.validate_every, task.iterations)
        arguments = TrainingArguments(
            str(folder), max_steps=task.iterations, report_to=[], use_cpu=True, max_grad_norm=CLIP,
            logging_steps=SHOWN, eval_strategy="steps", eval_steps=every, save_strategy="steps", save_steps=every,
            save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        )  # fmt: skip
        OnWindows(
            module, arguments, train_dataset=training.dataset, eval_dataset=validation.dataset,
            callbacks=[EarlyStoppingCallback(3)], optimizers=optimizer_of(module, task),
        ).train()  # fmt: skip
        print(module.model.generate(b"def ", task.sample, temperature=0.7))

    return train


CONTESTANTS: dict[str, Callable[[Task, Path], Train]] = {
    "hand-written": by_hand,
    "hand-written, validating only": validating_only,
    "ours": ours,
    "ours, the demo's handlers": with_handlers,
    "HF Trainer": hugging_face,
    "Lightning": lightning,
}
