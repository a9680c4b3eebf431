"""What a language model's training costs in each trainer: throughput and memory next to a hand-written loop.

    python -m benchmarks language_model                # prints a table and exits with 1 if a bound is missed
    python benchmarks/language_model.py --json         # the same as one JSON object
    python benchmarks/language_model.py --iterations 100 --rounds 1 --growth 0 --only "ours, the demo's handlers"

The model, the data and the settings are those of examples/byte_lm/config.yaml, on the CPU with one thread. Each
contestant runs in its own process. They take turns: each trains a slice of 25 iterations, start and end included,
while the others are stopped together with the processes that they started. A slice's time is its median over the
rounds; throughput is compared over the sum of all slices, and the spread is that of the rounds.

The hand-written loop uses the same fused optimizer and rates, clips, prints a line each 10 iterations, validates and
saves at the demo's cadence, and generates the demo's sample at the end. `hand-written, validating only` does neither
of the last two: it is compared with the Trainer without handlers, which does not either. Peak memory is that of the
process that trains; processes that it starts are listed as helpers, if they run at the end of a slice. Growth is the
slope of the resident memory after 500 iterations. Frameworks that are not installed are named (pip install -e
'.[bench]'). Where there is a GPU, a model of 124 million parameters is trained there in bf16, with and without
torch.compile.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).parent.parent))  # when run as a script
from benchmarks.contestants.language_model import CONTESTANTS, SLICE, Task

SETTLED = 500  # iterations after which memory is to be flat
THROUGHPUT, PEAK, GROWTH = 0.985, 1.1, 1024.0  # of the hand-written loop's, times the hand-written loop's, bytes
BY_HAND, ALONE, OURS, FULL = "hand-written", "hand-written, validating only", "ours", "ours, the demo's handlers"

Run = dict[str, Any]
"""What one process reported: its slices, its memory."""


class Contestant:
    """A process that trains a slice whenever it is told to, and is stopped otherwise."""

    def __init__(self, name: str, task: Task, folder: Path) -> None:
        self.name = name
        self.errors = (folder / "errors.txt").open("w+")
        code = "from benchmarks.contestants.language_model import serve; serve()"
        environment = {**os.environ, "OMP_NUM_THREADS": str(task.threads), "TOKENIZERS_PARALLELISM": "false"}
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


def summary(found: Mapping[str, list[Run]], task: Task) -> dict[str, dict[str, float]]:
    """For each contestant its time, and its throughput and memory next to the hand-written loop's."""
    rows: dict[str, dict[str, float]] = {}
    for name, runs in found.items():
        reference = found[ALONE if name in (ALONE, OURS) else BY_HAND]
        pairs = zip(reference, runs, strict=True)
        ratios = [seconds([base]) / seconds([run]) for base, run in pairs]
        peaks = [statistics.median(run["peak"] for run in each) for each in (runs, reference)]
        rows[name] = {
            "ms_per_iteration": 1e3 * seconds(runs) / task.iterations,
            "throughput": seconds(reference) / seconds(runs),
            "least": min(ratios),
            "most": max(ratios),
            "processor": seconds(reference, "processor") / seconds(runs, "processor"),
            "peak_mib": peaks[0] / 2**20,
            "times_peak": peaks[0] / peaks[1],
            "helpers_mib": statistics.median(run["helpers"] for run in runs) / 2**20,
        }
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


def missed(rows: Mapping[str, Mapping[str, float]], grown: Mapping[str, float]) -> list[str]:
    """The bounds that do not hold."""
    found = []
    for name in (OURS, FULL):
        if name in rows and rows[name]["throughput"] < THROUGHPUT:
            what = f"{rows[name]['throughput']:.3f} of the hand-written loop's throughput"
            found.append(f"{name}: {what}; the bound is {THROUGHPUT}")
        if name in rows and rows[name]["times_peak"] > PEAK:
            what = f"{rows[name]['times_peak']:.2f} times the hand-written loop's peak memory"
            found.append(f"{name}: {what}; the bound is {PEAK}")
        if grown.get(name, 0.0) > GROWTH:
            found.append(f"{name}: grows by {grown[name]:.0f} bytes an iteration; the bound is {GROWTH:.0f}")
    return found


def on_gpu(rounds: int, iterations: int) -> tuple[dict[str, dict[str, dict[str, float]]], str]:
    """The rows of each setting on a GPU, and why there are none."""
    if not torch.cuda.is_available():
        return {}, "no GPU"
    settings = {
        f"124 M, bf16{', compiled' if compile else ''}": Task.of_124_million(iterations, compile=compile)
        for compile in (False, True)
    }
    return {
        name: summary(measure((BY_HAND, ALONE, OURS, FULL), task, rounds)[0], task) for name, task in settings.items()
    }, ""


def print_table(title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    print(
        f"{title:<32}{'ms':>8}{'throughput':>12}{'least':>8}{'most':>8}{'processor':>11}{'peak, MiB':>11}{'times':>7}"
        f"{'helpers':>9}"
    )
    for name, row in rows.items():
        print(
            f"{name:<32}{row['ms_per_iteration']:>8.1f}{row['throughput']:>12.3f}{row['least']:>8.3f}"
            f"{row['most']:>8.3f}{row['processor']:>11.3f}{row['peak_mib']:>11.0f}{row['times_peak']:>7.2f}"
            f"{row['helpers_mib']:>9.0f}"
        )


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", type=int, default=2000, help="iterations of the run whose memory is followed")
    parser.add_argument("--only", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the benchmark itself")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if min(arguments.iterations, arguments.rounds) < 1:
        parser.error("--iterations and --rounds: need at least 1")
    load = os.getloadavg()[0]
    task = Task.tiny(arguments.iterations) if arguments.tiny else Task.demo(arguments.iterations)
    names = [name for name in CONTESTANTS if name in (BY_HAND, ALONE, *arguments.only)]
    found, absent = measure(names, task, arguments.rounds)
    rows = summary(found, task)
    followed = [name for name in (BY_HAND, OURS, FULL) if name in names]
    grown = growth(followed, task.lasting(arguments.growth)) if arguments.growth > SETTLED else {}
    gpu, skipped = on_gpu(arguments.rounds, arguments.iterations)
    problems = missed(rows, grown)
    for name, measured in gpu.items():
        problems += [f"{name}: {problem}" for problem in missed(measured, {})]
    if arguments.json:
        results = {"rows": rows, "growth": grown, "gpu": gpu, "gpu_skipped": skipped, "absent": absent}
        print(json.dumps({**results, "missed": problems, "load": load}, indent=2))
        return int(bool(problems))
    print_table(f"{task.iterations} iterations, CPU", rows)
    for name, why in absent.items():
        print(f"{name:<32}  absent: {why}")
    for name, value in grown.items():
        print(f"{name:<32}  grows by {value:,.0f} bytes an iteration after {SETTLED}")
    for name, measured in gpu.items():
        print_table(name, measured)
    if skipped:
        print(f"{'124 M, bf16':<32}  skipped: {skipped}")
    print(f"the machine's load before: {load:.1f}")
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
