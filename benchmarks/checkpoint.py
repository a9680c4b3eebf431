"""The cost of a checkpoint in time and memory: written synchronously, and in the background.

    python -m benchmarks checkpoint                      # prints a table and exits with 1 if a bound is missed
    python -m benchmarks checkpoint --megabytes 500      # the state whose figures have the bounds

The synchronous save is compared with torch.save, fsync and the same digest of the same number of bytes; both take turns
in one process. Throughput is that of AdamW on the CPU, compared with the same steps without checkpoints in the same
run. The disk needs 5 times the state's size. Memory is measured in separate processes, and needs Linux.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.results import Kind, Row, make_parser, report
from pulsetrain.engine import Engine, Events
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.handlers import Checkpointer
from pulsetrain.handlers.checkpointing.background_save import BackgroundSave

ROOT = Path(__file__).resolve().parents[1]
MB = 10**6
TENSOR = 4 * MB  # bytes of each tensor of the state: a matrix of 1000 x 1000
BOUNDS = {
    "synchronous / (torch.save + fsync + digest)": 1.25,
    "background: stall, ms per 100 MB": 10.0,
    "background: stall of the first, ms per 100 MB": 10.0,
    "background: throughput lost with every='auto', %": 3.5,
    "synchronous: memory beside the state, %": 10.0,
    "background: memory beside the state, %": 110.0,
}


def make_state(megabytes: int) -> dict[str, torch.Tensor]:
    """Tensors of this many megabytes in total."""
    count = max(1, megabytes * MB // TENSOR)
    return {f"weight_{number}": torch.full((TENSOR // 4,), float(number)) for number in range(count)}


def timed(work: Any) -> float:
    """The duration of a call in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def synchronous(folder: Path, megabytes: int, rounds: int) -> tuple[float, float]:
    """The time of a durable save divided by the peer's, and by that of torch.save alone: ratios of lower quartiles.

    On a virtual machine, writing into memory that its host has reclaimed costs half as much again, in some rounds of
    either: a median over few rounds is that of the ones with such memory, or of the others.
    """
    state = make_state(megabytes)
    manager = CheckpointManager(folder / "ours", keep_last_n=1)

    def peer(path: Path) -> None:
        with path.open("wb") as file:
            saved.append(timed(lambda: torch.save(state, file)))  # which neither the disk nor a digest has yet
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")

    own_cost, peer_cost, saved = list[float](), list[float](), list[float]()
    for number in range(rounds + 2):  # the first two warm up
        own_cost.append(timed(lambda: manager.save(state)))  # includes deleting the previous checkpoint
        peer_cost.append(timed(partial(peer, folder / f"theirs_{number}.pt")))
        # after the save, not before: the page cache writes twice as fast into memory that was just freed
        (folder / f"theirs_{number - 1}.pt").unlink(missing_ok=True)
    own, peers, alone = (sorted(each[2:])[rounds // 4] for each in (own_cost, peer_cost, saved))
    return own / peers, own / alone


class Saving(Engine):
    """An engine with a state to save."""

    def __init__(self, step: Any, state: Any) -> None:
        super().__init__(step, name="trainer")
        self.checkpoint_state = state


def begin(background: BackgroundSave, state: Any, write: Callable[[Any, Any], object]) -> None:
    """Save a state, and announce nothing."""
    background.begin(state, 0, write, lambda event, payload: None, lambda: None)


def stall(megabytes: int, rounds: int) -> tuple[float, float]:
    """Milliseconds that a background save blocks the training thread, per 100 MB: later saves, and the first."""
    state = make_state(megabytes)
    background = BackgroundSave()
    background.prepare(state)  # as a Checkpointer does after the tenth iteration
    time.sleep(5 * megabytes / 500)
    seconds = []
    for _ in range(rounds + 1):
        seconds.append(timed(lambda: begin(background, state, lambda copy, announce: None)))
        background.settle(wait=True)
    scale = 1e3 * 100 / megabytes
    return statistics.median(seconds[1:]) * scale, seconds[0] * scale


class Throughput:
    """Trains with every="auto" in the background; at intervals, runs the same steps without checkpoints."""

    def __init__(self, folder: Path, seconds: float, megabytes: int) -> None:
        width = round((megabytes * MB / (2 * 4 * 3)) ** 0.5)  # two layers, float32, and two moments of each weight
        self.model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(64, width)
        self.engine = Saving(self.step, self.state)
        self.bare = Saving(self.step, self.state)
        self.paused = 0.0  # seconds spent on steps without checkpoints
        self.saves: list[tuple[int, float, float, int]] = []  # iteration, clock, seconds and count of `paused`
        self.count = 0  # number of steps without checkpoints
        self.until = self.clock() + seconds
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, self.look)
        self.checkpointer = Checkpointer(folder, "auto", keep_last=1, background=True, at_end=False, clock=self.clock)
        self.checkpointer.attach(self.engine)

    def clock(self) -> float:
        """Seconds of the run with checkpoints, without the other steps."""
        return time.perf_counter() - self.paused

    def step(self, engine: Any, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def look(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        if self.checkpointer.saved_at == iteration - 1:
            self.saves.append((iteration, self.clock(), self.paused, self.count))
            if self.clock() > self.until and len(self.saves) > 3 and self.count - self.saves[1][3] >= 50:
                engine.terminate()
        elif iteration % 10 == 0 and not self.checkpointer.writing:
            self.paused += timed(lambda: self.bare.run(range(10), max_epochs=1))
            self.count += 10

    def lost(self) -> tuple[float, int, float]:
        """The throughput that the saves cost, in percent; their number; the mean number of iterations between two."""
        self.engine.run(range(10**6), max_epochs=1)
        # from the second save on: the first writes into new memory, so a longer interval follows it
        begin, end = self.saves[1], self.saves[-1]
        iterations, taken, alone, count = (last - first for first, last in zip(begin, end, strict=True))
        lost = 1 - (alone / count) / (taken / iterations)
        return 100 * lost, len(self.saves), iterations / (len(self.saves) - 2)


def peak_bytes() -> int:
    """The peak resident size of this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def measured_memory(kind: str, folder: Path, megabytes: int) -> int:
    """In a separate process: the bytes that two saves added to the peak, in addition to the state."""
    manager = CheckpointManager(folder / f"small_{kind}", keep_last_n=1)
    manager.save(make_state(4))  # loads and sets up what saving needs at any size
    state = make_state(megabytes)
    before = peak_bytes()
    manager = CheckpointManager(folder / kind, keep_last_n=1)
    background = BackgroundSave()
    for _ in range(2):
        if kind == "background":
            begin(background, state, lambda copy, announce: manager.save(copy))
            background.settle(wait=True)
        else:
            manager.save(state)
    return peak_bytes() - before


def memory(kind: str, folder: Path, megabytes: int) -> float:
    """The memory that saving needs, in percent of the state's size."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--memory", kind, "--folder", str(folder)]
    command += ["--megabytes", str(megabytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return 100 * int(done.stdout.splitlines()[-1]) / (megabytes * MB)


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """All figures; those with a bound have the names of BOUNDS."""
    megabytes = options.megabytes
    ratio, to_saving_alone = synchronous(folder, megabytes, options.rounds)
    later, first = stall(megabytes, options.rounds)
    lost, saves, interval = Throughput(folder / "auto", options.seconds, min(megabytes, 100)).lost()
    figures = [ratio, later, first, lost, *(memory(kind, folder, megabytes) for kind in ("synchronous", "background"))]
    kinds: list[Kind] = ["ratio", "absolute", "absolute", "absolute", "size", "size"]
    rows = [
        Row(name=name, measured=figure, kind=kind, bound=bound)
        for (name, bound), figure, kind in zip(BOUNDS.items(), figures, kinds, strict=True)
    ]
    return [
        *rows,
        Row(name="synchronous / torch.save alone", measured=to_saving_alone, kind="ratio"),
        Row(name="every='auto': saves", measured=saves, kind="size"),
        Row(name="every='auto': iterations between two", measured=interval, kind="size"),
    ]


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("checkpoint", __doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the state [%(default)s]")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of training with every='auto'")
    parser.add_argument("--folder", type=Path, help="where to write; by default the system's temporary folder")
    parser.add_argument("--memory", choices=("synchronous", "background"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(measured_memory(options.memory, options.folder, options.megabytes))
        return 0

    def rows() -> tuple[list[Row], list[str]]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            return measure(options, Path(folder)), []

    return report(options, f"a state of {options.megabytes} MB", rows)


if __name__ == "__main__":
    raise SystemExit(main())
