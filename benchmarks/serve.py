"""The page of many long runs in headless Chromium: first paint, a zoom, memory; what-ifs; and how soon a value is seen.

    python -m benchmarks serve --runs 20      # fewer

Each run has 100,000 iterations and 100 validations. Their curves have been read before, once, which is measured apart.
The runs of `--runs` are copies of one, as only their number matters here.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np

from benchmarks.harness.machine import own_seconds_until_now, seconds_of_tree
from benchmarks.harness.results import Row, make_parser, report
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.runs.index import log_sign_of
from pulsetrain.serve.series import RunSeries, StoredSeries
from pulsetrain.serve.store import series_folder

LOSS = "document.querySelector('.chart[data-metric=\"loss, each iteration\"]')"
# milliseconds from the end of a drag to the frame that shows the points of the part, in all charts
ZOOMED = """
const charts = [...document.querySelectorAll('.chart[data-points]')], before = charts.map(chart => chart.dataset.x);
addEventListener('pointerup', () => {
  const begun = performance.now();
  const look = () => {
    if (charts.some((chart, index) => chart.dataset.x === before[index])) requestAnimationFrame(look);
    else requestAnimationFrame(() => requestAnimationFrame(() => { window.zoomed = performance.now() - begun; }));
  };
  look();
}, { once: true });
window.zoomed = null;
"""
RUNS, ITERATIONS, EVERY = 200, 100_000, 1000
BROWSERS: list[float] = []  # seconds of processor time of each, as far as nobody waits for its processes
LIVE = """\
import sys, time
from pulsetrain import SupervisedStrategy, Trainer, TrainingConfig
from pulsetrain.engine import Events
from pulsetrain.handlers import EventRecorder
from pulsetrain.testing import tiny_loader, tiny_model

config = TrainingConfig(seed=0, max_epochs=1000, progress=False)
trainer = Trainer(tiny_model(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config,
                  handlers=[EventRecorder(sys.argv[1])])

@trainer.on(Events.ITERATION_COMPLETED)
def rest(engine):
    print(engine.state.iteration, time.time(), flush=True)
    time.sleep(0.5)

trainer.train()
"""


def write_run(folder: Path, noise: float = 0.0) -> None:
    """A run of many iterations, whose loss falls with noise; more noise gives it spikes."""
    writer = LogWriter(folder / "events")
    seq = 0

    def add(event: str, iteration: int, **fields: Any) -> None:
        nonlocal seq
        seq += 1
        t = 10**18 + seq * 10**6
        writer.add(LoggedEvent(seq, "trainer", event, 1, iteration, seq=seq, t=t, **fields))

    add("started", 0)
    noises = np.random.default_rng(0).laplace(scale=noise, size=ITERATIONS).tolist()
    for iteration in range(1, ITERATIONS + 1):
        loss = 1 + 1000 / (iteration + 500) + 0.1 * ((iteration * 7919) % 1000) / 1000
        add("iteration_completed", iteration, output={"loss": loss + noises[iteration - 1]})
        if iteration % EVERY == 0:
            payload = {"metrics": {"val/loss": loss}, "seconds": 1.0}
            add("validation_completed", iteration, payload=payload)
    add("completed", ITERATIONS)
    writer.close()
    (folder / "run.json").write_text('{"format": 1, "created": "2026-09-21T12:53:20+0000"}')


def copy_runs(root: Path, count: int) -> float:
    """Write the runs and their curves; returns the seconds that reading the curves of one has taken."""
    first = root / "run-000"
    write_run(first)
    begun = time.perf_counter()
    series = RunSeries(first)
    StoredSeries.write(series_folder(root, first.name), series, log_sign_of(str(first)))
    seconds = time.perf_counter() - begun
    folders = [root / f"run-{number:03}" for number in range(count)]
    for folder in folders[1:]:
        shutil.copytree(first, folder, copy_function=os.link)
    for folder in folders:  # once all are linked: each link changes the sign of all
        kept = series_folder(root, folder.name)
        if folder != first:
            shutil.copytree(series_folder(root, first.name), kept, copy_function=os.link)
        about = json.loads((kept / "about.json").read_text())
        (kept / "about.json").unlink()
        (kept / "about.json").write_text(json.dumps({**about, "sign": log_sign_of(str(folder))}))
    return seconds


@contextmanager
def served(root: Path) -> Iterator[tuple[str, int]]:
    """A server: its address and its process."""
    words = [sys.executable, "-m", "pulsetrain", "serve", str(root), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().rpartition(": ")[2].strip(), server.pid
        finally:
            server.terminate()


@contextmanager
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield driver
    finally:
        whole, before = seconds_of_tree(driver.service.process.pid), own_seconds_until_now()
        driver.quit()
        BROWSERS.append(max(0.0, whole - (own_seconds_until_now() - before)))  # without what counts by now


def without_browser() -> list[str]:
    """Why no page can be opened; empty if one can."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if find_spec("selenium") is None:
        absent.append("selenium")
    return [f"the page is not measured: {', '.join(absent)}: not installed"] if absent else []


def until(true: Callable[[], Any]) -> float:
    """Seconds until it is true."""
    begun = time.perf_counter()
    while not true():
        if time.perf_counter() - begun > 120:
            raise TimeoutError("the page does not show it within 120 s")
        time.sleep(0.005)
    return time.perf_counter() - begun


def area_of_loss(page: Any) -> Any:
    """Where the loss is drawn."""
    return page.execute_script(f"return {LOSS}.querySelector('.area')")


def of_the_page(address: str, pid: int, rounds: int) -> tuple[float, float, float, float]:
    """Seconds to the first paint, to the curves of all runs, and of a zoom; and the server's peak memory in MB."""
    from selenium.webdriver.common.action_chains import ActionChains

    with browser() as page:
        first, whole, zooms = [], [], []
        for _ in range(rounds):
            page.get("about:blank")
            begun = time.perf_counter()
            page.get(address)
            until(lambda: page.find_elements("css selector", ".chart[data-points]"))
            first.append(time.perf_counter() - begun)
            count = len(page.find_elements("css selector", "#runs li"))
            page.execute_script("const all = document.getElementById('all'); if (!all.checked) all.click()")
            whole.append(until(lambda: page.execute_script(f"return Number({LOSS}?.dataset.runs)") == count))  # noqa: B023
            time.sleep(0.5)
            page.execute_script(ZOOMED)
            drag = ActionChains(page, duration=0).move_to_element_with_offset(area_of_loss(page), -20, 0)
            drag.click_and_hold().move_by_offset(40, 0).release().perform()
            until(lambda: page.execute_script("return window.zoomed !== null"))
            zooms.append(page.execute_script("return window.zoomed") / 1000)
    memory = int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) / 1e3
    return statistics.median(first), statistics.median(whole), statistics.median(zooms), memory


