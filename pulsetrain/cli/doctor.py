"""`pulsetrain doctor`: what is installed here, and whether it works."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from pulsetrain.cli.reports import FAILED, OK

__all__ = ["run"]

_PURPOSE = {
    "arrow": "event logs as pyarrow tables",
    "completion": "completion of commands in the shell",
    "debug": "history and completion in `pulsetrain debug`",
    "gymnasium": "PPO in environments given by name",
    "huggingface": "models and tokenizers of transformers, adapters",
    "jax": "JaxBackend",
    "lion": "the optimizer Lion",
    "megatron": "MegatronBackend",
    "mlflow": "MLflowLogger",
    "onnx": "`pulsetrain export --format onnx`",
    "pandas": "event logs as pandas tables",
    "postgresql": "sweeps whose trials are stored in PostgreSQL",
    "report": "`pulsetrain report`",
    "s3": "checkpoints at s3:// URLs",
    "safetensors": "weights as safetensors files",
    "schedule-free": "schedule-free optimizers",
    "serve": "`pulsetrain serve`",
    "submit": "`pulsetrain submit --to slurm`",
    "sweep": "`pulsetrain sweep`",
    "tensorboard": "TensorBoardLogger",
    "torchmetrics": "metrics of torchmetrics",
    "trackio": "TrackioLogger",
    "wandb": "WandbLogger",
    "watch": "`pulsetrain watch`",
}
_NOT_FOR_USERS = ("bench", "dev")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*?extra == [\"']([^\"']+)[\"']")


def run(arguments: argparse.Namespace) -> int:
    """Print what is installed, and the result of each test; returns the exit status."""
    _print("installed", _installed())
    _print("devices", _devices())
    _print("optional", _optional())
    if arguments.no_test:
        return OK
    print("\ntests")
    results = [_passes(name, test) for name, test in _TESTS.items()]
    if not all(results):
        print("a test failed; please report this with all of the output above")
        return FAILED
    return OK


def _print(title: str, rows: Iterator[tuple[str, str]]) -> None:
    print(f"{'' if title == 'installed' else chr(10)}{title}")
    for name, text in rows:
        print(f"  {name:18} {text}")


def _installed() -> Iterator[tuple[str, str]]:
    yield "pulsetrain", f"{version('pulsetrain')} in {Path(__file__).resolve().parent.parent}"
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.platform()}, {os.cpu_count()} processors"
    for line in requires("pulsetrain") or ():
        if "extra ==" not in line:
            name = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
            yield name, version(name)


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    yield "cpu", f"{torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        yield "mps", "available"


def _optional() -> Iterator[tuple[str, str]]:
    packages: dict[str, list[str]] = {}
    for line in requires("pulsetrain") or ():
        match = _REQUIREMENT.match(line)
        if match is not None and match[2] not in _NOT_FOR_USERS:
            packages.setdefault(match[2], []).append(match[1])
    for extra, names in sorted(packages.items()):
        found = {name: _version(name) for name in names}
        have = ", ".join(f"{name} {number}" for name, number in found.items() if number)
        missing = [name for name, number in found.items() if not number]
        install = f"missing: {', '.join(missing)}; pip install 'pulsetrain[{extra}]'" if missing else ""
        yield extra, f"{_PURPOSE.get(extra, '')}: {'; '.join(filter(None, [have, install]))}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _passes(name: str, test: Callable[[Path], object]) -> bool:
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="pulsetrain-doctor-") as folder, capture_logs():
            test(Path(folder))
    except Exception as error:
        print(f"  {name:34} FAILED: {type(error).__name__}: {error}")
        return False
    print(f"  {name:34} passed in {time.perf_counter() - started:.1f} s")
    return True


def _build(handlers: list[Any]) -> Any:
    from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
    from pulsetrain.testing import tiny_loader, tiny_model

    config = TrainingConfig(max_epochs=2, seed=0, learning_rate=0.05, progress=False)
    strategy = SupervisedStrategy("mse")
    model, loader = tiny_model(dropout=0.5), tiny_loader()
    return Trainer(model, loader, tiny_loader(), strategy=strategy, config=config, handlers=handlers)


def _learns(folder: Path) -> None:
    from pulsetrain.testing import assert_overfits

    assert_overfits(_build([]), to=0.5)


def _resumes(folder: Path) -> None:
    from pulsetrain.testing import assert_resumes_exactly

    assert_resumes_exactly(_build, folder)


def _replays(folder: Path) -> None:
    from pulsetrain import EarlyStopping
    from pulsetrain.testing import assert_replays_equal

    assert_replays_equal(lambda: EarlyStopping(patience=1), _build, folder)


def _uses_devices(folder: Path) -> None:
    import torch

    for index in range(torch.cuda.device_count()):
        square = torch.full((64, 64), 2.0, device=f"cuda:{index}")
        found = float((square @ square)[0, 0])
        if found != 256:
            raise AssertionError(f"cuda:{index} computes {found} where 256 is right")


_TESTS = {
    "a model learns": _learns,
    "a run resumes exactly": _resumes,
    "a handler replays as in the run": _replays,
    "each device computes": _uses_devices,
}
