"""Runs of Megatron models: their events and logs, random numbers, guards and averages, as of any other model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig, verify
from pulsetrain.engine import Events, Every, MegatronBackend, MegatronGPT, PretrainStrategy
from pulsetrain.engine.distributed.shards import local
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EMA, SWA, EarlyStopping, Fingerprints, GradientMonitor, NaNGuard
from tests.support.runs_of_megatron import (
    GPT,
    LLAMA,
    alone,
    apart,
    make,
    needs_megatron,
    resuming,
    texts,
    together,
    whole,
)

pytestmark = needs_megatron

DROPPING = {**GPT, "dropout": 0.2}


def dropping(run: Path, *handlers: Any, tensor: int) -> Any:
    return resuming(run, GPT, *handlers, tensor=tensor, model=MegatronGPT(**DROPPING))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_with_dropout_resumes_and_is_verified_bit_for_bit(processes: int, tmp_path: Path):
    def run(rank: int) -> Any:
        first = dropping(tmp_path / "whole", Fingerprints(Every(updates=1)), tensor=processes)
        first.train()
        parts = dropping(tmp_path / "parts", Fingerprints(Every(updates=1)), tensor=processes)
        parts.on(Events.ITERATION_COMPLETED(once=4))(lambda engine: engine.terminate(alike=True))
        parts.train()
        rest = dropping(tmp_path / "parts", Fingerprints(Every(updates=1)), tensor=processes)
        rest.train(resume="latest")
        found = verify(tmp_path / "whole", lambda at: dropping(at, Fingerprints(Every(updates=1)), tensor=processes))
        return whole(first) == whole(rest), bool(found), str(found)

    for equal, reproduced, text in together(run) if processes == 2 else [alone(run)]:
        assert equal
        assert reproduced, text


def test_processes_of_one_copy_draw_the_same_dropout():
    def run(rank: int) -> Any:
        trainer = make(GPT, tensor=2, model=MegatronGPT(**DROPPING), max_epochs=1)
        losses = trainer.train()["train/loss"]
        copies = [each for each in trainer.model.parameters() if each.placements[1].is_replicate()]
        return losses, [each.to_local().tolist() for each in copies]

    one, other = together(run)
    assert one == other


def _events(log: EventLog) -> list[str]:
    """Without those of one of several processes: saving, which rank 0 reports, and how long it waits for batches."""
    return [each.event for each in log.read() if not each.event.startswith(("checkpoint_saved", "get_batch"))]


def test_both_processes_record_the_same_run(tmp_path: Path):
    def run(rank: int, folder: Path, tensor: int) -> None:
        resuming(folder, GPT, Fingerprints(Every(updates=1)), tensor=tensor).train()

    alone(lambda rank: run(rank, tmp_path / "one", 1))
    together(lambda rank: run(rank, tmp_path / "two", 2))
    one = _events(EventLog(tmp_path / "one"))
    for rank in range(2):
        log = EventLog(tmp_path / "two", rank)
        assert log.verify() == []
        assert _events(log) == one


def test_handlers_act_in_both_processes_alike():
    def run(rank: int) -> Any:
        average = EMA(0.5)
        trainer = make(GPT, average, NaNGuard(), EarlyStopping(patience=50), tensor=2, accumulate=2, max_epochs=2)
        history = trainer.train()
        with trainer.model_store.rollback():
            trainer.stepper.discard()
        return whole(trainer), history

    def single(rank: int) -> Any:
        trainer = make(GPT, EMA(0.5), NaNGuard(), EarlyStopping(patience=50), accumulate=2, max_epochs=2)
        return trainer.train(), whole(trainer)

    history, weights = alone(single)
    for found, its in together(run):
        assert apart(found, weights) < 1e-4
        assert its["val/loss"] == pytest.approx(history["val/loss"], abs=1e-5)


def test_an_average_of_late_weights_is_that_of_one_process():
    def run(rank: int, tensor: int) -> Any:
        average = SWA(after_update=2, every=Every(updates=1))
        trainer = make(GPT, average, tensor=tensor, max_epochs=2)
        losses = trainer.train()["val/loss"]
        raw = whole(trainer)
        with average.applied():
            return losses, raw, whole(trainer), average.number_averaged

    losses, raw, averaged, count = alone(lambda rank: run(rank, 1))
    assert count == 4
    assert apart(averaged, raw) > 1e-3
    for its_losses, its_raw, its_averaged, its_count in together(lambda rank: run(rank, 2)):
        assert its_count == count
        assert apart(its_raw, raw) < 1e-4
        assert apart(its_averaged, averaged) < 1e-4
        assert its_losses == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_activations_are_computed_again_with_the_same_result(processes: int):
    def run(rank: int, pattern: str | None) -> Any:
        backend = MegatronBackend("cpu", tensor=processes, activation_checkpointing=pattern)
        trainer = make(LLAMA, backend=backend, max_epochs=1)
        trainer.train()
        return whole(trainer)

    def both(rank: int) -> bool:
        return bool(run(rank, None) == run(rank, "gpt.decoder.layers.*"))

    assert all(together(both) if processes == 2 else [alone(both)])


def test_weight_decay_spares_norms_biases_and_embeddings():
    def run(rank: int) -> list[str]:
        trainer = make(GPT, weight_decay=0.1, no_decay="auto")
        decayed = {
            id(each) for group in trainer.optimizer.param_groups if group["weight_decay"] for each in group["params"]
        }
        return [name for name, each in trainer.model.named_parameters() if id(each) in decayed]

    linear = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2")
    assert {name.split(".")[-2] for name in alone(run)} == set(linear)
    assert all(name.endswith(".weight") for name in alone(run))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_frozen_copy_has_the_weights_of_the_model_and_memory_of_its_own(processes: int):
    def run(rank: int) -> tuple[bool, bool, bool]:
        backend = MegatronBackend("cpu", tensor=processes)
        model = backend.build(MegatronGPT(**GPT))
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1.0)
        copied = backend.frozen_copy(model)
        pairs = list(zip(map(local, model.parameters()), map(local, copied.parameters()), strict=True))
        equal = all(torch.equal(a, b) for a, b in pairs)
        shared = any(a.data_ptr() == b.data_ptr() for a, b in pairs)
        return equal, shared, any(each.requires_grad for each in copied.parameters())

    for found in together(run) if processes == 2 else [alone(run)]:
        assert found == (True, False, False)


def test_gradient_norms_by_module_are_those_of_the_whole_modules():
    def run(rank: int, tensor: int) -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        trainer = make(LLAMA, GradientMonitor(Every(updates=1), by="module"), tensor=tensor, max_epochs=1)
        trainer.on(Events.METRICS_LOGGED)(lambda engine, event: found.append(dict(event.payload.metrics)))
        trainer.train()
        return [{name: value for name, value in each.items() if name.startswith("grad_norm")} for each in found]

    one = alone(lambda rank: run(rank, 1))
    assert "grad_norm/gpt.decoder.layers.1.mlp.linear_fc1" in one[0]
    for found in together(lambda rank: run(rank, 2)):
        assert found == [pytest.approx(each, abs=1e-5) for each in one]


def test_an_optimizer_that_was_made_over_a_built_model_trains_it():
    def run(rank: int, tensor: int) -> Any:
        backend = MegatronBackend("cpu", tensor=tensor)
        model = backend.build(MegatronGPT(**GPT))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = Trainer(
            model, DataLoader(texts(), 8), strategy=PretrainStrategy(), optimizer=optimizer, backend=backend,
            config=TrainingConfig(max_epochs=2, progress=False),
        )  # fmt: skip
        return trainer.train()["train/loss"]

    one = alone(lambda rank: run(rank, 1))
    assert one[1] < one[0]
    assert together(lambda rank: run(rank, 2)) == [pytest.approx(one, abs=1e-5)] * 2


def test_a_model_in_bfloat16_learns_on_two_processes():
    def run(rank: int) -> Any:
        trainer = make(GPT, tensor=2, dtype="bfloat16", max_epochs=3)
        losses = trainer.train()["train/loss"]
        return losses[-1] < losses[0] - 0.1, {str(each.dtype) for each in trainer.model.parameters()}

    assert together(run) == [(True, {"torch.bfloat16"})] * 2
