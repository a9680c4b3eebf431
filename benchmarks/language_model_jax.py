"""The byte-level GPT on JaxBackend, compared with a hand-written loop of one jitted optax step with donated buffers.

    python -m benchmarks language_model_jax          # prints a table and exits with 1 if a bound is missed

All train the model of examples/byte_lm_jax on the same data with the settings and the cadence of examples/byte_lm: they
validate every EVERY iterations on the same batches, and read the mean loss every LOG iterations. Each has a process of
its own, with one thread for computations, and the processes take turns of TURN iterations; meanwhile those of the
others, such as the one that draws figures, are stopped. A share compares the time of all turns after the first
validation; its spread is that of single turns. The trainer with the demo's handlers is compared with a hand-written
loop that also saves its state when it validates. The bounds are of wall-clock time; each time is printed beside its CPU
time, which a busy machine disturbs less.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# before jax and torch are imported, here and in the processes
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness.results import Row, make_parser, ratios, report
from examples.byte_lm.data import ByteWindows, loaders, standard_library
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Every, JaxBackend, PretrainStrategy
from pulsetrain.handlers import (
    Checkpointer,
    CrashBundle,
    CSVLogger,
    EarlyStopping,
    EventRecorder,
    GradientMonitor,
    LossSpikeGuard,
    NaNGuard,
    Plots,
    ProgressBar,
    Throughput,
)

TURN = 10  # iterations: in longer turns the speed of the cores changes between those of two contestants
EVERY = 250  # iterations, the cadence of validations and checkpoints
LOG = 10  # iterations between two mean losses
BATCH, CONTEXT, VALIDATION_BATCHES = 8, 128, 3
RATE, WARMUP, DECAY, BETAS, CLIP = 3e-3, 100, 0.1, (0.9, 0.95), 1.0
BOUNDS = {"ours": 0.96, "ours, the demo's handlers": 0.93}
GOALS = {"ours": 0.98, "ours, the demo's handlers": 0.96}
Seconds = tuple[float, float]  # wall clock, CPU
PEERS = {"ours": "hand-written", "ours, the demo's handlers": "hand-written, saving"}


@dataclass(frozen=True)
class Length:
    """How long each contestant trains, in iterations."""

    turn: int
    every: int  # validations and checkpoints
    rounds: int  # periods of `every` that are measured; one more comes first, in which everything is compiled

    @property
    def compiling(self) -> int:
        """Turns that are not measured."""
        return self.every // self.turn

    @property
    def turns(self) -> int:
        return self.compiling * (1 + self.rounds)

    @property
    def last(self) -> int:
        """The iteration whose batch ends the last turn."""
        return self.turns * self.turn + 1


class Turns(ByteWindows):
    """The training data; each turn begins when its first batch is read, and waits for its peers before."""

    def __init__(self, connection: Connection, length: Length) -> None:
        super().__init__(standard_library()[0], context=CONTEXT)
        self.wait = Wait(connection, length.turn)

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.wait.read()
        return super().__getitems__(indices)


class Wait:
    """Counts batches; between two turns it sends the seconds of the last one, and waits until it is called again."""

    def __init__(self, connection: Connection, turn: int) -> None:
        self.connection, self.turn = connection, turn
        self.batches, self.begun = 0, (0.0, 0.0)

    def read(self) -> None:
        """A batch is read."""
        if self.batches % self.turn == 0:
            wall, cpu = time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]
            self.connection.send((wall, cpu, peak()))
            self.connection.recv()
            self.begun = time.perf_counter(), time.process_time()
        self.batches += 1


def peak() -> float:
    """The largest resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def data(connection: Connection, length: Length) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """The loaders of the training and the validation data."""
    windows = Turns(connection, length)
    _, validation = loaders(batch_size=BATCH, context=CONTEXT, validation_batches=VALIDATION_BATCHES)
    return DataLoader(windows, batch_size=BATCH, shuffle=True, drop_last=True), validation


