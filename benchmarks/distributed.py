"""What the trainer adds to a hand-written loop with DistributedDataParallel, on two processes.

    python -m benchmarks distributed         # prints a table and exits with 1 if a bound is missed

Both train the byte-level GPT of examples/byte_lm on the CPU with gloo, one thread a process, in the same two processes,
by turns: a round is a run of ITERATIONS iterations of each, of which the first ones warm up. The hand-written loop
shares each global batch out, averages the gradients by DistributedDataParallel, and adds its losses up every LOG
iterations. The time of a run is its median over windows of LOG iterations, since a process that does not get its core
for a moment holds up the other. A figure is the median over the rounds of the ratio of both in the same round. "Nothing
computed" is a model of one number, whose samples all count alike. The losses of the GPT are means over bytes, which the
processes have to add up for each batch; that overlaps with the computation. "Virtual ranks" is the trainer with a
virtual rank a process, whose results have the same bits as in one process.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from multiprocessing.connection import Connection

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.results import Row, make_parser, ratios, report
from examples.byte_lm.model import ByteGPT
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy, Topology, TorchBackend

WORLD, WARM, LOG = 2, 10, 10
BATCH, CONTEXT, RATE = 16, 128, 1e-3
BOUND = 1.02  # times the hand-written loop's iteration
Rounds = dict[str, list[float]]
"""Seconds of an iteration, by contestant, in each round."""


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Random text: rows of bytes, and the same rows moved by one."""

    def __init__(self, rows: int) -> None:
        self.data = torch.randint(0, 256, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[index, :-1], self.data[index, 1:]


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Rows of one number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1), torch.ones(())


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of the next bytes."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error."""
    return (outputs[:, 0] - targets).square().mean()


def language_model() -> nn.Module:
    """The demo's model, smaller."""
    return ByteGPT(layers=2, width=64, heads=2, context=CONTEXT)


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Dataset[tuple[Tensor, Tensor]]], Callable[..., Tensor]]]
TASKS = {
    "GPT": (language_model, Windows, language_loss),
    "nothing computed": (lambda: nn.Linear(1, 1), Numbers, squares),
}


def of_windows(times: list[float]) -> float:
    """Seconds of an iteration, from the times after each LOG iterations."""
    return statistics.median(after - before for before, after in itertools.pairwise(times[WARM // LOG - 1 :])) / LOG


def by_hand(task: str, iterations: int, rank: int) -> float:
    """Seconds of an iteration of the loop that a user would write."""
    make, data, loss_of = TASKS[task]
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    rows = data(iterations * BATCH)
    # each process loads its share of every global batch
    batches = [list(range(at + rank, at + BATCH, WORLD)) for at in range(0, iterations * BATCH, BATCH)]
    model.train()
    total, times = torch.zeros(()), []
    for iteration, (inputs, targets) in enumerate(DataLoader(rows, batch_sampler=batches), 1):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if iteration % LOG == 0:
            torch.distributed.all_reduce(total)
            total.item()
            total.zero_()
            times.append(time.perf_counter())
    return of_windows(times)


def ours(task: str, iterations: int, rank: int, topology: Topology | None = None) -> float:
    """The same by the Trainer."""
    make, data, loss_of = TASKS[task]
    torch.manual_seed(0)
    model = make()
    trainer = Trainer(
        model,
        DataLoader(data(iterations * BATCH), BATCH),
        strategy=SupervisedStrategy(loss_of),
        optimizer=torch.optim.SGD(model.parameters(), RATE, momentum=0.9),
        backend=TorchBackend(topology=topology),
        config=TrainingConfig(
            max_iterations=iterations, log_every_n_steps=LOG, schedule=None, seed=0, device="cpu", progress=False
        ),
    )
    times: list[float] = []
    trainer.on(Events.ITERATION_COMPLETED(every=LOG))(lambda: times.append(time.perf_counter()))
    with redirect_stderr(io.StringIO()):
        trainer.train()
    return of_windows(times)


def virtual(task: str, iterations: int, rank: int) -> float:
    """The Trainer with virtual ranks."""
    return ours(task, iterations, rank, Topology(virtual=WORLD, reduction="tree"))


CONTESTANTS = {"hand-written": by_hand, "ours": ours, "virtual ranks": virtual}


def measure_rank(rank: int, port: int, tasks: dict[str, int], rounds: int, connection: Connection) -> None:
    """What one process does: every contestant in every round."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found: dict[str, Rounds] = {task: {name: [] for name in CONTESTANTS} for task in tasks}
    for number in range(rounds + 1):  # the first warms up
        for task, iterations in tasks.items():
            for name in CONTESTANTS if number % 2 else reversed(CONTESTANTS):
                torch.distributed.barrier()
                seconds = CONTESTANTS[name](task, iterations, rank)
                if number:
                    found[task][name].append(seconds)
    connection.send(found)
    torch.distributed.barrier()


def measure(tasks: dict[str, int], rounds: int) -> dict[str, Rounds]:
    """The seconds of an iteration of each contestant in each round, as rank 0 has them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    processes = [
        context.Process(target=measure_rank, args=(rank, port, tasks, rounds, theirs), daemon=True)
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    theirs.close()  # so that `recv` ends with the process that has the other end
    found: dict[str, Rounds] = mine.recv()
    for process in processes:
        process.join()
    return found


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("distributed", __doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=120, help="of a run of the GPT [%(default)s]")
    options = parser.parse_args()
    if options.iterations < WARM + 2 * LOG:
        parser.error(f"--iterations {options.iterations}: needs at least {WARM + 2 * LOG}")

    def rows() -> tuple[list[Row], list[str]]:
        made = []
        for task, found in measure({"GPT": options.iterations, "nothing computed": 400}, options.rounds).items():
            medians = {name: statistics.median(taken) * 1e3 for name, taken in found.items()}
            made.append(
                Row(
                    name=f"{task}: hand-written, an iteration",
                    unit="ms",
                    kind="absolute",
                    measured=medians["hand-written"],
                )
            )
            made.append(
                Row(
                    name=f"{task}: ours / hand-written",
                    kind="ratio",
                    bound=BOUND if task == "GPT" else None,
                    also={"ms": medians["ours"]},
                    **ratios(found["ours"], found["hand-written"]),
                )
            )
            made.append(
                Row(
                    name=f"{task}: virtual ranks / hand-written",
                    kind="ratio",
                    also={"ms": medians["virtual ranks"]},
                    **ratios(found["virtual ranks"], found["hand-written"]),
                )
            )
        return made, []

    return report(options, "a data-parallel iteration on two processes", rows)


if __name__ == "__main__":
    raise SystemExit(main())
