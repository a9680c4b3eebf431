"""The cost of a training step, in place and on values, compared with a hand-written loop in the same process.

    python benchmarks/backends.py            # prints a table and exits with 1 if a bound is missed
    python benchmarks/backends.py --json     # the same as one JSON object

With a tiny model: the microseconds that the Trainer and pytorch-ignite's supervised trainer add to a step of the bare
loop. With the model of examples/byte_lm: the pure steps of TorchBackend(functional=True) and JaxBackend, compared with
the step in place. All take turns in every round; each figure is the median of the differences or ratios of the rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import create_supervised_trainer
from torch import Tensor, nn

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import JaxBackend, PretrainStrategy, TorchBackend, TrainerCore

sys.path.insert(0, str(Path(__file__).parent.parent))  # when run as a script
from examples.byte_lm.model import ByteGPT
from examples.byte_lm_jax.model import ByteGPT as JaxByteGPT

ADDED = 3.0  # microseconds that the Trainer may add to a step
PURE = 1.25  # times the step in place that the pure one may take

Batches = list[tuple[Tensor, Tensor]]


def bare(module: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """The hand-written loop."""
    module.train()
    for inputs, targets in batches:
        loss = F.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def seconds(work: Callable[[], object]) -> float:
    """The wall-clock time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_added(steps: int, rounds: int) -> dict[str, float]:
    """Microseconds per step of the bare loop, and those that the Trainer and ignite's trainer add."""
    batches = [(torch.randn(64, 16), torch.randint(0, 10, (64,)))] * steps
    costs: dict[str, list[float]] = {"bare": [], "trainer": [], "ignite": []}
    for _ in range(rounds + 1):
        made = {name: nn.Linear(16, 10) for name in costs}
        optimizers = {name: torch.optim.SGD(module.parameters(), lr=0.01) for name, module in made.items()}
        config = TrainingConfig(max_epochs=1, schedule=None, device="cpu", log_every_n_steps=steps + 1)
        trainer = Trainer(made["trainer"], batches, optimizer=optimizers["trainer"], config=config)
        peer = create_supervised_trainer(made["ignite"], optimizers["ignite"], F.cross_entropy)
        work: dict[str, Callable[[], object]] = {
            "bare": lambda made=made, by=optimizers: bare(made["bare"], by["bare"], batches),  # type: ignore[misc]
            "trainer": trainer.train,
            "ignite": lambda peer=peer: peer.run(batches, max_epochs=1),  # type: ignore[misc]
        }
        for name, one in work.items():
            costs[name].append(seconds(one) / steps * 1e6)
    warm = {name: values[1:] for name, values in costs.items()}
    added = {
        name: statistics.median(mine - base for mine, base in zip(warm[name], warm["bare"], strict=True))
        for name in ("trainer", "ignite")
    }
    return {
        "bare_us": statistics.median(warm["bare"]),
        "trainer_adds_us": added["trainer"],
        "ignite_adds_us": added["ignite"],
    }


def measure_values(steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds per step of the byte model in place, and the ratio of the pure steps to it."""
    torch.manual_seed(0)
    model = ByteGPT(layers=4, width=128, heads=4, context=128)
    batches = [torch.randint(0, 256, (8, 129)) for _ in range(steps)]
    strategy = PretrainStrategy("byte")
    in_place = copy.deepcopy(model)
    config = TrainingConfig(max_epochs=1, schedule=None, device="cpu", log_every_n_steps=steps + 1)
    trainer = Trainer(in_place, batches, strategy=strategy, config=config)
    states: dict[str, Any] = {}
    cores = {
        "pure": TrainerCore(TorchBackend("cpu", functional=True), strategy),
        "jax": TrainerCore(JaxBackend("cpu"), strategy),
    }
    models = {"pure": model, "jax": JaxByteGPT(layers=4, width=128, heads=4, context=128)}
    for name, core in cores.items():
        states[name] = core.init(models[name], "adamw", learning_rate=1e-3)

    def epoch(name: str) -> None:
        losses: list[Any] = []
        states[name] = cores[name].train_epoch(batches, states[name], lambda result: losses.append(result.loss))
        float(losses[-1])  # waits: jax computes asynchronously

    work: dict[str, Callable[[], object]] = {
        "in place": trainer.train,
        "pure": lambda: epoch("pure"),
        "jax": lambda: epoch("jax"),
    }
    costs: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, one in work.items():
            costs[name].append(seconds(one) / steps * 1e3)
    ratios = {
        name: statistics.median(mine / base for mine, base in zip(costs[name][1:], costs["in place"][1:], strict=True))
        for name in ("pure", "jax")
    }
    return {
        "in_place_ms": statistics.median(costs["in place"][1:]),
        "pure_ratio": ratios["pure"],
        "jax_ratio": ratios["jax"],
    }


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3000, help="steps of the tiny model per round [%(default)s]")
    parser.add_argument("--model-steps", type=int, default=20, help="steps of the byte model per round [%(default)s]")
    options = parser.parse_args()
    found = {**measure_added(options.steps, options.rounds), **measure_values(options.model_steps, options.rounds)}
    missed = []
    if found["trainer_adds_us"] > ADDED:
        missed.append(f"the Trainer adds {found['trainer_adds_us']:.1f} us to a step, bound {ADDED}")
    if found["trainer_adds_us"] > found["ignite_adds_us"]:
        missed.append("the Trainer adds more than pytorch-ignite's")
    if found["pure_ratio"] > PURE:
        missed.append(f"the pure step takes {found['pure_ratio']:.2f} times the step in place, bound {PURE}")
    if options.json:
        print(json.dumps({**found, "missed": missed}))
    else:
        for name, value in found.items():
            print(f"{name:<18}{value:10.2f}")
        print("\n".join(missed) or "all bounds hold")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
