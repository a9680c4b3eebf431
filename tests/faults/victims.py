"""The kinds of runs that are killed: what each of them depends on, and what a resume may say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.handlers import Checkpointer, CSVLogger, EventRecorder, LossSpikeGuard, NaNGuard
from tests.faults import everything
from tests.support.runs import guarded_data, guarded_run
from tests.support.runs_hidden_state import BATCH, EPOCHS
from tests.support.stateful_parts import Averaging, SavedRows, SavedShuffling

CHANGED_AT = 2  # the epoch after which a handler changes what no state dict of torch has


class Hidden(nn.Module):
    """Its outputs depend on a buffer that changes with each batch and is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.bank: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.lerp_(inputs.mean().detach(), 0.1)
        hidden = torch.relu(self.norm(self.backbone(inputs)))
        return self.last(self.dropout(hidden)) + self.seen + sum(self.bank)


def make_hidden_state(folder: Path, *, fills_bank: bool = False, keep_last: int = 3, **saves: Any) -> Trainer:
    """State outside of torch's state dicts that checkpoints hold, and a list of the model's that they do not.

    Args:
        fills_bank: a handler adds to that list.
    """
    model, rows, sampler = Hidden(), SavedRows(), SavedShuffling()
    model.backbone.requires_grad_(False)
    trainer = Trainer(
        model,
        DataLoader(rows, BATCH, sampler=sampler),
        strategy=SupervisedStrategy(Averaging()),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        config=TrainingConfig(max_epochs=EPOCHS, accumulate=2, schedule="cosine", seed=5, log_every_n_steps=3),
        handlers=[Checkpointer(folder, keep_last=keep_last, **saves), EventRecorder(folder), CSVLogger(folder)],
    )

    @trainer.on(Events.EPOCH_COMPLETED(once=CHANGED_AT))
    def change() -> None:
        model.backbone.requires_grad_(True)
        model.norm.eval()
        model.dropout.p = 0.5
        rows.level, sampler.level = 3, 2
        if fills_bank:
            model.bank.append(0.7)

    return trainer


def make_unsaved_state(folder: Path, **saves: Any) -> Trainer:
    return make_hidden_state(folder, fills_bank=True, **saves)


BAD_ROWS, FAR_ROW = (13, 29), 57


def make_rewinds(folder: Path, *, keep_last: int = 9, **saves: Any) -> Trainer:
    """Two guards, each of which returns to an earlier checkpoint, in both epochs."""
    inputs, targets = guarded_data(BAD_ROWS).tensors
    targets[FAR_ROW] *= 1e4
    return guarded_run(
        NaNGuard("rewind", Every(iterations=3), max_rewinds=9),
        LossSpikeGuard(window=8, policy="rewind", every=Every(iterations=2), max_rewinds=9),
        Checkpointer(folder, keep_last=keep_last, **saves),
        EventRecorder(folder),
        CSVLogger(folder),
        dataset=TensorDataset(inputs, targets),
        shuffle=True,
        max_epochs=2,
        log_every_n_steps=2,
        seed=17,  # with it, even the run that saves least has a checkpoint before the first bad batch
    )


@dataclass(frozen=True)
class Victim:
    """A kind of run.

    Args:
        make: makes its trainer for a folder, with the arguments of its Checkpointer.
        has_workers: whether its loader may have workers.
        warnings: how the warnings of such a run begin; any other one is a false alarm.
        lacks: the attribute that its checkpoints lack from `lacks_after` on.
        lacks_after: iteration after which it changes.
        loses_log: whether its log loses a part between a kill and a resume.
        rewinds: whether it returns to checkpoints.
    """

    make: Callable[..., Trainer]
    has_workers: bool = False
    warnings: tuple[str, ...] = ()
    lacks: str = ""
    lacks_after: int = 0
    loses_log: bool = False
    rewinds: bool = False


REWINDING = Victim(
    make_rewinds,
    warnings=(
        "an update was skipped",
        "the loss has jumped",
        "the run returns to a checkpoint",
        "the run ends, and does not rewind",  # of the second guard in one iteration
    ),
    rewinds=True,
)
VICTIMS = {
    "everything": Victim(everything.make, has_workers=True),
    "hidden_state": Victim(make_hidden_state),
    "unsaved_state": Victim(
        make_unsaved_state,
        warnings=("attributes change during the run and are in no checkpoint", "the checkpoint lacks state"),
        lacks="model.bank",
        lacks_after=CHANGED_AT * 5,
    ),
    "rewinds": REWINDING,
    "log_loss": Victim(everything.make, loses_log=True),
    "log_loss_and_rewinds": replace(REWINDING, loses_log=True),
}

# how often a run saves, and whether in the background: a resume has nothing, little, or a whole run to compute again
SAVES: tuple[dict[str, Any], ...] = (
    {"every": Every(iterations=1)},
    {"every": Every(iterations=5)},
    {"every": Every(iterations=3), "background": True},
)
