"""A run whose loss becomes NaN: show that it is reproducible, skip the batch, and verify the new run.

    python examples/time_travel.py          # trains for some seconds in a temporary folder, and writes report.html

Each step is also available on the command line; the commands are printed.
"""

import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain.cli import main as pulsetrain
from pulsetrain.engine.recording import EventLog, diff

CONFIG = Path(__file__).with_suffix(".yaml")
BAD_ROW = 300


def data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """512 rows for training, one of them without a target, and 64 for validation."""
    inputs = torch.randn(576, 4)
    targets = inputs.sum(1, keepdim=True)
    targets[BAD_ROW] = torch.nan
    return (
        DataLoader(TensorDataset(inputs[:512], targets[:512]), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(inputs[512:], targets[512:]), batch_size=64),
    )


def model() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def command(line: str) -> int:
    """Prints a command and runs it as the shell would."""
    print(f"$ pulsetrain {line}", flush=True)
    return pulsetrain(shlex.split(line))


def main() -> dict[str, object]:
    """Runs all steps in the current folder."""
    command(f"train {CONFIG} --run runs/a")

    # Where did it start? The log contains the loss of every step.
    is_bad = next(
        EventLog("runs/a").read(event="iteration_completed", where=lambda event: event.output["loss"] == "NaN")
    )
    bad = is_bad.iteration
    command(f"events runs/a --event iteration_completed --from {bad - 1} --to {bad + 1} --fields iteration,output.loss")

    # Is it reproducible, or was it the machine? Train that part again, from the checkpoint before it.
    proven = command(f"verify runs/a --from {bad - 1} --to {bad + 1}")

    # It is, so the batch is the cause. Skip it, in a run that starts from a good checkpoint of the first one.
    command(f"fork runs/a --at {bad - 1} --skip-batches {bad} --into runs/b --train")

    # The two runs agree up to that batch, and the whole new run is verified.
    print(difference := diff("runs/a", "runs/b"))
    mended = command("verify runs/b")
    command("report runs/a runs/b --into report.html")
    return {"bad": bad, "proven": proven == 0, "mended": mended == 0, "difference": difference}


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    main()
    print(f"the report is {Path('report.html').resolve()}")
