"""`pulsetrain doctor`: what is installed here, and whether it works."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

from pulsetrain.cli.reports import FAILED, OK, until_closed
from pulsetrain.engine.optional import NOT_FOR_THE_ENGINE

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
_MODULES = {"array-api-compat": "array_api_compat", "pytorch-ignite": "ignite", "PyYAML": "yaml"}
_REQUIREMENT = re.compile(r"""([\w.-]+)(\[[^]]*\])?\s*([^;]*?)\s*(?:;.*extra == ["']([^"']+)["'].*)?$""")


class _Package(NamedTuple):
    """A requirement of pulsetrain: of itself, or of one of its extras."""

    name: str
    extras: str | None  # such as "[signatures]"
    accepted: str  # such as ">=2.9"
    extra: str | None


def run(arguments: argparse.Namespace) -> int:
    """Print what is installed, and the result of each test; returns the exit status."""
    with until_closed():
        return _examine(arguments)
    return OK  # the reader has closed the pipe


def _examine(arguments: argparse.Namespace) -> int:
    print("installed")
    _print(_here())
    packages = _packages()
    broken = [each.name for each in packages if each.extra is None and not _is_usable(each)]
    print("\ndevices")
    _print(_devices() if "torch" not in broken else [("none", "torch cannot be imported")])
    print("\noptional")
    _print(_optional(packages))
    if broken:
        print(f"\n{', '.join(broken)}: not usable, see above; nothing is tested")
        return FAILED
    if arguments.no_test:
        return OK
    print("\ntests")
    results = [_passes(name, test) for name, test in _TESTS.items()]
    if not all(results):
        print("a test failed; please report this with all of the output above")
        return FAILED
    return OK


def _print(rows: Iterable[tuple[str, str]]) -> None:
    for name, text in rows:
        print(f"  {name:18} {text}", flush=True)


def _here() -> Iterator[tuple[str, str]]:
    folder = Path(__file__).resolve().parent.parent
    found = _version("pulsetrain")
    yield "pulsetrain", f"{found} in {folder}" if found else f"not installed, only found in {folder}; pip install ."
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.platform()}, {os.cpu_count()} processors"
    documents = Path(sysconfig.get_path("data")) / "share" / "doc" / "pulsetrain"
    if documents.exists():
        yield "documentation", str(documents)


def _packages() -> list[_Package]:
    try:
        lines = requires("pulsetrain") or []
    except PackageNotFoundError:
        return []
    found = (_REQUIREMENT.match(line) for line in lines)
    return [_Package(*match.groups()) for match in found if match is not None]


def _is_usable(package: _Package) -> bool:
    """Print the state of a package that pulsetrain itself needs."""
    module = _MODULES.get(package.name, package.name)
    state, usable = _version(package.name), True
    if not state:
        remedy = f"pip install '{package.name}{package.extras or ''}{package.accepted}'"
        usable = module in NOT_FOR_THE_ENGINE
        state = f"missing{', which the engine can do without' if usable else ''}; {remedy}"
    elif _is_other(package, state):
        usable = False
        state += f", but {package.accepted} is needed; pip install '{package.name}{package.accepted}'"
    else:
        try:
            import_module(module)
        except Exception as error:  # whatever a damaged package raises
            usable = False
            state += f", but it cannot be imported: {type(error).__name__}: {error}; "
            state += f"pip install --force-reinstall '{package.name}=={_version(package.name)}'"
    _print([(package.name, state)])
    return usable


def _is_other(package: _Package, found: str) -> bool:
    """Whether this version is not accepted."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # which is reported as missing
        return False
    return found not in SpecifierSet(package.accepted, prereleases=True)


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    yield "cpu", f"{torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    if not torch.cuda.device_count():
        built = torch.version.cuda or torch.version.hip
        yield (
            "cuda",
            f"no GPU found by torch, which is built for {built}"
            if built
            else "none: this build of torch is for the CPU",
        )
    if torch.backends.mps.is_available():
        yield "mps", "available"


def _optional(packages: list[_Package]) -> Iterator[tuple[str, str]]:
    extras = sorted({each.extra for each in packages if each.extra} - {*_NOT_FOR_USERS})
    for extra in extras:
        found = {each: _version(each.name) for each in packages if each.extra == extra}
        parts = [", ".join(f"{each.name} {number}" for each, number in found.items() if number)]
        missing = [each.name for each, number in found.items() if not number]
        other = [f"{each.name}{each.accepted}" for each, number in found.items() if number and _is_other(each, number)]
        parts.append(f"missing: {', '.join(missing)}" if missing else "")
        parts.append(f"needed: {', '.join(other)}" if other else "")
        parts.append(f"pip install 'pulsetrain[{extra}]'" if missing or other else "")
        yield extra, f"{_PURPOSE.get(extra, '')}: {'; '.join(filter(None, parts))}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _passes(name: str, test: Callable[[Path], object]) -> bool:
    from structlog.testing import capture_logs

    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="pulsetrain-doctor-") as folder, capture_logs():
            test(Path(folder))
    except Exception as error:
        print(f"  {name:34} FAILED: {type(error).__name__}: {error}", flush=True)
        return False
    print(f"  {name:34} passed in {time.perf_counter() - started:.1f} s", flush=True)
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
