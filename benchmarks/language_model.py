"""What a language model's training costs in each trainer: throughput and memory next to a hand-written loop.

    python -m benchmarks language_model          # prints a table and exits with 1 if a bound is missed
    python -m benchmarks language_model --iterations 100 --rounds 1 --growth 0 --only "ours, the demo's handlers"

The model, the data and the settings are those of examples/byte_lm/config.yaml, on the CPU with one thread. Each
contestant runs in its own process. They take turns: each trains a slice of 25 iterations, start and end included,
while the others are stopped together with the processes that they started. A slice's time is its median over the
rounds; throughput is compared over the sum of all slices, and the spread is that of the rounds.

The hand-written loop uses the same fused optimizer and rates, clips, prints a line each 10 iterations, validates and
saves at the demo's cadence, and generates the demo's sample at the end. `hand-written, validating only` does neither of
the last two: it is compared with the Trainer without handlers, which does not either. Peak memory is that of the
process that trains; processes that it starts are listed as helpers, if they run at the end of a slice. Faults are the
pages that an iteration gets from the system, in the median slice. Growth is the slope of the resident memory after 500
iterations, with a tiny model: a large one's activations leave other gaps in the heap each time, which hide what a loop
keeps. Frameworks that are not installed are named (pip install -e '.[bench]'). Where there is a GPU, a model of 124
million parameters is trained there in bf16, with and without torch.compile.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants.language_model import CONTESTANTS, SLICE, Task
from benchmarks.harness.results import Row, make_parser, report

SETTLED = 500  # iterations after which memory is to be flat
THROUGHPUT, PEAK = 0.985, 1.1  # of the hand-written loop's throughput, and times its peak memory
GROWTH = 1024.0  # bytes an iteration
BY_HAND, ALONE, OURS, FULL = "hand-written", "hand-written, validating only", "ours", "ours, the demo's handlers"

Run = dict[str, Any]
"""What one process reported: its slices, its memory."""


class Contestant:
    """A process that trains a slice whenever it is asked to, and is stopped otherwise."""

    def __init__(self, name: str, task: Task, folder: Path) -> None:
        self.name = name
        self.errors = (folder / "errors.txt").open("w+")
        code = "from benchmarks.contestants.language_model import serve; serve()"
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(task.threads), "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),  # each compiles for itself
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps({"name": name, "folder": str(folder), "task": asdict(task)})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment,
            cwd=Path(__file__).parents[1], start_new_session=True,
        )  # fmt: skip
        self.slices: list[dict[str, float]] = []
        self.end: dict[str, float] = {}
        self.absent = str(self._report().get("absent", ""))
        self._signal(signal.SIGSTOP)

    def take_turn(self) -> bool:
        """Train a slice; returns whether there is more to do."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        report = self._report()
        self.slices.append(report)
        if report.get("last"):
            self.end = report
            return False
        self._signal(signal.SIGSTOP)
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self._signal(signal.SIGKILL)
        self.process.wait()
        self.errors.close()

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)  # its helpers are in the same group

    def _report(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.name} failed:\n{self.errors.read()[-4000:]}")
        report: dict[str, float] = json.loads(line)
        return report


@contextmanager
def started(names: Sequence[str], task: Task) -> Iterator[list[Contestant]]:
    """A process for each name, ready to train."""
    found = list[Contestant]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, name in enumerate(names):
                (into := Path(folder) / str(number)).mkdir()
                found.append(Contestant(name, task, into))
            yield found
        finally:
            for each in found:
                each.close()


def take_turns(names: Sequence[str], task: Task) -> tuple[dict[str, Run], dict[str, str]]:
    """One round: what each process reported, and why the others are absent."""
    with started(names, task) as contestants:
        absent = {each.name: each.absent for each in contestants if each.absent}
        running = [each for each in contestants if not each.absent]
        while running:
            running = [each for each in running if each.take_turn()]
        runs = {each.name: {"slices": each.slices, **each.end} for each in contestants if not each.absent}
    return runs, absent


def measure(names: Sequence[str], task: Task, rounds: int) -> tuple[dict[str, list[Run]], dict[str, str]]:
    """The runs of each contestant, and why the others are absent."""
    found: dict[str, list[Run]] = {}
    absent: dict[str, str] = {}
    for number in range(rounds):
        order = [name for name in names if name not in absent]
        runs, missing = take_turns(order if number % 2 == 0 else order[::-1], task)
        absent |= missing
        for name, run in runs.items():
            found.setdefault(name, []).append(run)
    return {name: found[name] for name in names if name in found}, absent


def seconds(runs: Sequence[Run], key: str = "seconds") -> float:
    """Of a run whose slices each took their median time over these runs."""
    times: list[list[float]] = [[each[key] for each in run["slices"]] for run in runs]
    medians: list[float] = [statistics.median(each) for each in zip(*times, strict=True)]
    return sum(medians)


