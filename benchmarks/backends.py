"""The cost of a training step on values, compared with the step in place in the same process.

    python -m benchmarks backends            # prints a table and exits with 1 if a bound is missed
    python -m benchmarks backends --json     # the same as one JSON object

The model is that of examples/byte_lm: the pure steps of TorchBackend(functional=True) and JaxBackend are compared with
the step in place. All take turns in every round; each figure is the median of the ratios of the rounds. What the
Trainer adds to a step is measured by the benchmark `trainers`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.results import Row, make_parser, ratios, report
from examples.byte_lm.model import ByteGPT
from examples.byte_lm_jax.model import ByteGPT as JaxByteGPT
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import JaxBackend, PretrainStrategy, TorchBackend, TrainerCore

BOUNDS = {"pure": 1.25, "jax": None}  # times the step in place
NAMES = {"pure": "TorchBackend(functional=True) / in place", "jax": "JaxBackend / in place"}


def seconds(work: Callable[[], object]) -> float:
    """The wall-clock time of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(steps: int, rounds: int) -> list[Row]:
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
    base = costs["in place"][1:]
    return [
        Row(name="in place, ms per step", measured=statistics.median(base), kind="absolute"),
        *(
            Row(name=NAMES[name], kind="ratio", **ratios(costs[name][1:], base), bound=bound)
            for name, bound in BOUNDS.items()
        ),
    ]


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("backends", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps per round [%(default)s]")
    options = parser.parse_args()
    return report(options, "a step of the byte model", lambda: (measure(options.steps, options.rounds), []))


if __name__ == "__main__":
    raise SystemExit(main())