def seconds_of_answers(address: str, rounds: int, values: int, **words: Any) -> float:
    """The median time of the server's answer to what a handler would have done, once all curves are there.

    Args:
        address: of the server.
        rounds: answers.
        values: of each run that the answer has to cover.
        words: of the question; "run" has the names of the runs.

    Raises:
        RuntimeError: the answer has an error, or does not cover all values.
    """

    def is_complete() -> bool:
        with urlopen(f"{address}api/whatif?{urlencode(words, doseq=True)}") as answer:
            found = json.load(answer)
        if any(each.get("error") == "is being read" for each in found.values()):
            return False
        wrong = {run: found.get(run) for run in words["run"] if found.get(run, {}).get("values") != values}
        for run, answered in wrong.items():
            raise RuntimeError(f"{run}: expected {values:,} values, the server answers {answered}")
        return True

    until(is_complete)
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        if not is_complete():
            raise RuntimeError("curves that were read are missing again")
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def seconds_of_frequent_spikes(rounds: int) -> float:
    """The median time of the spike guard's answer for one run, of whose losses a tenth are spikes at threshold 2."""
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder, "noisy"), noise=0.1)
        with served(Path(folder)) as (address, _):
            words = {"handler": "LossSpikeGuard", "threshold": 2}
            return seconds_of_answers(address, rounds, ITERATIONS, run=["noisy"], **words)


def newest_in(curves: bytes) -> float:
    """The last place of the first line in an answer that has curves."""
    begin = 8 + int.from_bytes(curves[:8], "little")
    [lines] = json.loads(curves[8:begin])["charts"].values()
    return float(np.frombuffer(curves, "<f8", offset=begin)[lines[0][1] - 1]) if lines else 0.0


def seconds_to_the_page(root: Path) -> float:
    """The median time from the end of an iteration to its point in the answer that a page gets."""
    words = [sys.executable, "-c", LIVE, str(root / "live")]
    root.joinpath("live").mkdir()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as training, served(root) as (address, _):
        assert training.stdout is not None
        training.stdout.readline()
        until(lambda: b'"live"' in urlopen(f"{address}api/runs").read())
        taken = []
        for line in training.stdout:
            iteration, ended = line.split()
            while True:
                query = urlencode({"run": "live", "name": "loss, each iteration"})
                with urlopen(f"{address}api/curves?{query}") as answer:
                    curves = answer.read()
                if newest_in(curves) >= int(iteration):
                    break
                time.sleep(0.01)
            taken.append(time.time() - float(ended))
            if len(taken) == 12:
                training.kill()
                return statistics.median(taken[2:])
    raise RuntimeError("the run has ended")


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("serve", __doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    def rows() -> tuple[list[Row], list[str]]:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as live:
            root = Path(folder)
            reading = copy_runs(root, options.runs)
            with served(root) as (address, pid):
                names = [f"run-{number:03}" for number in range(min(options.runs, 100))]
                stopping = {"metric": "val/loss", "patience": 3, "mode": "min"}
                early = seconds_of_answers(address, options.rounds, ITERATIONS // EVERY, run=names, **stopping)
                spikes = seconds_of_answers(address, options.rounds, ITERATIONS, run=names, handler="LossSpikeGuard")
                notes = without_browser()
                figures = (math.nan,) * 4 if notes else of_the_page(address, pid, options.rounds)
            seen, frequent = seconds_to_the_page(Path(live)), seconds_of_frequent_spikes(options.rounds)
        first, whole, zoom, memory = figures
        return [
            Row(name="first paint, s", measured=first, kind="absolute", bound=1.0),
            Row(name="curves of all runs, s", measured=whole, kind="absolute"),
            Row(name="zoom of all runs, s", measured=zoom, kind="absolute", bound=0.2),
            Row(name="memory of the server, MB", measured=memory, kind="size", bound=500),
            Row(name="an iteration's end to its point, s", measured=seen, kind="absolute", bound=1.0),
            Row(name="early stopping over 100 runs, s", measured=early, kind="absolute", bound=2.0),
            Row(name="spike guard over 100 runs, s", measured=spikes, kind="absolute", bound=2.0),
            Row(name="spike guard, a run of many spikes, s", measured=frequent, kind="absolute", bound=1.0),
            Row(name="first reading of one run, s", measured=reading, kind="absolute"),
        ], notes

    return report(options, f"{options.runs:,} runs of {ITERATIONS:,} iterations", rows, lambda: sum(BROWSERS))


if __name__ == "__main__":
    raise SystemExit(main())