def hand_written(saves: bool, connection: Connection, length: Length, folder: Path) -> None:
    """The loop that a user of jax and optax would write."""
    import jax
    import optax
    from flax import nnx

    from examples.byte_lm_jax.model import ByteGPT

    (training, validation), last = data(connection, length), length.last
    model = ByteGPT(layers=4, width=128, heads=4, context=CONTEXT, seed=0)
    graph, weights, rest = nnx.split(model, nnx.Param, ...)  # what is left is not trained
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, min(WARMUP, last // 2), last, end_value=0.1 * RATE)
    adamw = optax.adamw(
        schedule, *BETAS, weight_decay=DECAY, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    )
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), adamw)
    state = optimizer.init(weights)

    def loss_of(weights: Any, tokens: Any) -> Any:
        logits = nnx.merge(graph, weights, rest)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(weights: Any, state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    evaluate = jax.jit(loss_of)
    losses: list[Any] = []
    for iteration, tokens in enumerate(training, 1):
        weights, state, loss = step(weights, state, tokens.numpy())
        losses.append(loss)
        if iteration % LOG == 0:
            float(sum(losses) / len(losses))
            losses.clear()
        if iteration % length.every == 0:
            float(sum(evaluate(weights, tokens.numpy()) for tokens in validation) / VALIDATION_BATCHES)
            if saves:
                save(jax.tree.leaves((weights, state)), folder / f"{iteration}.pt")
        if iteration == last:
            break


def save(leaves: list[Any], path: Path) -> None:
    """Write the state durably, without ever a partial file under that name."""
    with path.with_suffix(".part").open("wb") as file:
        torch.save([torch.utils.dlpack.from_dlpack(leaf) for leaf in leaves], file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".part").rename(path)


def ours(handlers: Callable[[Path, Every], list[Any]], connection: Connection, length: Length, folder: Path) -> None:
    """Our Trainer."""
    from examples.byte_lm_jax.model import ByteGPT

    (training, validation), last = data(connection, length), length.last
    every = Every(iterations=length.every)
    config = TrainingConfig(
        max_iterations=last,
        optimizer="adamw",
        weight_decay=DECAY,
        no_decay="auto",
        optimizer_options={"betas": BETAS},
        learning_rate=RATE,
        schedule="cosine",
        warmup_steps=min(WARMUP, last // 2),
        clip_grad_norm=CLIP,
        seed=0,
        validate_every=every,
        log_every_n_steps=LOG,
    )
    Trainer(
        ByteGPT(layers=4, width=128, heads=4, context=CONTEXT, seed=0),
        training,
        validation,
        strategy=PretrainStrategy(unit="byte"),
        backend=JaxBackend("cpu"),
        config=config,
        handlers=handlers(folder, every),
    ).train()


def none(folder: Path, every: Every) -> list[Any]:
    """No handlers."""
    return []


def demo(folder: Path, every: Every) -> list[Any]:
    """The handlers of examples/byte_lm, at its cadences, without the one that samples after the end."""
    return [
        Checkpointer(folder, every=every, metric="val/loss"),
        EarlyStopping(metric="val/loss", patience=10**6),
        NaNGuard(),
        LossSpikeGuard(),
        GradientMonitor(every=Every(updates=50), by="module", top=4),
        Throughput(),
        EventRecorder(folder),
        CSVLogger(folder),
        Plots(folder),
        ProgressBar(stream=io.StringIO()),
        CrashBundle(folder),
    ]


CONTESTANTS: dict[str, tuple[Callable[..., None], Any]] = {
    "hand-written": (hand_written, False),
    "ours": (ours, none),
    "hand-written, saving": (hand_written, True),
    "ours, the demo's handlers": (ours, demo),
}


# ------------------------------------------------------------------------------------------------- the measurement


def contestant(name: str, connection: Connection, length: Length) -> None:
    """Train in this process."""
    os.setpgrp()  # the group that is stopped between its turns
    torch.set_num_threads(1)
    loop, option = CONTESTANTS[name]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        loop(option, connection, length, Path(folder))


def measure(names: list[str], length: Length) -> tuple[dict[str, list[Seconds]], dict[str, float]]:
    """Seconds of each contestant in each measured turn, wall clock and CPU, and its peak memory in MiB."""
    context = multiprocessing.get_context("spawn")  # a forked process has no working jax
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    memory: dict[str, float] = {}
    connections, processes = {}, {}
    try:
        for name in names:
            connections[name], theirs = context.Pipe()
            processes[name] = context.Process(target=contestant, args=(name, theirs, length), daemon=True)
            processes[name].start()
            theirs.close()
            connections[name].recv()  # ready for its first turn
            signal_group(processes[name], signal.SIGSTOP)
        for number in range(length.turns):
            for name in names if number % 2 else reversed(names):  # neither is always the first
                signal_group(processes[name], signal.SIGCONT)
                connections[name].send(None)
                wall, cpu, memory[name] = connections[name].recv()
                signal_group(processes[name], signal.SIGSTOP)
                if number >= length.compiling:
                    seconds[name].append((wall, cpu))
    finally:
        for process in processes.values():
            if process.is_alive():
                signal_group(process, signal.SIGKILL)  # what it does after its last turn is not measured
            process.join()
    return seconds, memory


def signal_group(process: BaseProcess, number: signal.Signals) -> None:
    """Send a signal to a contestant and the processes that it has started."""
    assert process.pid is not None
    os.killpg(process.pid, number)


def rows_of(seconds: dict[str, list[Seconds]], memory: dict[str, float], length: Length) -> list[Row]:
    """Each contestant's share of its peer's throughput, with the time of an iteration."""
    rows = []
    for name, taken in seconds.items():
        wall, cpu = (sum(each) / len(taken) / length.turn * 1e3 for each in zip(*taken, strict=True))
        also = {"ms": wall, "CPU ms": cpu, "peak, MiB": memory[name]}
        if name not in PEERS:
            rows.append(Row(name=f"{name}, an iteration", unit="ms", measured=wall, kind="absolute", also=also))
            continue
        mine, theirs = ([each[0] for each in of] for of in (taken, seconds[PEERS[name]]))
        rows.append(
            Row(
                name=f"{name} / {PEERS[name]}, throughput", kind="ratio", bound=BOUNDS[name], goal=GOALS[name],
                at_least=True, also=also, **{**ratios(theirs, mine), "measured": sum(theirs) / sum(mine)},
            )
        )  # fmt: skip
    return rows


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("language_model_jax", __doc__)
    parser.add_argument("--rounds", type=int, default=2, help="validations that are measured [%(default)s]")
    parser.add_argument("--turn", type=int, default=TURN, help="iterations of a turn [%(default)s]")
    parser.add_argument("--every", type=int, default=EVERY, help="iterations between validations [%(default)s]")
    parser.add_argument("--only", nargs="+", choices=list(BOUNDS), default=list(BOUNDS), metavar="NAME")
    options = parser.parse_args()
    if min(options.rounds, options.turn) < 1 or options.every < 1 or options.every % options.turn:
        parser.error("--rounds and --turn: need at least 1, and --every a multiple of --turn")
    names = [name for mine in options.only for name in (PEERS[mine], mine)]
    length = Length(options.turn, options.every, options.rounds)

    def rows() -> tuple[list[Row], list[str]]:
        return rows_of(*measure(names, length), length), []

    return report(options, "the byte model on JAX", rows)


if __name__ == "__main__":
    raise SystemExit(main())
