"""Runs of several processes that were killed: resumed by as many, or by another number."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.handlers import Checkpointer
from tests.support.models import Keeping, pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import RANKS, double, dropping, in_one_process, linear, make, weights_of


def test_killed_runs_of_two_ranks_resume_bit_for_bit_with_their_random_numbers(tmp_path: Path):
    ends = (4, 5, 6, 8)

    def cut(rank: int, at: int) -> None:
        made = dropping(tmp_path / str(at))
        made.on(Events.ITERATION_COMPLETED(once=at))(lambda: os._exit(0))
        made.train()

    def resumed(rank: int) -> Any:
        found = []
        for at in ends:
            made = dropping(tmp_path / str(at))
            with structlog.testing.capture_logs() as logs:
                made.train(resume="latest")
            found.append((weights_of(made), [line["event"] for line in logs if line["log_level"] == "warning"]))
        return found

    def whole(rank: int) -> Any:
        made = dropping(tmp_path / f"whole-{rank}")
        drawn: list[float] = []
        made.on(Events.ITERATION_COMPLETED)(lambda: drawn.append(torch.rand(()).item()))
        made.train()
        return weights_of(made), drawn

    for at in ends:
        in_processes(partial(cut, at=at))
    first, second = in_processes(resumed)
    expected, other = in_processes(whole)
    assert [each.error for each in (first, second, expected, other)] == [""] * 4
    assert first.value == second.value == [(expected.value[0], [])] * len(ends)
    assert not set(expected.value[1]) & set(other.value[1]), "each rank draws its own numbers"
    assert not any(EventLog(tmp_path / str(at)).verify() for at in ends)


@pytest.mark.slow
def test_the_main_process_may_read_the_newest_checkpoint_for_longer_than_a_rank_may_be_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    newest = CheckpointManager.get_latest

    def slowly(manager: CheckpointManager) -> Any:
        time.sleep(6.0)
        return newest(manager)

    monkeypatch.setattr(CheckpointManager, "get_latest", slowly)

    def body(rank: int) -> Any:
        join().timeout = 4.0
        made = dropping(tmp_path)
        made.train(resume="latest")
        return made.state.iteration

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value > 0


@pytest.mark.parametrize("before", [1, 2])
def test_a_run_resumes_on_another_number_of_processes_with_the_same_global_batches(before: int, tmp_path: Path):
    def plain(folder: Path) -> Trainer:
        saving = Checkpointer(folder, Every(iterations=2), keep_last=20)
        return make(linear().double(), DataLoader(double(19), 4, shuffle=True), saving, max_epochs=3)

    def cut(rank: int) -> None:
        made = plain(tmp_path / "run")
        made.on(Events.ITERATION_COMPLETED(once=7))(lambda: os._exit(0))
        made.train()

    def resumed(rank: int) -> Any:
        made = plain(tmp_path / "run")
        made.train(resume="latest")
        return weights_of(made), made.state.samples, made.state.iteration

    in_processes(cut, before) if before > 1 else in_one_process(cut, forked=True)
    after = in_processes(resumed) if before == 1 else [in_one_process(resumed, forked=True)]
    assert {each.error for each in after} == {""}
    whole = plain(tmp_path / "whole")
    whole.train()
    for each in after:
        weights, samples, iterations = each.value
        assert (samples, iterations) == (whole.state.samples, whole.state.iteration)
        for mine, theirs in zip(weights, weights_of(whole), strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_inside_an_accumulation_has_the_gradients_of_all_ranks(tmp_path: Path):
    def plain(folder: Path) -> Trainer:
        saving = Checkpointer(folder, Every(iterations=3), keep_last=20)
        return make(linear().double(), DataLoader(double(24), 4, shuffle=True), saving, accumulate=2)

    def cut(rank: int) -> None:
        made = plain(tmp_path / "run")
        made.on(Events.ITERATION_COMPLETED(once=4))(lambda: os._exit(0))
        made.train()

    def resumed(rank: int) -> Any:
        made = plain(tmp_path / "run")
        made.train(resume="latest")
        return weights_of(made)

    in_processes(cut)
    first, second = in_processes(resumed)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    whole = plain(tmp_path / "whole")
    whole.train()
    for mine, theirs in zip(first.value, weights_of(whole), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)


def test_a_run_that_is_stopped_inside_an_accumulation_resumes_bit_for_bit(tmp_path: Path):
    """The sums are formed in the same order wherever a run is stopped: each batch is averaged over the ranks."""

    def body(rank: int) -> Any:
        def wide(folder: Path) -> Trainer:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
            loader = DataLoader(pairs(32), 4, shuffle=True)
            return make(model, loader, Checkpointer(folder), accumulate=4)

        stopped, resumed, whole = wide(tmp_path / "run"), wide(tmp_path / "run"), wide(tmp_path / "whole")
        stopped.on(Events.ITERATION_COMPLETED(once=6))(lambda: stopped.terminate(alike=True))
        stopped.train()
        resumed.train(resume="latest")
        whole.train()
        return stopped.accumulated, weights_of(resumed), weights_of(whole)

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    for waiting, after, expected in (first.value, second.value):
        assert waiting == 2
        assert after == expected


def test_what_prepare_batch_draws_is_repeated_after_a_kill(tmp_path: Path):
    class Noisy(SupervisedStrategy):
        def prepare_batch(self, batch: object) -> Any:
            prepared = super().prepare_batch(batch)
            return replace_inputs(prepared, prepared.inputs + torch.randn_like(prepared.inputs))

    def noisy(folder: Path) -> Trainer:
        config = TrainingConfig(max_epochs=3, optimizer="sgd", learning_rate=0.01, seed=3)
        saving = Checkpointer(folder, Every(iterations=2), keep_last=20)
        return Trainer(linear(), DataLoader(pairs(16), 4), strategy=Noisy("mse"), config=config, handlers=[saving])

    def cut(rank: int) -> None:
        made = noisy(tmp_path / "run")
        made.on(Events.ITERATION_COMPLETED(once=5))(lambda: os._exit(0))
        made.train()

    def ended(folder: str, resume: Any) -> Any:
        def body(rank: int) -> Any:
            made = noisy(tmp_path / folder)
            made.train(resume=resume)
            return weights_of(made)

        return in_processes(body)

    in_processes(cut)
    resumed, whole = ended("run", "latest"), ended("whole", None)
    assert [each.error for each in (*resumed, *whole)] == [""] * 4
    assert resumed[0].value == resumed[1].value == whole[0].value


def replace_inputs(batch: TrainingBatch, inputs: Any) -> TrainingBatch:
    return TrainingBatch(inputs, batch.targets, batch.samples, batch.tokens, batch.weight)


@pytest.mark.parametrize("world", [1, RANKS])
def test_a_model_that_loads_by_itself_gets_the_state_that_it_gave(world: int, tmp_path: Path):
    def body(rank: int) -> Any:
        given = []
        for form in ("torch", "safetensors"):
            for resume in (None, "latest"):
                model = Keeping()
                saver = Checkpointer(tmp_path / form, Every(iterations=2), form=form)
                made = make(model, DataLoader(pairs(16), 4), saver, max_epochs=1 if resume is None else 2)
                made.train(resume=resume)
            given += model.given
        if world == 1:
            model.given.clear()
            made.train_epoch(model_state=made.model_state)
            given += model.given
        return given

    expected = [(OrderedDict, ["_metadata", "note"])]
    for each in in_processes(body, world):
        assert each.error == ""
        assert each.value == expected * (3 if world == 1 else 2)
