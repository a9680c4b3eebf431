"""A run whose loss becomes NaN: prove that it does so each time, leave the batch out, prove the run that results.

    python examples/time_travel.py          # trains some seconds in a temporary folder, and leaves report.html there

Each step is what the command line does as well: the commands are printed.
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
    """512 rows for training, of which one has no target, and 64 for validation."""
    inputs = torch.randn(576, 4)
    targets = inputs.sum(1, keepdim=True)
    targets[BAD_ROW] = torch.nan
    return (
        DataLoader(TensorDataset(inputs[:512], targets[:512]), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(inputs[512:], targets[512:]), batch_size=64),
    )


def model() -> nn.Module:
    """A small one."""
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def command(line: str) -> int:
    """Run a command as the shell would, and say so."""
    print(f"$ pulsetrain {line}", flush=True)
    return pulsetrain(shlex.split(line))


def main() -> dict[str, object]:
    """Tell the story in the folder that the process is in."""
    command(f"train {CONFIG} --run runs/a")

    # Where did it begin? The log holds every step's loss.
    is_bad = next(
        EventLog("runs/a").read(event="iteration_completed", where=lambda event: event.output["loss"] == "NaN")
    )
    bad = is_bad.iteration
    command(f"events runs/a --event iteration_completed --from {bad - 1} --to {bad + 1} --fields iteration,output.loss")

    # Does it happen each time, or was it the machine? Train that stretch again, from the checkpoint before it.
    proven = command(f"verify runs/a --from {bad - 1} --to {bad + 1}")

    # It does: so it is the batch. Leave it out, in a run that begins where the first one was still well.
    command(f"fork runs/a --at {bad - 1} --skip-batches {bad} --into runs/b --train")

    # The two agree up to that batch, and the new run is proven as a whole.
    print(difference := diff("runs/a", "runs/b"))
    mended = command("verify runs/b")
    command("report runs/a runs/b --into report.html")
    return {"bad": bad, "proven": proven == 0, "mended": mended == 0, "difference": difference}


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    main()
    print(f"the report is {Path('report.html').resolve()}")
