"""Importing has no side effects and loads nothing optional."""

from __future__ import annotations

import importlib
import runpy
import shlex
import subprocess
import sys
import typing
from contextlib import closing
from pathlib import Path

import pytest

from pulsetrain.engine.recording import LoggedEvent, LogWriter
from tests.support.cases import slow_but

PACKAGES = ["pulsetrain", "pulsetrain.engine", "pulsetrain.handlers", "pulsetrain.engine.recording"]
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


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_see_the_names_that_are_imported_when_they_are_used(name: str, monkeypatch: pytest.MonkeyPatch):
    package = importlib.import_module(name)
    monkeypatch.setattr(typing, "TYPE_CHECKING", True)
    seen = runpy.run_path(str(package.__file__), run_name=name)
    assert {each: seen.get(each) for each in package.__all__} == {
        each: getattr(package, each) for each in package.__all__
    }
    own = {each for each, value in seen.items() if getattr(value, "__module__", "").startswith("pulsetrain.")}
    assert own - {"lazy_names", "__getattr__", "__dir__"} <= set(package.__all__)


def test_the_function_diff_is_not_the_package_of_its_name():
    code = "import pulsetrain.engine.recording.diff.check; from pulsetrain.engine.recording import diff; print(diff)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("<function diff")


def modules_loaded_by(*words: str, cwd: Path | None = None) -> set[str]:
    """What a Python program has imported at its end."""
    code = "import atexit, sys; atexit.register(lambda: print('\\n' + ' '.join(sys.modules), file=sys.stderr))\n"
    done = subprocess.run(
        [sys.executable, "-c", code + words[0], *words[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        check=False,
    )
    return set(done.stderr.splitlines()[-1].split())


def loaded_by(*words: str, cwd: Path | None = None) -> set[str]:
    """The same, packages alone."""
    return {each.partition(".")[0] for each in modules_loaded_by(*words, cwd=cwd)}


COMMAND = "import sys; from pulsetrain.cli import main; sys.exit(main(sys.argv[1:]))"
ANSWERED = ["--help", "--version", "completion bash", "train --help", "nonsense", "train", ""]
READING = [
    "events a", "events a --check", "events a --where \"output['loss'] < 1\"", "diff a a", "export a --format csv",
    "export a --format perfetto",
]  # fmt: skip
SLOW = {"torch", "ignite", "numpy", "structlog"}  # to import


@pytest.mark.parametrize("package", slow_but(PACKAGES[-1:], PACKAGES))
def test_importing_a_package_imports_nothing_slow(package: str):
    assert not loaded_by(f"import {package}") & SLOW


def test_the_process_that_draws_figures_starts_without_torch():
    assert not loaded_by("from pulsetrain.handlers.plots.painter import serve") & SLOW


@pytest.mark.parametrize("words", slow_but(["--help", "completion bash"], ANSWERED))
def test_what_the_command_line_answers_by_itself_imports_nothing_slow(words: str):
    assert not loaded_by(COMMAND, *words.split()) & SLOW


@pytest.mark.parametrize("words", slow_but(["events a --check", "diff a a"], READING))
def test_reading_a_log_from_the_command_line_imports_nothing_slow(words: str, tmp_path: Path):
    with closing(LogWriter(tmp_path / "a" / "events")) as writer:
        for n in range(3):
            writer.add(LoggedEvent(n, "trainer", "iteration_completed", 1, n, output={"loss": 0.5}, seq=n, t=10**18))
        writer.end()
    assert not loaded_by(COMMAND, *shlex.split(words), cwd=tmp_path) & SLOW


def test_listing_known_runs_imports_only_what_it_needs(tmp_path: Path):
    with closing(LogWriter(tmp_path / "a" / "events")) as writer:
        writer.add(LoggedEvent(0, "trainer", "completed", seq=0, t=10**18))
        writer.end()
    (tmp_path / "a" / "config.yaml").write_text("{training: {seed: 0}}")
    first, second = (modules_loaded_by(COMMAND, "runs", str(tmp_path)) for _ in range(2))
    assert {"yaml", "zstandard"} <= first
    recording = "pulsetrain.engine.recording"
    others = {f"{recording}.diff.compare", f"{recording}.log.writer", f"{recording}.replay.playback"}
    assert not second & {*SLOW, *others, "yaml", "zstandard", "hashlib", "json", "csv", "pickle", "difflib", "tempfile"}


@pytest.mark.slow
def test_replaying_imports_the_named_handler_and_no_trainer(tmp_path: Path):
    with closing(LogWriter(tmp_path / "a" / "events")) as writer:
        writer.add(LoggedEvent(0, "trainer", "iteration_completed", 1, 1, output={"loss": 0.5}, seq=0, t=10**18))
        writer.end()
    code = "import atexit, sys; atexit.register(lambda: print('\\n' + ' '.join(sys.modules), file=sys.stderr))\n"
    words = ["replay", "a", "--handler", "step_limit:iterations=1"]
    done = subprocess.run(
        [sys.executable, "-c", code + COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=True,
    )
    loaded = set(done.stderr.splitlines()[-1].split())
    assert "pulsetrain.handlers.guards.limits" in loaded
    assert not loaded & {"pulsetrain.trainer", "pulsetrain.handlers.monitors.flop_count", "torch.utils.flop_counter"}


@pytest.mark.parametrize("enabled", [True, False])
def test_importing_a_name_leaves_the_garbage_collector_as_it_was(enabled):
    code = f"import gc; ({'gc.enable' if enabled else 'gc.disable'})(); from pulsetrain.engine import Engine; "
    code += "import pulsetrain\ntry: pulsetrain.Nothing\nexcept AttributeError: print(gc.isenabled())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(enabled)


def test_a_replay_imports_no_backend():
    code = "import sys, pulsetrain.reproduce.what_if; assert 'pulsetrain.engine.backends.torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
