"""Which benchmarks there are, and with which options each runs in the forms that need other sizes than its own."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ALL", "FOLDER", "FULL", "SHORT", "arguments_of", "names"]

FOLDER = Path(__file__).resolve().parents[1]

# ratios only, all together within 90 seconds on 2 cores; the others have none, or need more time for it
SHORT: dict[str, list[str]] = {
    "overhead": ["--iterations", "20000", "--rounds", "5"],
    "trainers": [
        *("--only", "ours", "ours, the full set", "ignite", "Fabric"),
        *("--rounds", "5", "--iterations", "300"),
    ],
    "start": ["--imports", "--rounds", "2"],
    "scale": ["--events", "1e5"],
}
# smaller than those of the bounds, so that the tables of all benchmarks together take less time
ALL: dict[str, list[str]] = {
    "against_sb3": ["--steps", "10000"],
    "backends": ["--rounds", "3"],
    "cartpole": ["--seeds", "0", "1"],
    "checkpoint": ["--rounds", "3", "--seconds", "10"],
    "language_model": ["--iterations", "250", "--growth", "4000"],
    "language_model_jax": ["--only", "ours, the demo's handlers"],
    "many_ranks": ["--runs", "20"],
    "start": ["--rounds", "3"],
    "trainers": ["--iterations", "500"],
}
# sizes for which a figure is promised and which take longer than a run of all benchmarks should
FULL: dict[str, list[str]] = {
    "against_sb3": ["--seeds", "10", "--steps", "100000"],
    "checkpoint": ["--megabytes", "500", "--seconds", "60"],
    "recorder": ["--log-events", "1e7"],
    "scale": ["--events", "1e7"],
    "stepping": ["--events", "1e7"],
    "strategies": ["--seeds", "10", "--steps", "100000", "--only", "TRL", "CartPole", "Acrobot", "Pendulum"],
}


def names() -> list[str]:
    """All benchmarks, by the names of their files."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__main__")


def arguments_of(name: str, form: str) -> list[str]:
    """The options of a benchmark in a form: "short", "all", "full", or "" for its defaults."""
    return {"short": SHORT, "all": ALL, "full": FULL, "": {}}[form].get(name, [])
