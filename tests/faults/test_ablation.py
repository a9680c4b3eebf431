"""Dropping any single piece of a checkpoint is noticed: a run resumed without it differs from the uninterrupted one.

The pieces are whatever a checkpoint holds; nobody lists them. A piece that no case notices is one that the
checks cannot see, or that nothing needs.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from torch import Tensor

from pulsetrain import Trainer
from pulsetrain.engine import Events, Every
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.step.accumulation import Accumulate
from tests.faults.everything import bits, leaves, logged, make, outcome

pytestmark = pytest.mark.slow

PARTS = (
    "format", "made_with", "backend", "strategy", "handlers", "model", "modules", "optimizer", "counters", "stepper",
    "data", "validation", "reporter", "unsaved", "rng",
)  # fmt: skip

# what every new trainer says of itself, so that nothing is lost with it
RESTATED = {
    "format", "made_with/*", "data/seed", "rng/python/version", "rng/(cuda|xpu|mps)", "handlers/.*/settings",
    "optimizer/param_groups/*", "optimizer/initial_rates/*", "backend/name",
    "backend/scaler/(growth_factor|backoff_factor|growth_interval)",
    "handlers/LRScheduler/state/schedule/*", "handlers/EMA/state/(average/buffers_kept|validates|measured)",
    "(reporter/named_losses|stepper/grad_norms)",  # of several optimizers
    "modules/*", "unsaved/*",  # nothing changes; see tests/integration/test_hidden_state_*.py
}  # fmt: skip
# says whether the folder's log is the run's own, as here; see tests/handlers/recorder/test_log_loss.py
# and which of its records a lost log has to get again
OF_THE_LOG = {f"handlers/EventRecorder/state/{name}" for name in ("run", "seams", "starts")}
# of runs whose policy makes the batches, which are resumed in tests/integration/test_strategies_runs.py
OF_ROLLOUTS = {"counters/rollout_round", r"handlers/Checkpointer\(.*\)/state/rollouts"}


class Drawn:
    """Batches of no known length, drawn as they are read: what cannot start at a position."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(8):
            rows = torch.randn(3, 6) + random.random() + np.random.rand()
            yield rows, rows.sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Case:
    """A run, and the iteration of the checkpoint that it resumes from."""

    name: str
    cut: int
    options: dict[str, Any] = field(default_factory=dict)
    killed: bool = False  # in the event in which it saved: the log contains nothing after it
    every: Every = Every(iterations=1)  # noqa: RUF009  # it is frozen

    def make(self, folder: Path) -> Trainer:
        options = {name: value() if isinstance(value, type) else value for name, value in self.options.items()}
        return make(folder, every=self.every, keep_last=100, **options)


CASES = (
    Case("inside the second epoch and an accumulation", 13),
    Case("in the warm-up", 5),
    Case("after an epoch's last update", 24),
    Case("after an epoch and its validation", 16, every=Every(epochs=1)),
    Case("killed in the event at an epoch's end", 16, killed=True, every=Every(epochs=1)),
    Case("after the last validation", 32, every=Every(epochs=1)),
    Case("fp16, updates by tokens", 13, {"precision": "fp16", "accumulate": Accumulate(tokens=50)}),
    Case("a rate set by hand, batches that are drawn", 13, {"schedule": None, "loader": Drawn}),
)


class OtherEventError(Exception):
    """The log of a resumed run has another event than that of the uninterrupted one."""


