"""Trains one small model in one process and in two, and prints how far their losses and weights are apart.

    python examples/distributed/compare.py --modes one,ddp,fsdp,tensor,pipeline --steps 50

It starts its own processes, with torchrun for "ddp" (each has a copy of the model), "fsdp" (each has a shard), "tensor"
(each computes a part of each layer) and "pipeline" (each has some of the layers). All modes train the same global
batches in float64.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Checkpointer, EventLog, EventRecorder, Every, TorchBackend, Trainer, TrainingConfig, load
from pulsetrain.engine import Topology

MODES = ("one", "ddp", "fsdp", "tensor", "pipeline")
TOPOLOGIES = {"fsdp": Topology(shard=2), "tensor": Topology(tensor=2), "pipeline": Topology(pipeline=2)}
TENSOR_PLAN = {"0": {"style": "colwise", "gather": True}, "3": {"style": "colwise", "gather": True}}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).double()


def train(steps: int, mode: str, run: Path) -> None:
    """Train in this process, or with the others that torchrun has started; the run folder gets losses and weights."""
    torch.manual_seed(0)
    inputs = torch.randn(330, 16, dtype=torch.float64)
    data = TensorDataset(inputs, (inputs @ torch.randn(16, 4, dtype=torch.float64)).argmax(1))
    config = TrainingConfig(
        max_iterations=steps, optimizer="adamw", learning_rate=3e-3, clip_grad_norm=1.0, log_every_n_steps=1, seed=0,
        validate_every=Every(iterations=10), device="cpu", progress=False,
    )  # fmt: skip
    backend = TorchBackend(topology=TOPOLOGIES.get(mode), tensor_plan=TENSOR_PLAN if mode == "tensor" else None)
    loaders = DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=50)
    handlers = [EventRecorder(run), Checkpointer(run)]
    Trainer(make_model(), *loaders, backend=backend, config=config, handlers=handlers).train()


def read(run: Path) -> dict[str, torch.Tensor]:
    """The weights in a run's checkpoint, and the losses in its log."""
    log, model = EventLog(run), load(run, make_model())
    losses = {"train/loss": log.read(event="metrics_logged"), "val/loss": log.read(event="validation_completed")}
    found = {name: torch.tensor([each.payload["metrics"][name] for each in events]) for name, events in losses.items()}
    return {"weights": torch.cat([each.detach().flatten() for each in model.parameters()]), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES), help="some of these, with commas: %(default)s")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # given to the processes that it starts
    options = parser.parse_args()
    if options.folder is not None:
        train(options.steps, options.modes, options.folder)
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes.split(","):
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if mode != "one" else []
            script = [__file__, f"--steps={options.steps}", f"--modes={mode}", f"--folder={folder}/{mode}"]
            subprocess.run([sys.executable, *torchrun, *script], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found[mode] = read(Path(folder) / mode)
    first, *others = found
    for mode in others:
        for name, values in found[mode].items():
            print(f"{mode} and {first}, {name}: at most {(values - found[first][name]).abs().max():.1e} apart")


if __name__ == "__main__":
    main()
