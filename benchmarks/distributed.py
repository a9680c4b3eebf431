"""What the trainer adds to a hand-written loop with DistributedDataParallel, on two processes.

    python -m benchmarks distributed         # prints a table and exits with 1 if a bound is missed

Both train the byte-level GPT of examples/byte_lm on the CPU with gloo, one thread a process, in the same two processes,
each in a thread of Python of its own, of which one runs while the others wait: a turn is LOG iterations of each. So
the contestants share the moments in which the machine is slow. A figure is the median of the ratio of both in a turn,
over all turns but the first. The hand-written loop shares each global batch out, averages the gradients by
DistributedDataParallel, and adds its losses up every LOG iterations. "Nothing computed" is a model of one number, whose
samples all count alike. The losses of the GPT are means over bytes, which the processes have to add up for each batch;
that overlaps with the computation. "Virtual ranks" is the trainer with a virtual rank a process, whose results have the
same bits as in one process.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
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

WORLD, LOG = 2, 10
BATCH, CONTEXT, RATE = 16, 128, 1e-3
BOUND = 1.02  # times the hand-written loop's iteration
Rounds = dict[str, list[float]]
"""Seconds of an iteration, by contestant, in each turn."""


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


class Turns:
    """The threads of the contestants: each runs LOG iterations, then the next one does."""

    def __init__(self, names: Sequence[str]) -> None:
        self.seconds: Rounds = {name: [] for name in names}
        self._waiting = {name: threading.Semaphore(0) for name in names}
        self._left = list(names)
        self._begun = 0.0

    def run(self, contestants: Mapping[str, Callable[[Callable[[], None]], None]]) -> None:
        """Run all of them to their ends."""
        with ThreadPoolExecutor(len(contestants)) as pool:
            ended = [pool.submit(self._run, name, run) for name, run in contestants.items()]
            self._waiting[self._left[0]].release()
            for each in ended:
                each.result()

    def _run(self, name: str, contestant: Callable[[Callable[[], None]], None]) -> None:
        self._waiting[name].acquire()
        try:
            contestant(partial(self._hand_over, name))
        finally:
            following = self._after(name)
            self._left.remove(name)
            if self._left:
                self._waiting[following].release()

    def _hand_over(self, name: str) -> None:
        self.seconds[name].append((time.perf_counter() - self._begun) / LOG)
        self._waiting[self._after(name)].release()
        self._waiting[name].acquire()
        self._begun = time.perf_counter()

    def _after(self, name: str) -> str:
        return self._left[(self._left.index(name) + 1) % len(self._left)]


def by_hand(task: str, iterations: int, rank: int, hand_over: Callable[[], None]) -> None:
    """The loop that a user would write."""
    make, data, loss_of = TASKS[task]
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    rows = data(iterations * BATCH)
    # each process loads its share of every global batch
    batches = [list(range(at + rank, at + BATCH, WORLD)) for at in range(0, iterations * BATCH, BATCH)]
    model.train()
    total = torch.zeros(())
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
            hand_over()


def ours(
    task: str, iterations: int, rank: int, hand_over: Callable[[], None], topology: Topology | None = None
) -> None:
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
    trainer.on(Events.ITERATION_COMPLETED(every=LOG))(lambda: hand_over())
    trainer.train()


def virtual(task: str, iterations: int, rank: int, hand_over: Callable[[], None]) -> None:
    """The Trainer with virtual ranks."""
    ours(task, iterations, rank, hand_over, Topology(virtual=WORLD, reduction="tree"))


CONTESTANTS = {"hand-written": by_hand, "ours": ours, "virtual ranks": virtual}


def measure_rank(rank: int, port: int, tasks: dict[str, int], connection: Connection) -> None:
    """What one process does: every contestant of every task."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found: dict[str, Rounds] = {}
    for task, iterations in tasks.items():
        turns = Turns(list(CONTESTANTS))
        with redirect_stderr(io.StringIO()):
            turns.run({name: partial(run, task, iterations, rank) for name, run in CONTESTANTS.items()})
        found[task] = {name: seconds[1:] for name, seconds in turns.seconds.items()}  # the first warms up
    connection.send(found)
    torch.distributed.barrier()


def measure(tasks: dict[str, int]) -> dict[str, Rounds]:
    """The seconds of an iteration of each contestant in each turn, as rank 0 has them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    processes = [
        context.Process(target=measure_rank, args=(rank, port, tasks, theirs), daemon=True) for rank in range(WORLD)
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
    parser.add_argument("--iterations", type=int, default=900, help="of the GPT [%(default)s]")
    options = parser.parse_args()
    if options.iterations < 3 * LOG:
        parser.error(f"--iterations {options.iterations}: needs at least {3 * LOG}")

    def rows() -> tuple[list[Row], list[str]]:
        made = []
        for task, found in measure({"GPT": options.iterations, "nothing computed": 2_000}).items():
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