class Ablation:
    """One case's uninterrupted run, and the result of resuming it without a piece of its checkpoint."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        run = case.make(folder / "whole")

        @run.on(Events.CHECKPOINT_SAVED)
        def keep_log(engine: Trainer) -> None:
            if engine.state.iteration == case.cut:
                shutil.copytree(folder / "whole" / "events", folder / "killed")

        run.train()
        self.expected = outcome(folder / "whole")
        self.source = folder / "whole" / "checkpoints" / f"{case.cut:09d}-checkpoint"
        self.at_first = dict(leaves(case.make(folder / "fresh").checkpoint_state()))
        self.pieces: dict[str, list[str]] = {}  # numbered ones together: each parameter's exp_avg
        self.in_use: set[str] = set()  # values that differ from those of a new trainer
        for path, value in leaves(self.load()):
            piece = re.sub(r"/\d+(?=/|$)", "/*", path)
            self.pieces.setdefault(piece, []).append(path)
            if path not in self.at_first or bits(self.at_first[path]) != bits(value):
                self.in_use.add(piece)

    def load(self) -> dict[str, Any]:
        return dict(CheckpointManager(self.source.parent).load(self.source))

    def resume_without(self, piece: str | None, to_its_end: bool = True) -> tuple[dict[str, Any], Trainer, list[str]]:
        """What the resumed run leaves, its trainer, and what was warned of.

        Args:
            to_its_end: otherwise it ends at the first iteration after a differing event.

        Raises:
            OtherEventError: it did so.
        """
        state = self.load()
        for path in self.pieces[piece] if piece else ():
            assert self._drop(state, path, path)
        folder = self.folder / "resumed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / ("killed" if self.case.killed else "whole/events"), folder / "events")
        shutil.copy(self.folder / "whole" / "metrics.csv", folder)
        CheckpointManager(folder / "checkpoints").save(state, "checkpoint", step=self.case.cut)
        trainer = self.case.make(folder)

        @trainer.on(Events.ITERATION_STARTED)
        def stop_at_last(engine: Trainer) -> None:
            assert engine.state.iteration < 100, "does not end"
            check = trainer.handlers[3].resume_check
            if not to_its_end and check is not None and check.difference is not None:
                raise OtherEventError

        with structlog.testing.capture_logs() as logs:
            trainer.train(resume="latest")
        return outcome(folder), trainer, [line["event"] for line in logs if line["log_level"] != "info"]

    def notices(self, piece: str) -> bool:
        try:
            left, _, _ = self.resume_without(piece, to_its_end=False)
        except OtherEventError:  # the rest of the run could only add to it
            found = {f"log/{place}": record for place, record in logged(self.folder / "resumed")}
            return any(self.expected.get(name) != record for name, record in found.items())
        except Exception:  # refused, or came to nothing
            return True
        expected = {name: value for name, value in self.expected.items() if name in left or not self._before(name)}
        return left != expected

    def _before(self, name: str) -> bool:
        """Whether it belongs to a checkpoint before the resumed one, which was not copied."""
        return name.split("/")[0].split("-")[0] < f"{self.case.cut:09d}"

    def _drop(self, state: Any, path: str, rest: str) -> bool:
        """Put what a new trainer has in the piece's place, or nothing."""
        keys = state if isinstance(state, dict) else range(len(state))
        for key in list(keys):
            if rest == str(key):
                if path in self.at_first:
                    state[key] = self.at_first[path]
                else:
                    del state[key]
                return True
            if rest.startswith(f"{key}/") and self._drop(state[key], path, rest[len(str(key)) + 1 :]):
                return True
        return False


@pytest.fixture(scope="module")
def ablate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pulsetrain.training.running_stats._FOLD", 5
        )  # otherwise no run is long enough to fold its losses
        patch.setattr(os, "fsync", lambda descriptor: None)  # thousands of saves, and no machine crashes here
        yield cache(lambda case: Ablation(case, tmp_path_factory.mktemp("ablation")))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_with_every_piece_there_is_no_difference(ablate: Any, case: Case):
    """Otherwise the tests below would prove nothing."""
    ablation = ablate(case)
    left, trainer, warned = ablation.resume_without(None)
    expected = {name: value for name, value in ablation.expected.items() if name in left or not ablation._before(name)}
    assert left == expected
    check = trainer.handlers[3].resume_check
    if case.killed or case.cut == 32:  # the log has nothing to compare
        assert check is None
    else:
        assert check.agreed > 10
        assert not check.waiting
        assert check.difference is None
    assert {event for event in warned if not event.startswith("fp16")} <= {
        "the loader cannot start at a position: it is read again up to where the run was"
    }


@pytest.mark.parametrize("part", PARTS)
def test_no_piece_can_be_lost_unnoticed(ablate: Any, part: str):
    ablations = [ablate(case) for case in CASES]
    names = {piece for each in ablations for piece in each.pieces if piece.split("/")[0] == part}
    pieces = {
        piece for piece in names if not any(name.startswith(f"{piece}/") for name in names)
    }  # not empty here alone
    used = {piece for piece in pieces - OF_THE_LOG if any(piece in each.in_use for each in ablations)}
    assert {
        piece
        for piece in pieces - used - OF_THE_LOG
        if not any(re.fullmatch(f"{rule}.*", piece) for rule in RESTATED | OF_ROLLOUTS)
    } == set()
    unnoticed = {piece for piece in used if not any(each.notices(piece) for each in ablations if piece in each.in_use)}
    assert unnoticed == set()


def test_the_parts_are_those_of_a_checkpoint(ablate: Any):
    assert {piece.split("/")[0] for case in CASES for piece in ablate(case).pieces} == set(PARTS)


@pytest.mark.parametrize(
    "part", ["model", "optimizer", "stepper/accumulation", "stepper/gradients", "reporter/losses", "rng"]
)
def test_the_comparison_with_the_log_alone_notices_a_lost_piece(ablate: Any, part: str):
    """Events reveal the inputs of the next iterations, so the uninterrupted run is not needed."""
    ablation = ablate(CASES[0])
    unnoticed = set()
    for piece in ablation.in_use:
        if not f"{piece}/".startswith(f"{part}/"):
            continue
        try:
            _, trainer, _ = ablation.resume_without(piece)
        except Exception:  # refused
            continue
        if trainer.handlers[3].resume_check.difference is None:
            unnoticed.add(piece)
    allowed = {
        "model/norm.num_batches_tracked",  # counts for a momentum of None alone
        "optimizer/param_groups/./lr",  # which the schedule writes
        "optimizer/initial_rates",  # which a resume compares, and no event carries
        "stepper/accumulation/tokens",  # of updates by tokens
        "reporter/losses/.*epoch.*",  # the epoch's mean, which no event carries
    }
    assert {piece for piece in unnoticed if not any(re.fullmatch(rule, piece) for rule in allowed)} == set()
