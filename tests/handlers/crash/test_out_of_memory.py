"""The bundle of a run whose memory was not enough: allocations that really fail."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, OptimizerOffload, SupervisedStrategy
from pulsetrain.handlers import CrashBundle
from pulsetrain.handlers.crash import memory_snapshot
from pulsetrain.handlers.crash.crash_bundle import read_bundle
from pulsetrain.handlers.crash.crash_files import Bundle, bundle_of
from pulsetrain.handlers.crash.memory_snapshot import is_out_of_memory
from tests.support.runs import crashed

TOO_MUCH = 2**58  # bytes
WIDTH, ROWS = 64, 512
WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH) * 4  # of four layers


def network() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)])


def failing(
    folder: Path,
    model: nn.Module | None = None,
    *,
    before: Callable[[], object] = int,
    advised: bool = True,
    **config: Any,
) -> Bundle:
    """The bundle of a run in which an allocation fails before the second batch is trained."""
    data = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))] * 3
    run = Trainer(
        model or network(),
        data,
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(**{"optimizer": "adamw", "seed": 0, **config}),
        handlers=[CrashBundle(folder)],
    )

    def allocate() -> None:
        if run.state.iteration == 2:
            before()
            torch.empty(TOO_MUCH, dtype=torch.uint8)

    run.add_event_handler(Events.ITERATION_STARTED, allocate)
    error = crashed(run.train, RuntimeError)
    found = bundle_of(error)
    assert found is not None
    bundle = read_bundle(found)
    notes = [note for note in error.__notes__ if note.startswith("memory: ")]
    assert notes == ([f"memory: {bundle.memory['remedy']}"] if advised else [])
    return bundle


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the system is said to have left."""
    said = {"bytes": 10**12}
    monkeypatch.setattr(memory_snapshot, "available", lambda device: said["bytes"])
    return said


def test_what_was_asked_for_and_what_was_held_is_in_the_bundle(tmp_path: Path, left: dict[str, int]) -> None:
    memory = failing(tmp_path).memory
    assert memory["requested"] == TOO_MUCH
    assert memory["available"] == left["bytes"]
    assert memory["held"]["parameters"] == WEIGHTS
    assert memory["held"]["optimizer"] == pytest.approx(2 * WEIGHTS, abs=100)
    assert memory["held"]["batch"] == 2 * 4 * ROWS * WIDTH
    assert memory["device"] == "cpu"


def test_the_estimate_is_in_the_bundle_by_phase_and_module(tmp_path: Path, left: dict[str, int]) -> None:
    bundle = failing(tmp_path)
    assert bundle.facts["missing"] == {}
    estimated = bundle.memory["estimated"]
    assert estimated["components"]["gradients"] == WEIGHTS
    assert estimated["saved"]["2.1"] == 4 * ROWS * WIDTH
    assert set(estimated["phases"]) == {"forward", "backward", "update"}


def test_where_a_step_fits_it_says_to_look_elsewhere(tmp_path: Path, left: dict[str, int]) -> None:
    left["bytes"] = 2 * TOO_MUCH
    assert "look for what else holds memory" in failing(tmp_path).memory["remedy"]


def test_one_allocation_that_could_never_fit_is_named(tmp_path: Path, left: dict[str, int]) -> None:
    assert "one allocation, of 288,230,376 GB, was more than that" in failing(tmp_path).memory["remedy"]


def test_a_smaller_batch_is_named_where_that_fits(tmp_path: Path, left: dict[str, int]) -> None:
    peak = failing(tmp_path / "first").memory["estimated"]["peak"]
    left["bytes"] = int(0.8 * peak) - WEIGHTS  # the weights are there when the run starts
    memory = failing(tmp_path / "second").memory
    assert "batches of 256 rows in place of 512, 2 of them to an update, training.accumulate=2" in memory["remedy"]
    assert memory["capacity"] == pytest.approx(0.8 * peak, rel=0.01)


def test_sharding_is_named_where_the_weights_alone_are_too_large(tmp_path: Path, left: dict[str, int]) -> None:
    left["bytes"] = 0
    memory = failing(tmp_path, nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(64)])).memory
    assert "split the model, and the rows of the batch, over" in memory["remedy"]
    assert "parallel.shard=" in memory["remedy"]


def test_a_part_that_cannot_be_estimated_is_missing(tmp_path: Path) -> None:
    class Locked(nn.Linear):
        """It cannot be copied."""

        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.lock = open(__file__, encoding="utf-8")  # noqa: SIM115

    model = Locked()
    data = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))] * 3
    run = Trainer(model, data, strategy=SupervisedStrategy("mse"), handlers=[CrashBundle(tmp_path)])
    run.add_event_handler(Events.ITERATION_STARTED, lambda: torch.empty(TOO_MUCH, dtype=torch.uint8))
    bundle = read_bundle(bundle_of(crashed(run.train, RuntimeError)))
    model.lock.close()
    assert "cannot pickle" in bundle.facts["missing"]["memory estimate"]
    assert bundle.memory["held"]["parameters"] == 4 * (WIDTH * WIDTH + WIDTH)


