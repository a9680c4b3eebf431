"""What agreement, the store, logs and checkpoints cost with up to 10,000 ranks: simulated, counted and extrapolated.

    python -m benchmarks many_ranks         # prints a table and exits with 1 if a bound is missed

Nothing runs on 10,000 processes. Simulated ranks run the product's Pulse: some of them ask for the end of a run,
and all have to end it alike. Sums take as long as a model with a latency and a rate says. Requests to the store are
counted, and its speed is measured with a few processes. Logs are written and read by the product's own code, up to
1,000 of them. What is extrapolated to 10,000 ranks says so in its name.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness.results import Row, make_parser, report
from benchmarks.scaling.files import (
    EVENTS,
    bytes_of_processes,
    log_bytes,
    manifest_of,
    pieces_of,
    read_logs,
    write_logs,
)
from benchmarks.scaling.pulses import NUMBERS, Training, in_ring, in_tree, seconds_between_pulses, simulate
from benchmarks.scaling.stores import of_a_group, requests_of_joining, requests_per_second, seconds_of_a_sum
from examples.byte_lm.model import ByteGPT
from pulsetrain.engine.distributed import replicas
from pulsetrain.engine.distributed.failures import look_interval
from pulsetrain.engine.distributed.replicas import differ, digest

MANY = 10_000
SIZES = (10, 100, 1_000, MANY)
SHARE = 3.0  # percent of a training that agreement may take
STORE = 10_000.0  # requests a second of all ranks together, for one purpose
FLAT = 2.0  # times: what a log costs among 1,000, and among 100


def pulses(runs: int) -> Iterator[Row]:
    """Simulated runs that end by a signal or a request, and how much of a training their pulses take by the model."""
    for ranks in SIZES:
        ended = max(runs * 10 // max(ranks // 100, 10), 4)
        found = simulate(ranks, ended, Training())
        yield Row(
            name=f"{ranks:,} simulated ranks: disagreements",
            measured=found.disagreements,
            kind="size",
            bound=0.0,
            also={"runs": ended, "pulses": found.pulses, "from signal to end, s": max(found.seconds, default=0.0)},
        )
    for ranks in SIZES:
        seconds, between = in_ring(ranks), seconds_between_pulses(ranks, 1.0)
        yield Row(
            name=f"{ranks:,} ranks: share of the pulses, %",
            measured=100 * seconds / between,
            kind="size",
            bound=SHARE,
            also={"between two, s": between, "ring, ms": 1e3 * seconds, "tree, ms": 1e3 * in_tree(ranks)},
        )


def digests() -> Iterator[Row]:
    """Whether sums of digests are exact, and find one rank that differs by the least that a digest can."""
    largest = (1 << replicas._BITS) - 1
    exact = float(2**53 // largest**2)
    yield Row(name="ranks whose sums of digests are exact", measured=exact, kind="size", bound=100_000.0, at_least=True)
    wrong = 0
    for ranks in SIZES:
        for value in (largest, largest - 1, digest({"rate": 0.1})[0]):
            for other in (value, value - 1):
                total = squares = 0.0
                for each in (*[value] * (ranks - 1), other):
                    total, squares = total + each, squares + each * each
                wrong += differ([total, squares], ranks) != (other != value)
    yield Row(name="digests of up to 10,000 ranks: wrong answers", measured=wrong, kind="size", bound=0.0)


def store() -> Iterator[Row]:
    """What the store answers, and what the ranks ask."""
    rates = {clients: requests_per_second(clients) for clients in (2, 8, 16)}
    for clients, rate in rates.items():
        yield Row(name=f"the store of {clients} processes: requests a second", measured=rate, kind="absolute")
    joining = {ranks: requests_of_joining(ranks) for ranks in (8, 128)}
    ratio = joining[128] / joining[8]
    yield Row(name="joining: requests of a rank of 128 / of 8", measured=ratio, kind="size", bound=1.0)
    yield Row(name="joining: requests of a rank", measured=joining[128], kind="size")
    seconds = joining[128] * MANY / rates[8]
    yield Row(name="joining: 10,000 ranks, extrapolated, s", measured=seconds, kind="absolute")
    requests, files = of_a_group(16, lazy=True)
    fewer, _ = of_a_group(8, lazy=True)
    every, all_files = of_a_group(16, lazy=False)
    yield Row(name="a group: requests of a rank of 16 / of 8", measured=requests / fewer, kind="size", bound=1.25)
    yield Row(name="a group: requests of a rank", measured=requests, kind="size")
    yield Row(name="a group: files of a rank", measured=files, kind="size", bound=8.0)
    yield Row(name="a group in which all connect to all: requests of a rank of 16", measured=every, kind="size")
    yield Row(name="a group in which all connect to all: files of a rank of 16", measured=all_files, kind="size")
    for what, least, asked in (
        ("looking for failures", 1.0, 4),
        ("waiting for a save", 0.02, 3),
        ("showing that they save", 0.5, 1),
    ):
        interval = look_interval(least, asked, MANY)
        yield Row(
            name=f"10,000 ranks {what}: requests a second",
            measured=asked * MANY / interval,
            kind="size",
            bound=STORE,
            also={"between two, s": interval},
        )


def start() -> Iterator[Row]:
    """What the ranks send to compare how they were started."""
    model = ByteGPT(layers=48, width=64, heads=2)
    shapes = sorted((name, tuple(each.shape)) for name, each in model.state_dict().items())
    facts = len(pickle.dumps({"the model's tensors": repr(shapes)}))
    sent = 2 * 8 * NUMBERS * (MANY - 1) / MANY
    yield Row(name="checks at the start, 10,000 ranks: bytes for each", measured=sent, kind="size", bound=1_024.0)
    yield Row(name="checks at the start, if all got all facts: MB for each", measured=facts * MANY / 1e6, kind="size")
    written = bytes_of_processes(MANY) / 1e6
    yield Row(name="run.json, 10,000 ranks: MB for each start", measured=written, kind="size", bound=1.0)


def checkpoints() -> Iterator[Row]:
    """The manifest, and the headers of the files."""
    found = {files: manifest_of(files) for files in SIZES[1:]}
    for files, each in found.items():
        yield Row(name=f"a manifest of {files:,} files: bytes a file", measured=each["bytes"], kind="size", bound=200.0)
    yield Row(name="a manifest of 10,000 files: MB", measured=found[MANY]["bytes"] * MANY / 1e6, kind="size")
    for what in ("write", "read"):
        name = f"a manifest of 10,000 files: {what}, ms"
        yield Row(name=name, measured=found[MANY][what], kind="absolute")
    pieces_of(10, 5)  # what is done once
    few, many = pieces_of(100, 50), pieces_of(400, 50)
    ratio = many["us"] / few["us"]
    yield Row(name="a piece of a tensor among 400 files / among 100", measured=ratio, kind="ratio", bound=FLAT)
    yield Row(name="a piece of a tensor: us", measured=many["us"], kind="absolute")
    yield Row(name="a piece of a tensor: bytes in memory", measured=many["bytes"], kind="size", bound=400.0)


def logs(iterations: int) -> Iterator[Row]:
    """The size of logs, and what reads all of them."""
    with tempfile.TemporaryDirectory() as name:
        each = log_bytes(Path(name), 3_000)
    yield Row(name="a log: bytes of an iteration", measured=each, kind="size", bound=30.0 * EVENTS)
    yield Row(name="10,000 logs of 100,000 iterations: GB", measured=each * MANY * 100_000 / 1e9, kind="size")
    taken: dict[int, dict[str, float]] = {}
    for ranks in SIZES[:3]:
        with tempfile.TemporaryDirectory() as name:
            write_logs(Path(name), ranks, iterations)
            taken[ranks] = read_logs(Path(name), ranks)
    for what in ("where", "diff --ranks", "report"):
        ratio = taken[1_000][what] / taken[100][what]
        yield Row(name=f"{what}: a log among 1,000 / among 100", measured=ratio, kind="ratio", bound=FLAT)
        for ranks, found in taken.items():
            yield Row(name=f"{what}: a log among {ranks:,}, ms", measured=found[what], kind="absolute")
        seconds = taken[1_000][what] * MANY / 1e3
        yield Row(name=f"{what}: 10,000 logs, extrapolated, s", measured=seconds, kind="absolute")
    memory = taken[1_000]["bytes"]
    yield Row(name="where: bytes in memory for each of 1,000 logs", measured=memory, kind="size", bound=4_000.0)


def here() -> Iterator[Row]:
    """A sum on this machine: its processes share few cores, so that it grows faster than on hosts of their own."""
    for ranks in (2, 4, 8):
        yield Row(
            name=f"a sum of {ranks} processes on this machine",
            unit="ms",
            measured=1e3 * seconds_of_a_sum(ranks),
            kind="absolute",
        )


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("many_ranks", __doc__)
    parser.add_argument("--runs", type=int, default=50, help="that 10 and 100 simulated ranks end [%(default)s]")
    parser.add_argument("--iterations", type=int, default=20, help="in each of the logs that are read [%(default)s]")
    options = parser.parse_args()
    for name in ("runs", "iterations"):
        if getattr(options, name) < 2:
            parser.error(f"--{name} {getattr(options, name)}: choose at least 2")

    def rows() -> tuple[list[Row], list[str]]:
        parts = (
            here(), pulses(options.runs), digests(), store(), start(), checkpoints(), logs(options.iterations)
        )  # fmt: skip
        return [row for part in parts for row in part], []

    return report(options, "with many ranks", rows)


if __name__ == "__main__":
    raise SystemExit(main())
