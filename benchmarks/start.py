"""How long the command line and the imports take.

    python -m benchmarks start               # prints a table and exits with 1 if a bound is missed
    python -m benchmarks start --json        # the same as one JSON object

Each figure is the median of rounds in which all take turns, each in a new process with its files in the page cache. The
commands read the log of a small run. The last rows are ratios of processor times: what replaying, and importing our
Engine, take to importing torch and pytorch-ignite's.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness.results import Row, make_parser, ratios, report
from pulsetrain import EventRecorder
from pulsetrain.engine import Engine

HELP, READ, RATIO = 0.3, 0.7, 1.05  # seconds, seconds, and times as long
REPLAY = 1.25  # times as long as importing ignite's engine, whose classes our Engine extends
PEER, OWN = "import torch, ignite.engine", "from pulsetrain.engine import Engine"
TRAINER = "from pulsetrain import Trainer"
COMMANDS: dict[str, tuple[list[str], float]] = {
    "--help": (["--help"], HELP),
    "--version": (["--version"], HELP),
    "completion bash": (["completion", "bash"], HELP),
    "a wrong command": (["nonsense"], HELP),
    "events": (["events", "run", "--event", "epoch_completed"], READ),
    "diff": (["diff", "run", "run"], READ),
    "export": (["export", "run", "--format", "csv", "--force"], READ),
    "replay": (["replay", "run", "--handler", "step_limit:iterations=50"], READ),
}


def seconds(words: list[str], folder: Path) -> tuple[float, float]:
    """The wall-clock time of a process, and its processor time."""
    start, used = time.perf_counter(), _used()
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
    return time.perf_counter() - start, _used() - used


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(rounds: int, *, commands: bool) -> list[Row]:
    """The seconds of each command, and the ratios of what imports torch."""
    processes = {name: ["-m", "pulsetrain", *words] for name, (words, _) in COMMANDS.items() if commands}
    processes |= {code: ["-c", code] for code in (PEER, OWN, TRAINER)}
    found: dict[str, list[float]] = {name: [] for name in processes}
    used: dict[str, list[float]] = {name: [] for name in processes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if commands:
            engine = Engine(lambda engine, batch: {"loss": 1 / batch}, name="trainer")
            EventRecorder(folder / "run").attach(engine)
            engine.run(range(1, 101), max_epochs=2)
        for number in range(rounds + 1):  # the first fills the page cache
            for name, words in processes.items():
                took, computed = seconds(words, folder)
                if number:
                    found[name].append(took)
                    used[name].append(computed)
    rows = [
        Row(
            name=name,
            unit="s",
            measured=statistics.median(found[name]),
            least=min(found[name]),
            most=max(found[name]),
            kind="absolute",
            bound=None if name == "replay" else bound,
            goal=bound if name == "replay" else None,
        )
        for name, (_, bound) in COMMANDS.items()
        if commands
    ]
    rows.append(Row(name=PEER, unit="s", measured=statistics.median(found[PEER]), kind="absolute"))
    if commands:
        rows.append(Row(name=f"replay / {PEER}", kind="ratio", **ratios(used["replay"], used[PEER]), bound=REPLAY))
    own = Row(name=f"{OWN} / {PEER}", kind="ratio", **ratios(used[OWN], used[PEER]), bound=RATIO)
    return [*rows, own, Row(name=f"{TRAINER} / {PEER}", kind="ratio", **ratios(used[TRAINER], used[PEER]))]


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("start", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--imports", action="store_true", help="measure the imports only")
    options = parser.parse_args()
    return report(options, "starting", lambda: (measure(options.rounds, commands=not options.imports), []))


if __name__ == "__main__":
    raise SystemExit(main())