class Drawing(nn.Sequential):
    """It draws small tensors and numbers, which an estimate computes with values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(torch.rand(3).sum()) * random.random() * numpy.random.rand()


def generators() -> tuple[list[int], object, list[int]]:
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def test_the_run_and_its_generators_are_left_as_they_are(tmp_path: Path, left: dict[str, int]) -> None:
    model = Drawing(*network())
    drawn: list[object] = []
    bundle = failing(tmp_path, model, before=lambda: drawn.append(generators()))
    assert bundle.memory["estimated"]["peak"] > 0, "it has computed the model"
    assert drawn == [generators()]
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert all(type(each) is nn.Parameter for each in model.parameters())


def test_the_estimate_is_there_if_no_change_can_be_found(
    tmp_path: Path, left: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: object) -> None:
        raise ValueError("no arithmetic today")

    left["bytes"] = 0
    monkeypatch.setattr(memory_snapshot, "remedies", broken)
    bundle = failing(tmp_path, advised=False)
    assert bundle.facts["missing"] == {"memory estimate": "ValueError: no arithmetic today"}
    assert bundle.memory["estimated"]["components"]["parameters"] == WEIGHTS
    assert bundle.memory["capacity"] == WEIGHTS


def test_optimizer_state_in_a_file_is_neither_held_nor_needed(tmp_path: Path, left: dict[str, int]) -> None:
    memory = failing(tmp_path / "plain").memory
    offloaded = failing(tmp_path / "offloaded", optimizer_offload=OptimizerOffload(folder=str(tmp_path))).memory
    assert offloaded["held"]["optimizer"] < 100, "steps"
    assert offloaded["estimated"]["phases"]["backward"]["optimizer"] == 0
    assert offloaded["estimated"]["peak"] < memory["estimated"]["peak"] - WEIGHTS


def test_other_errors_have_no_memory(tmp_path: Path) -> None:
    data = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH + 1))]
    run = Trainer(network(), data, strategy=SupervisedStrategy("mse"), handlers=[CrashBundle(tmp_path)])
    assert read_bundle(bundle_of(crashed(run.train))).memory is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] . DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."),
            True,
        ),
        (RuntimeError("size mismatch in memory"), False),
        (ValueError("not enough memory: you tried to allocate 64 bytes."), False),
        (None, False),
    ],
)
def test_errors_of_allocation_are_known(error: BaseException | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


LIMITED = """
import resource, sys
import torch
from torch import nn
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy
from pulsetrain.handlers import CrashBundle

model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(12)])
rows = int(sys.argv[2])  # of 1 kB each
data = [(torch.ones(64, 256), torch.zeros(64, 256))] * 2 + [(torch.ones(rows, 256), torch.zeros(rows, 256))] * 2
handlers = [CrashBundle(sys.argv[1])]
run = Trainer(model, data, strategy=SupervisedStrategy("mse"), config=TrainingConfig(seed=0), handlers=handlers)

lines = open("/proc/self/status").read().splitlines()
used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000, -1))
try:
    run.train()
except RuntimeError as error:
    print(*error.__notes__, sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space, and reads /proc")
def test_a_process_that_runs_into_its_limit_says_which_batch_would_fit(tmp_path: Path) -> None:
    script = tmp_path / "limited.py"
    script.write_text(textwrap.dedent(LIMITED))

    def run(rows: int, name: str) -> str:
        words = [sys.executable, str(script), str(tmp_path / name), str(rows)]
        # the limit is on addresses, which the heaps of threads would take without using them
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True, env=environment)
        return done.stdout + done.stderr

    output = run(40_000, "run")
    found = re.search(r"^memory: .* batches of (\d+) rows in place of 40000", output, re.MULTILINE)
    assert found, output
    assert "memory: " not in run(int(found[1]), "smaller")
    bundle = read_bundle(next((tmp_path / "run" / "crash").iterdir()))
    assert bundle.memory["requested"] == 40_000 * 256 * 4
    assert bundle.memory["estimated"]["peak"] > bundle.memory["capacity"]
    assert bundle.facts["missing"] == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_on_a_gpu_the_allocators_summary_is_in_the_bundle(tmp_path: Path) -> None:
    class Huge(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.empty(2**45, device=x.device)
            return super().forward(x)

    data = [(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))]
    model, config = Huge(WIDTH, WIDTH), TrainingConfig(device="cuda")
    run = Trainer(model, data, strategy=SupervisedStrategy("mse"), config=config, handlers=[CrashBundle(tmp_path)])
    bundle = read_bundle(bundle_of(crashed(run.train, torch.OutOfMemoryError)))
    assert "allocated" in (bundle.folder / "memory_summary.txt").read_text().lower()
