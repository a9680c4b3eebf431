"""A run whose loss jumps: find the iterations and the row, try a different early stopping, and compare two runs.

    python examples/flight_recorder.py [FOLDER]     # trains twice for a second or two; by default in a temporary folder
The answers need no further training: the log of the run is read, replayed and compared.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import EventEnum, Events, SupervisedStrategy
from pulsetrain.engine.recording import EventLog, Replay, diff
from pulsetrain.handlers import EarlyStopping, EventRecorder

BAD_ROW = 77


class Seen(EventEnum):
    """A custom event."""

    ROWS = "rows_seen", list  # the rows of the data in an iteration's batch


def train(folder: Path, planted: bool) -> None:
    torch.manual_seed(0)
    inputs, rows = torch.randn(128, 4), torch.arange(128).unsqueeze(1)
    targets = inputs.sum(1, keepdim=True)
    targets[BAD_ROW] += 1000.0 * planted
    trainer = Trainer(
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)),
        DataLoader(TensorDataset(torch.cat([inputs, rows], 1), targets), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=64),
        strategy=SupervisedStrategy("mse"),
        config=TrainingConfig(max_epochs=8, learning_rate=0.01, seed=1),
        handlers=[EventRecorder(folder)],
    )
    trainer.register_events(*Seen)

    @trainer.on(Events.ITERATION_STARTED)
    def take_rows_out(engine: Trainer) -> None:
        features, labels = engine.state.batch  # the last column is the row's number
        engine.fire(Seen.ROWS, features[:, 4].int().tolist())
        engine.state.batch = features[:, :4], labels

    trainer.train()


def main(folder: Path) -> dict[str, object]:
    for name in ("planted", "clean"):
        train(folder / name, planted=name == "planted")
    log = EventLog(folder / "planted")

    # Which iteration was it, and which rows were in its batch?
    spikes = list(log.read(event="iteration_completed", where=lambda event: event.output["loss"] > 1000))
    batches = [set(next(log.read(event="rows_seen", iteration=(s.iteration, s.iteration))).payload) for s in spikes]
    (row,) = set.intersection(*batches)
    print(f"loss above 1000 at iterations {[spike.iteration for spike in spikes]}; row {row} was in each of them")

    # What would a different early stopping have done?
    stops = {}
    for patience in (1, 3):
        replay = Replay(folder / "planted")
        EarlyStopping(metric="val/loss", patience=patience).attach(replay)
        stops[patience] = replay.run().stop_reason
        print(f"patience {patience}: {stops[patience] or 'would have run to the end'}")

    # Where does it first differ from a run without that row?
    print(difference := diff(folder / "planted", folder / "clean"))
    return {"row": row, "stops": stops, "difference": difference}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else name))
