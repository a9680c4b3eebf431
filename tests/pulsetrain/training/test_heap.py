"""Steps and validations leave no blocks in the heap that keep the memory of the next ones apart."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from pulsetrain.engine import Events, Every
from pulsetrain.handlers import LossSpikeGuard, NaNGuard
from pulsetrain.training import heap
from pulsetrain.training.running_stats import Losses
from tests.support.models import loader, trainer


def resident() -> int:
    """Bytes."""
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def give_back() -> None:
    """Give back what earlier tests have freed: blocks that are taken from it let the process not grow."""
    functions = heap._functions()
    assert functions is not None
    functions[1](0)


class Blocks:
    """Large blocks of the heap with small ones between them."""

    def __init__(self, number: int) -> None:
        self.kept, self.freed = [], []
        for _ in range(number):  # too small for the C library to map each of them apart from the heap
            self.freed.append(torch.ones(30_000))
            self.kept.append(torch.ones(1000))


needs_glibc = pytest.mark.skipif(heap._functions() is None, reason="another C library than glibc, or not Linux")


STEPS = """
import resource, torch
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy

faults = []
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
data = [(torch.randn(8192, 64), torch.randn(8192, 64))] * 40  # activations of 2 MB each
config = TrainingConfig(max_epochs=1, device="cpu", progress=False)
strategy = SupervisedStrategy(torch.nn.functional.mse_loss)
trainer = Trainer(torch.nn.Sequential(*layers), data, strategy=strategy, config=config)
count = lambda: faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
trainer.on(Events.ITERATION_COMPLETED)(count)
trainer.train()
print(max(faults[-1] - faults[-11], 0) // 10)
"""


@needs_glibc
def test_a_step_on_the_cpu_uses_the_memory_of_the_one_before():
    kept, given_back = (
        int(subprocess.check_output([sys.executable, "-c", STEPS], env=os.environ | added))
        for added in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"})
    )
    assert given_back > 1000  # pages of 4 KiB: what the user has set stays
    assert kept < given_back / 20


@needs_glibc
@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "glibc.malloc.mmap_threshold=1048576")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda library: pytest.fail("an option was set"))
    assert not heap.keep_freed_memory.__wrapped__()


@needs_glibc
def test_free_memory_between_blocks_that_stay_is_given_back_after_growth():
    earlier = Blocks(2000)
    earlier.freed.clear()  # as earlier tests may leave it
    give_back()
    run = heap.Heap()
    assert not run.trim()  # the usual size
    blocks = Blocks(2000)
    before = resident()
    blocks.freed.clear()
    assert run.trim()
    assert resident() < before - 150e6
    assert len(blocks.kept) == 2000


@needs_glibc
def test_free_memory_that_the_next_step_needs_stays():
    run = heap.Heap()
    blocks = Blocks(2000)
    blocks.freed.clear()
    size = resident()
    for _ in range(3):
        assert not run.trim()
    assert resident() > size - 50e6


@needs_glibc
def test_growth_that_is_still_there_after_giving_back_becomes_the_usual_size(monkeypatch):
    sizes = iter([1e9, 1.2e9, 1.2e9, 1.21e9, 1.3e9, 1e9, 1.3e9])
    monkeypatch.setattr(heap, "_resident", lambda: int(next(sizes)))
    monkeypatch.setattr(heap, "_functions", lambda: (lambda: heap._Usage(fordblks=10**9), lambda pad: 1))
    run = heap.Heap()
    assert [run.trim() for _ in range(7)] == [False, True, False, False, True, False, True]


def test_another_c_library_has_nothing_to_call(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    heap._functions.cache_clear()
    assert not heap.Heap().trim()
    heap._functions.cache_clear()


def test_each_validation_of_a_run_looks_at_the_same_heap(monkeypatch):
    asked = []
    monkeypatch.setattr(heap.Heap, "trim", lambda self: asked.append(self))
    trainer({"max_epochs": 2}, val_loader=loader(8)).train()
    assert len(asked) == 2
    assert asked[0] is asked[1]


def test_a_validation_keeps_neither_its_last_batch_nor_its_outputs():
    run, outputs = trainer({"max_epochs": 1}, val_loader=loader(8)), []

    @run.evaluator.on(Events.ITERATION_COMPLETED)
    def remember(engine):
        outputs.append(weakref.ref(engine.state.output["y_pred"]))
        assert engine.state.batch is not None

    run.train()
    assert outputs
    assert all(each() is None for each in outputs)
    assert run.evaluator.state.batch is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_on_the_host_are_kept_as_numbers_and_saved_in_their_type(dtype):
    values = torch.linspace(0.1, 0.9, 7, dtype=dtype)
    losses = Losses()
    for value in values:
        losses.add(value, size=2)
    assert not any(isinstance(each, torch.Tensor) for each in losses._losses)
    saved = losses.state_dict()
    assert saved["losses"].dtype == dtype
    assert torch.equal(saved["losses"], values)
    again = Losses()
    again.load_state_dict(saved, "cpu")
    assert torch.equal(again.state_dict()["losses"], values)
    assert torch.equal(again.consume("log"), values.float().mean().double())


def test_guards_keep_no_tensor_of_a_step():
    guards = [NaNGuard(every=Every(iterations=1000)), LossSpikeGuard(every=Every(iterations=1000))]
    run, kept = trainer({"max_epochs": 1}, handlers=guards), []

    @run.on(Events.ITERATION_COMPLETED)
    def look():
        kept.extend([guards[0]._unseen[-1].norm, guards[1]._unseen[-1][1]])

    run.train()
    assert {type(each) for each in kept} == {float}