def between_saves(runs: Sequence[Run], key: str) -> float:
    """What an iteration takes in the median slice, which neither starts, saves nor ends a run."""
    values: list[float] = [each[key] for run in runs for each in run["slices"]]
    return statistics.median(values) / SLICE


def rows_of(found: Mapping[str, list[Run]], task: Task, prefix: str = "") -> list[Row]:
    """For each contestant its throughput and its memory next to the hand-written loop's."""
    rows = []
    for name, runs in found.items():
        base = ALONE if name in (ALONE, OURS) else BY_HAND
        took, peak, helpers = (
            1e3 * seconds(runs) / task.iterations,
            statistics.median(run["peak"] for run in runs) / 2**20,
            statistics.median(run["helpers"] for run in runs) / 2**20,
        )
        median, faults = 1e3 * between_saves(runs, "seconds"), between_saves(runs, "faults")
        also = {"ms": took, "ms, median slice": median, "faults": faults, "peak, MiB": peak, "helpers, MiB": helpers}
        if name == base:
            rows.append(Row(name=prefix + name, unit="ms", measured=took, kind="absolute", also=also))
            continue
        reference = found[base]
        shares = [seconds([theirs]) / seconds([mine]) for theirs, mine in zip(reference, runs, strict=True)]
        also["processor"] = seconds(reference, "processor") / seconds(runs, "processor")
        times = peak * 2**20 / statistics.median(run["peak"] for run in reference)
        rows += [
            Row(
                name=f"{prefix}{name}, share of the throughput", kind="ratio", at_least=True, also=also,
                bound=THROUGHPUT if name in (OURS, FULL) else None,
                measured=seconds(reference) / seconds(runs), least=min(shares), most=max(shares),
            ),
            Row(
                name=f"{prefix}{name}, times the peak memory", kind="size", measured=times,
                bound=PEAK if name in (OURS, FULL) else None,
            ),
        ]  # fmt: skip
    return rows


def growth(names: Sequence[str], task: Task) -> dict[str, float]:
    """Bytes of resident memory that each gains per iteration after the first 500, by least squares."""
    runs, _ = take_turns(names, task)
    found = {}
    for name, run in runs.items():
        resident = [each["resident"] for each in run["slices"]]
        points = [(SLICE * (n + 1), value) for n, value in enumerate(resident) if SLICE * (n + 1) >= SETTLED][:-1]
        if len(points) > 2:  # without the run's end
            found[name] = statistics.linear_regression(*zip(*points, strict=True)).slope
    return found


def growth_rows(
    grown: Mapping[str, float], what: str, *, bound: float | None = None, goal: float | None = None
) -> list[Row]:
    """The bytes per iteration of each, with a bound or a goal for ours."""
    rows = []
    for name, value in grown.items():
        most, wanted = (None, None) if name == BY_HAND else (bound, goal)
        unit = "bytes an iteration"
        rows.append(Row(name=f"{name}, {what}", unit=unit, measured=value, kind="size", bound=most, goal=wanted))
    return rows


def on_gpu(rounds: int, iterations: int) -> tuple[list[Row], list[str]]:
    """The rows of each setting on a GPU, and why there are none."""
    if not torch.cuda.is_available():
        return [], ["124 M in bf16: skipped: there is no GPU"]
    rows: list[Row] = []
    for compiled in (False, True):
        task = Task.of_124_million(iterations, compile=compiled)
        found, _ = measure((BY_HAND, ALONE, OURS, FULL), task, rounds)
        rows += rows_of(found, task, f"124 M, bf16{', compiled' if compiled else ''}: ")
    return rows, []


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("language_model", __doc__)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--growth", type=int, default=10_000, help="iterations of the run whose memory is followed")
    parser.add_argument("--growth-of-demo", type=int, default=0, help="the same with the demo's model; slow")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark itself")
    options = parser.parse_args()
    if min(options.iterations, options.rounds) < 1:
        parser.error("--iterations and --rounds: need at least 1")
    task = Task.tiny(options.iterations) if options.tiny else Task.demo(options.iterations)
    names = [name for name in CONTESTANTS if name in (BY_HAND, ALONE, *options.only)]

    def rows() -> tuple[list[Row], list[str]]:
        found, absent = measure(names, task, options.rounds)
        followed = [name for name in (BY_HAND, OURS, FULL) if name in names]
        more = []
        if options.growth > SETTLED:
            grown = growth(followed, Task.tiny(options.growth))
            more += growth_rows(grown, "growth with a tiny model", bound=GROWTH)
        if options.growth_of_demo > SETTLED:
            more += growth_rows(growth(followed, Task.demo(options.growth_of_demo)), "growth", goal=GROWTH)
        gpu, skipped = on_gpu(options.rounds, options.iterations)
        notes = [f"{name}: absent: {why}" for name, why in absent.items()]
        return [*rows_of(found, task), *more, *gpu], [*notes, *skipped]

    return report(options, f"{task.iterations} iterations of the demo's GPT", rows)


if __name__ == "__main__":
    raise SystemExit(main())
