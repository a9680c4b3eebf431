"""Run pytorch-ignite's own tests and examples on our Engine, and report what passes on ignite's alone.

    python tests/ignite_suite.py                     # fetches the sources of the installed version; about 7 minutes
    python tests/ignite_suite.py --sources FOLDER    # an unpacked copy of them

The tests of the engine and of the handlers named below run three times: on plain ignite, with its Engine replaced by
ours, and with its Events and EventEnum replaced as well. Its example scripts run as they are and with our imports, see
ignite_examples.py. Exit status 1: a test that passes on ignite's Engine fails on ours and is not among DIFFERENCES, or
an example prints something else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

HANDLER_TESTS = (
    "checkpoint",
    "early_stopping",
    "ema_handler",
    "handlers",
    "lr_finder",
    "param_scheduler",
    "state_param_scheduler",
    "stores",
    "terminate_on_nan",
    "time_limit",
    "time_profilers",
    "timing",
)
TESTS = ["tests/ignite/engine", *(f"tests/ignite/handlers/test_{name}.py" for name in HANDLER_TESTS)]

# Tests that pin what we do otherwise on purpose: name of the test -> why; docs/ignite.md says more.
DIFFERENCES: dict[str, str] = {}

MODES = {"ignite": "ignite's own Engine", "engine": "our Engine", "events": "our Engine, Events and EventEnum"}
REPOSITORY = Path(__file__).resolve().parent.parent


# --------------------------------------------------------------- this file as a pytest plugin inside those runs


def swap(mode: str) -> None:
    """Put ours in the place of ignite's, before any test imports them."""
    import ignite.engine
    import ignite.engine.events

    from pulsetrain import engine
    from pulsetrain.engine.events.names import EventsList

    if mode in ("engine", "events"):
        ignite.engine.Engine = engine.Engine  # type: ignore[misc]
    if mode == "events":
        for place in (ignite.engine, ignite.engine.events):
            place.EventEnum = engine.EventEnum  # type: ignore[attr-defined]
        ignite.engine.Events = engine.Events  # type: ignore[misc]
        ignite.engine.events.EventsList = EventsList  # type: ignore[misc]


_outcomes: dict[str, str] = {}

if "IGNITE_SUITE_MODE" in os.environ:
    swap(os.environ["IGNITE_SUITE_MODE"])

    def pytest_runtest_logreport(report: Any) -> None:
        """Keep the worst outcome of a test's phases."""
        order = ("passed", "skipped", "failed")
        _outcomes[report.nodeid] = max(report.outcome, _outcomes.get(report.nodeid, "passed"), key=order.index)

    def pytest_sessionfinish(session: Any) -> None:
        """Write the outcomes, once: from the process that collects them all."""
        if not hasattr(session.config, "workerinput"):
            Path(os.environ["IGNITE_SUITE_OUTCOMES"]).write_text(json.dumps(_outcomes))


# ------------------------------------------------------------------------------------------- this file as a script


def fetch(folder: Path) -> Path:
    """Download and unpack the sources of the installed version."""
    wanted = f"pytorch-ignite=={version('pytorch-ignite')}"
    print(f"Fetching the sources of {wanted}", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", folder]
    subprocess.run([*pip, wanted], check=True)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    [unpacked] = [path for path in folder.iterdir() if path.is_dir()]
    return unpacked


def run(mode: str, sources: Path, folder: Path, workers: int) -> dict[str, str]:
    """The outcome of every test in one mode."""
    outcomes = folder / f"{mode}.json"
    # A copy, so that the folder tests/, where engine/ holds tests, is not on the path.
    shutil.copy(__file__, folder / "ignite_suite.py")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)]),
        "IGNITE_SUITE_MODE": mode,
        "IGNITE_SUITE_OUTCOMES": str(outcomes),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "pytest", "-p", "ignite_suite", "-p", "no:cacheprovider", "-n", str(workers)]
    command += ["-q", "--tb=short", "-m", "not distributed", "--disable-warnings", *TESTS]
    log = folder / f"{mode}.log"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=sources, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode not in (0, 1) or not outcomes.exists():  # 0: all passed, 1: some failed
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{log.read_text()[-4000:]}")
    results: dict[str, str] = json.loads(outcomes.read_text())
    counts = {outcome: list(results.values()).count(outcome) for outcome in ("passed", "failed", "skipped")}
    print(f"{MODES[mode]:<36}", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
    return results


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sources", type=Path, help="unpacked sources of the installed version of pytorch-ignite")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="processes of pytest-xdist")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.sources is not None:
            sources = folder / "sources"
            shutil.copytree(arguments.sources, sources, ignore=shutil.ignore_patterns("ignite_src", ".git"))
        else:
            sources = fetch(folder)
        if (sources / "ignite").is_dir():  # the installed package is the one to test
            shutil.rmtree(sources / "ignite")
        results = {mode: run(mode, sources, folder, arguments.workers) for mode in MODES}
        unexplained = 0
        for mode in ("engine", "events"):
            lost = [t for t, outcome in results["ignite"].items() if outcome == "passed" != results[mode].get(t)]
            for test in lost:
                reason = DIFFERENCES.get(test.split("::")[-1].split("[")[0])
                unexplained += reason is None
                print(
                    f"{'DIFFERS' if reason is None else 'differs as intended'} ({MODES[mode]}): {test} {reason or ''}"
                )
            if any(test for test in lost if test.split("::")[-1].split("[")[0] not in DIFFERENCES):
                print((folder / f"{mode}.log").read_text()[-8000:])
        print(f"{unexplained} tests pass on ignite's Engine and fail on ours without an explanation", flush=True)
        command = [sys.executable, str(REPOSITORY / "tests" / "ignite_examples.py"), str(sources / "examples")]
        examples = subprocess.run(command, check=False)
    return int(unexplained > 0 or examples.returncode > 0)


if __name__ == "__main__":
    raise SystemExit(main())
