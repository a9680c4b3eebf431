"""Which benchmarks there are, and with which options each runs in the forms that need other sizes than its own."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ALL", "CHECK", "FOLDER", "FULL", "SHORT", "arguments_of", "names"]

FOLDER = Path(__file__).resolve().parents[1]

# ratios only, all together within 90 seconds on 2 cores; the others have none, or need more time for it
SHORT: dict[str, list[str]] = {
    "overhead": ["--iterations", "20000", "--rounds", "5"],
    "trainers": [
        *("--only", "ours", "ours, the full set", "ignite", "Fabric"),
        *("--rounds", "15", "--iterations", "200"),
    ],
    "start": ["--imports", "--rounds", "2"],
    "scale": ["--events", "1e5"],
}
# smaller than those of the bounds, so that the tables of all benchmarks together take less time
ALL: dict[str, list[str]] = {
    "against_sb3": ["--steps", "5000"],
    "against_trl": ["--rounds", "3"],
    "backends": ["--rounds", "3"],
    "cartpole": ["--seeds", "0", "1"],
    "checkpoint": ["--rounds", "3", "--seconds", "10"],
    "distributed": ["--iterations", "400"],
    "handlers": ["--tokens", "120000"],
    "language_model": ["--iterations", "200", "--growth", "2000"],
    "language_model_jax": ["--only", "ours, the demo's handlers", "--turn", "5", "--every", "125", "--rounds", "1"],
    "many_ranks": ["--runs", "20"],
    "recorder": ["--rounds", "3"],
    "serve": ["--runs", "50"],
    "start": ["--rounds", "3"],
    "trainers": ["--iterations", "300", "--rounds", "5"],
    "verify": ["--rounds", "3"],
}
# without the contestants whose rows have no bound
CHECK: dict[str, list[str]] = {
    "language_model": ["--only", "ours", "ours, the demo's handlers"],
    "trainers": [
        *("--only", "ours", "ours, its default progress line", "ours, the full set", "ours, nothing computed"),
        *("ignite", "Fabric", "--rounds", "25"),
    ],
}
# sizes for which a figure is promised and which take longer than a run of all benchmarks should
FULL: dict[str, list[str]] = {
    "against_sb3": ["--seeds", "10", "--steps", "100000"],
    "checkpoint": ["--megabytes", "500", "--seconds", "60"],
    "grpo": ["--seeds", "10"],
    "language_model": ["--growth-of-demo", "2000"],
    "recorder": ["--log-events", "1e7"],
    "scale": ["--events", "1e7"],
    "stepping": ["--events", "1e7"],
}


def names() -> list[str]:
    """All benchmarks, by the names of their files."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__main__")


def arguments_of(name: str, form: str) -> list[str]:
    """The options of a benchmark in a form: "short", "all", "check", "full", or "" for its defaults."""
    return {"short": SHORT, "all": ALL, "check": CHECK, "full": FULL, "": {}}[form].get(name, [])
