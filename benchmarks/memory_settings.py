"""What the settings of memory save for the model of examples/byte_lm, and what a training step then takes.

    python -m benchmarks memory_settings            # prints a table and exits with 1 if a bound is missed
    python -m benchmarks memory_settings --json     # the same as one JSON object

"kept" is the memory that is in use after the forward pass of a batch of 8 x 128 bytes and was not before, compared with
a run without the setting; "resident" is what a step has of the optimizer's state (AdamW) in memory at most, by the
kernel's page table. All settings take turns in every round. Times are CPU time of one thread, without waits for the
disk; they are the median of the ratios of the rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.live_bytes import bytes_for_backward
from benchmarks.harness.resident import resident_bytes
from benchmarks.harness.results import Row, make_parser, ratios, report
from examples.byte_lm.model import ByteGPT
from pulsetrain.engine import ActivationCheckpointing, ActivationOffload, OptimizerOffload
from pulsetrain.engine.memory.activation_offload import offload_activations
from pulsetrain.engine.memory.activations import recompute_activations
from pulsetrain.engine.memory.optimizer_state import offload_optimizer
from pulsetrain.engine.optimizers import create_optimizer

BLOCKS = "blocks.*"


class Files:
    """Activations in files without a name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pack(self, tensor: Tensor) -> Any:
        file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115  # closed when the graph is freed
        file.write(tensor.contiguous().numpy().data)
        return file, tensor.shape, tensor.dtype

    def unpack(self, handle: Any) -> Tensor:
        file, shape, dtype = handle
        file.seek(0)
        return torch.frombuffer(bytearray(file.read()), dtype=dtype).view(shape)


@dataclass
class Case:
    """A setting, and what was measured with it."""

    checkpointing: str | ActivationCheckpointing | None = None
    offload: ActivationOffload | None = None
    bound: float | None = None
    kept: int = 0
    seconds: list[float] = field(default_factory=list)


def activations(rounds: int, folder: Path) -> list[Row]:
    """The memory that is kept, and the time of a forward and a backward pass."""
    torch.manual_seed(0)
    model = ByteGPT()
    tokens = torch.randint(0, 256, (8, 129))

    def loss() -> Tensor:
        logits: Tensor = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    cases = {
        "nothing": Case(),
        "every second block": Case(ActivationCheckpointing(BLOCKS, every=2)),
        'selective, keep=["matmul"]': Case(ActivationCheckpointing(BLOCKS, keep=["matmul"])),
        'selective, keep=["sdpa"]': Case(ActivationCheckpointing(BLOCKS, keep=["sdpa"]), bound=40.0),
        "full": Case(BLOCKS),
        "offload to files": Case(offload=ActivationOffload(min_bytes=1 << 16, policy=Files(folder))),
    }
    for turn in range(rounds + 1):
        for case in cases.values():
            recompute_activations(model, case.checkpointing)
            if not turn:
                case.kept = bytes_for_backward(lambda: _computed(loss, _context(model, case)))  # noqa: B023
            start = time.process_time()
            _computed(loss, _context(model, case)).backward()
            case.seconds.append(time.process_time() - start)
            model.zero_grad()
    base = cases["nothing"]
    return [
        Row(
            name=f"{name}: activations kept, %",
            measured=100 * case.kept / base.kept,
            kind="size",
            bound=case.bound,
            also={
                "MB": case.kept / 1e6,
                "times the CPU time": statistics.median(
                    a / b for a, b in zip(case.seconds[1:], base.seconds[1:], strict=True)
                ),
            },
        )
        for name, case in cases.items()
    ]


def _context(model: nn.Module, case: Case) -> AbstractContextManager[Any]:
    return nullcontext() if case.offload is None else offload_activations(model, case.offload)


def _computed(loss: Callable[[], Tensor], context: AbstractContextManager[Any]) -> Tensor:
    with context:
        return loss()


def optimizer(rounds: int, folder: Path) -> list[Row]:
    """The resident share of AdamW's state on disk, and the time of its update."""
    torch.manual_seed(0)
    models = [ByteGPT(), ByteGPT()]
    in_memory, on_disk = (create_optimizer(model, "adamw", 1e-3) for model in models)
    offload_optimizer(on_disk, OptimizerOffload(folder=str(folder)))
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for each, times in zip((in_memory, on_disk), seconds, strict=True):
            start = time.process_time()
            each.step()
            times.append(time.process_time() - start)
    most = _most_resident(on_disk)
    size = sum(each.nbytes for values in on_disk.state.values() for each in values.values())
    base, mine = (times[1:] for times in seconds)
    return [
        Row(
            name="optimizer state on disk: resident, %",
            measured=100 * most / size,
            kind="size",
            bound=10.0,
            also={"MB": most / 1e6},
        ),
        Row(name="AdamW's update on disk / in memory", kind="ratio", **ratios(mine, base)),
        Row(name="AdamW's update on disk, ms of CPU time", measured=1e3 * statistics.median(mine), kind="absolute"),
    ]


def _most_resident(optimizer: Any) -> int:
    """The bytes of the state's file that are in memory during a step at most: before each part of it is released."""
    memory, found = optimizer._memory, []
    release = memory.release
    ((mapped, address),) = memory._maps

    def watched(slots: Any = None) -> None:
        found.append(resident_bytes(address, len(mapped)))
        release(slots)

    memory.release = watched
    optimizer.step()
    del memory.release
    return max(found)


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("memory_settings", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    torch.set_num_threads(1)

    def measure() -> tuple[list[Row], list[str]]:
        with tempfile.TemporaryDirectory(dir=".") as folder:  # not in /tmp, which may be in memory
            return [*activations(options.rounds, Path(folder)), *optimizer(options.rounds, Path(folder))], []

    return report(options, "the example GPT", measure)


if __name__ == "__main__":
    raise SystemExit(main())
