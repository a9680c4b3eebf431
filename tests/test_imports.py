"""Importing has no side effects and loads nothing optional."""

from __future__ import annotations

import runpy
import subprocess
import sys
import typing

import pytest

OPTIONAL = (
    "jax",
    "flax",
    "optax",
    "mlflow",
    "wandb",
    "tensorboard",
    "megatron",
    "matplotlib",
    "sklearn",
    "pandas",
    "torchmetrics",
    "lion_pytorch",
    "schedulefree",
    "transformers",
    "fsspec",
    "s3fs",
    "safetensors",
)

PROBE = """
import signal, sys, threading, random
import torch
signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
random.seed(1); torch.manual_seed(1)
before = random.getstate(), torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
loaded = {*sys.modules}
import PACKAGE
structlog = sys.modules.get("structlog")
assert {number: signal.getsignal(number) for number in signals} == signals, "a signal handler was installed"
assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1]), "random numbers were drawn"
assert (torch.get_num_threads(), torch.get_default_dtype()) == before[2:], "a setting of torch was changed"
assert structlog is None or not structlog.is_configured(), "structlog was configured"
assert threading.active_count() == 1, "a thread was started"
print(*sorted({*sys.modules} - loaded))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "package",
    [
        "pulsetrain.engine, pulsetrain.engine.checkpoint, pulsetrain.engine.optimizers, pulsetrain.engine.schedules",
        "pulsetrain.handlers",
        "pulsetrain, pulsetrain.trainer",
    ],
    ids=["engine", "handlers", "pulsetrain"],
)
def test_importing_has_no_effect_and_pulls_in_nothing_optional(package: str):
    code = PROBE.replace("PACKAGE", package)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not {name.partition(".")[0] for name in done.stdout.split()} & set(OPTIONAL)


@pytest.mark.slow
def test_a_log_line_draws_none_of_the_users_random_numbers():
    code = (
        "import random; random.seed(1); before = random.getstate()\n"
        "from pulsetrain.engine.logs import get_logger; get_logger('x')\n"
        "assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_is_there():
    import pulsetrain
    from pulsetrain import engine, handlers

    for package in (engine, handlers, pulsetrain):
        assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize(
    "package",
    [
        "pulsetrain",
        pytest.param("pulsetrain.engine", marks=pytest.mark.slow),
        pytest.param("pulsetrain.handlers", marks=pytest.mark.slow),
    ],
)
def test_tab_completion_offers_every_public_name_before_any_is_used(package: str):
    code = (
        "import importlib, sys; package = importlib.import_module(sys.argv[1])\n"
        "print(*sorted(set(package.__all__) - set(dir(package))))"
    )
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_type_checkers_see_the_names_that_are_imported_when_they_are_used(monkeypatch: pytest.MonkeyPatch):
    import pulsetrain

    monkeypatch.setattr(typing, "TYPE_CHECKING", True)
    seen = runpy.run_path(str(pulsetrain.__file__))
    assert {name: seen.get(name) for name in pulsetrain.__all__} == {
        name: getattr(pulsetrain, name) for name in pulsetrain.__all__
    }
    assert {name for name, value in seen.items() if getattr(value, "__module__", "").startswith("pulsetrain.")} == set(
        pulsetrain.__all__
    )
