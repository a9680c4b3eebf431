"""Trains one small model in one process and in two, and prints how far their losses and weights are apart.

    python examples/distributed/compare.py --modes one,ddp,fsdp,tensor,pipeline --steps 50

It starts its own processes, with torchrun for "ddp" (each has a copy of the model), "fsdp" (each has a shard), "tensor"
(each computes a part of each layer) and "pipeline" (each has some of the layers). All modes train the same global
batches in float64.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy, Topology, TorchBackend

PROCESSES = {"one": 1, "ddp": 2, "fsdp": 2, "tensor": 2, "pipeline": 2}
TOPOLOGIES = {"fsdp": Topology(shard=2), "tensor": Topology(tensor=2), "pipeline": Topology(pipeline=2)}
TENSOR_PLAN = {"0": {"style": "colwise", "gather": True}, "3": {"style": "colwise", "gather": True}}


def train(steps: int, mode: str, result: Path) -> None:
    """Train as many steps, and let the main process write the losses and the weights."""
    torch.manual_seed(0)
    inputs = torch.randn(330, 16, dtype=torch.float64)
    labels = (inputs @ torch.randn(16, 4, dtype=torch.float64)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).double()
    data = TensorDataset(inputs, labels)
    config = TrainingConfig(
        max_iterations=steps, optimizer="adamw", learning_rate=3e-3, clip_grad_norm=1.0, log_every_n_steps=1, seed=0,
        validate_every=Every(iterations=10), device="cpu",
    )  # fmt: skip
    loaders = DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=50)
    backend = TorchBackend(topology=TOPOLOGIES.get(mode), tensor_plan=TENSOR_PLAN if mode == "tensor" else None)
    strategy = SupervisedStrategy("cross_entropy")
    trainer = Trainer(model, *loaders, strategy=strategy, backend=backend, config=config)
    losses: dict[str, list[float]] = {"train/loss": [], "val/loss": []}
    for event, name in ((Events.METRICS_LOGGED, "train/loss"), (Events.VALIDATION_COMPLETED, "val/loss")):
        trainer.add_event_handler(
            event, lambda engine, event, name=name: losses[name].append(event.payload.metrics[name])
        )
    trainer.train()
    own = {name: each.detach() for name, each in model.named_parameters() if not each.is_meta}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in own.items()}
    if mode == "pipeline":
        of_each: list[dict[str, torch.Tensor]] = [{}, {}]
        torch.distributed.all_gather_object(of_each, whole)
        whole = of_each[0] | of_each[1]
    if int(os.environ.get("RANK", "0")) == 0:
        weights = torch.cat([each.flatten() for each in whole.values()])
        torch.save({"weights": weights, **{name: torch.tensor(each) for name, each in losses.items()}}, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(PROCESSES), help="some of these, with commas: %(default)s")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # of one of the processes that it starts
    options = parser.parse_args()
    if options.result is not None:
        train(options.steps, options.mode, options.result)
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in options.modes.split(","):
            result = Path(folder) / mode
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES[mode]}"]
            words = [
                *(launch if PROCESSES[mode] > 1 else []),
                __file__,
                f"--steps={options.steps}",
                f"--result={result}",
                f"--mode={mode}",
            ]
            subprocess.run([sys.executable, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found[mode] = torch.load(result)
    first, *others = found
    for mode in others:
        for name, values in found[mode].items():
            print(f"{mode} and {first}, {name}: at most {(values - found[first][name]).abs().max():.1e} apart")


if __name__ == "__main__":
    main()
