"""Draws the pictures of the documentation, from runs that it trains in a temporary folder.

python docs/draw_pictures.py                  # all but architecture.svg, which docs/draw_architecture.py draws
python docs/draw_pictures.py report serve     # some: report, schedules, serve, watch, sweep, demo_loss

It takes some minutes on two cores, and needs `pip install -e '.[dev]'`, Chromium and its driver.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

from pulsetrain.watch.app import WatchApp
from pulsetrain.watch.watched import watch_runs

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{DOCS}:{DOCS.parent}"}  # for target_reached.py
RATES = (0.003, 0.001, 0.01, 0.1, 0.03)  # of the runs on the page of `pulsetrain serve`
TERMINAL = (150, 44)  # columns and lines
WATCHED = 0.35  # share of the runs that is trained when the terminal is drawn


def command(*words: str, folder: Path) -> None:
    """Run a command of Pulsetrain to its end."""
    subprocess.run(_program(*words), cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)


def _program(*words: str) -> list[str]:
    return [sys.executable, "-m", "pulsetrain", *words]


def project(folder: Path, *handlers: Any, save: Any = None, **training: Any) -> None:
    """What `pulsetrain init` writes, with more handlers, and other settings of the Checkpointer and the training."""
    command("init", "digits", folder=folder)
    shutil.move(folder / "digits", folder / "project")
    for each in (folder / "project").iterdir():
        shutil.move(each, folder)
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["handlers"] += handlers
    config["handlers"][0]["init_args"] |= save or {}
    config["training"] |= {"device": "cpu", **training}
    path.write_text(yaml.safe_dump(config, sort_keys=False))


def train(folder: Path, name: str, *words: str) -> None:
    """Train the project as runs/NAME."""
    command("train", "config.yaml", "--run", f"runs/{name}", *words, folder=folder)


def draw_report(folder: Path) -> None:
    """report.png: three runs, one of which is forked from another, with events of their own."""
    save = {"every": {"epochs": 2}, "metric": "val/loss", "keep_last": 20}
    stop = {"class_path": "EarlyStopping", "init_args": {"metric": "val/loss", "patience": 8}}
    project(folder, stop, {"class_path": "target_reached.AccuracyTargets"}, save=save)
    train(folder, "baseline")
    train(folder, "lower_rate", "--training.learning_rate=0.0005")
    words = ("fork", "runs/baseline", "--at", "270", "--into", "runs/fork_270", "--set", "training.learning_rate=0.03")
    command(*words, "--train", folder=folder)
    runs = [f"runs/{name}" for name in ("baseline", "lower_rate", "fork_270")]
    command("report", *runs, "--into", "report.html", folder=folder)
    with browser(1400, 1455) as chromium:
        chromium.get((folder / "report.html").as_uri())
        until(chromium, "document.querySelectorAll('.scatterlayer .trace').length")
        chromium.get_screenshot_as_file(DOCS / "report.png")


def draw_schedules(folder: Path) -> None:
    """schedules.png, as examples/schedules.py draws it."""
    subprocess.run(
        [sys.executable, EXAMPLES / "schedules.py", DOCS], env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL
    )


def draw_serve(folder: Path) -> None:
    """serve.png and serve_VIEW.png: the views of the page, over runs, forks, a sweep, and a run that hangs."""
    project(folder, {"class_path": "target_reached.AccuracyTargets"}, save={"keep_last": 20})
    names = [f"digits-{number}" for number in range(1, len(RATES) + 1)]
    for name, rate in zip(names, RATES, strict=True):
        train(folder, name, f"--training.learning_rate={rate}")
    with (
        subprocess.Popen(
            _program("serve", "runs", "--port", "0"), cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        ) as server,
        browser(1300, 1000) as chromium,
    ):
        try:
            assert server.stdout is not None
            address = server.stdout.readline().rpartition(": ")[2].strip()

            def draw(view: str, size: tuple[int, int], ready: str, picture: str, *runs: str) -> None:
                resize(chromium, *size)
                chromium.get("about:blank")
                chromium.get(f"{address}#{urlencode([('view', view), *(('run', name) for name in runs)])}")
                until(chromium, ready)
                until(chromium, "document.getElementById('state').textContent === 'live'")
                time.sleep(1)  # the last curves
                chromium.execute_script(SHORTEN)
                chromium.get_screenshot_as_file(DOCS / picture)

            curves = "document.querySelectorAll('.chart[data-points]').length > 5"
            table = "document.querySelectorAll('tbody tr').length"
            draw("Curves", (1300, 1000), curves, "serve.png", *names)
            draw("What if", (1300, 420), f"{table} === 5", "serve_what_if.png", *names)
            traces = "document.querySelectorAll('.chart .trace').length"
            draw("Timeline", (1300, 640), f"{traces} > 20", "serve_timeline.png", *names)
            draw("Events", (1200, 560), f"{table} > 20", "serve_events.png", names[0])
            with dark(chromium):
                charts = "document.querySelectorAll('.chart[data-points]').length"
                draw("Curves", (500, 1000), f"{charts} > 1", "serve_narrow.png", *names[:3])
            forks = _fork(folder, names[0])
            listed = f"document.querySelectorAll('#runs li').length === {len(names) + len(forks)}"
            draw("Compare", (1200, 720), f"{table} > 5", "serve_compare.png", names[0], forks[1])
            draw("Lineage", (1200, 480), f"{listed} && document.querySelector('.tree')", "serve_lineage.png", *forks)
            trials = [f"sweep/trials/{number:04}" for number in range(8)]
            command("sweep", str(EXAMPLES / "sweep.yaml"), "--folder", "runs/sweep", folder=folder)
            draw("Sweeps", (1200, 780), f"{traces} > 1 && {table} === 8", "serve_sweeps.png", *trials)
            _draw_texts(folder, draw)
            _draw_processes(folder, draw)
        finally:
            server.terminate()


def _fork(folder: Path, run: str) -> list[str]:
    """Train forks of a run, and one of a fork; returns their names."""
    forks = ((run, 225, 0.01), (run, 450, 0.03), ("fork-450", 675, 0.001))
    for parent, at, rate in forks:
        words = ("fork", f"runs/{parent}", "--at", str(at), "--into", f"runs/fork-{at}")
        command(*words, "--set", f"training.learning_rate={rate}", "--train", folder=folder)
    return [f"fork-{at}" for _, at, _ in forks]


def _draw_texts(folder: Path, draw: Callable[..., None]) -> None:
    """serve_media.png: the figures of a language model."""
    words = ("--run", "runs/byte_lm", "--training.max_tokens=400000")
    command("train", str(EXAMPLES / "byte_lm" / "config.yaml"), *words, folder=folder)
    loaded = "[...document.images].length && document.images[0].naturalWidth"
    draw("Media", (1200, 780), loaded, "serve_media.png", "byte_lm")


def _draw_processes(folder: Path, draw: Callable[..., None]) -> None:
    """serve_processes.png: two processes, one of which reads a batch that never comes."""
    (folder / "slow_disk.py").write_text(SLOW_DISK)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["handlers"].append({"class_path": "slow_disk.SlowDisk"})
    (folder / "hanging.yaml").write_text(yaml.safe_dump(config))
    words = _program("train", "hanging.yaml", "--run", "runs/hanging", "--launch.nproc", "2")
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    stacks = "document.querySelectorAll('pre').length === 2"
    with subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, start_new_session=True, **silent) as training:
        try:
            draw("Processes", (1200, 760), stacks, "serve_processes.png", "hanging")
        finally:
            os.killpg(training.pid, signal.SIGKILL)


SHORTEN = r"""
for (const each of document.querySelectorAll("pre"))  // stacks, without the folders of this machine
  each.textContent = each.textContent.replace(/^\S*\/(?=(torch|ignite|pulsetrain)\/|slow_disk)/gm, "");
"""
SLOW_DISK = '''
import os
import time

from pulsetrain import Events


class SlowDisk:
    """Rank 1 waits for a file at iteration 100."""

    def attach(self, trainer):
        trainer.add_event_handler(Events.GET_BATCH_STARTED, self.read_batch)
        return self

    def read_batch(self, trainer):
        if os.environ["RANK"] == "1" and trainer.state.iteration == 100:
            time.sleep(3600)
'''


def draw_watch(folder: Path) -> None:
    """watch.png: two runs in the terminal while they train."""
    memory, spikes = {"class_path": "MemoryMonitor"}, {"class_path": "LossSpikeGuard"}
    project(folder, memory, spikes, max_epochs=200, learning_rate=0.02)
    names = ("digits-1", "digits-2")
    words = [["train", "config.yaml", "--run", f"runs/{name}"] for name in names]
    words[1] += ["--training.seed=1"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    trained = [subprocess.Popen(_program(*each), cwd=folder, env=ENVIRONMENT, **silent) for each in words]
    try:
        for name in names:
            while not (folder / "runs" / name / "events").is_dir():
                time.sleep(0.1)
        drawn = asyncio.run(_terminal([folder / "runs" / name for name in names]))
    finally:
        for each in trained:
            each.terminate()
            each.wait()
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0]
    page = folder / "watch.html"
    plain = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # fonts that would be fetched
    page.write_text(f"<style>body {{ margin: 0 }}</style>{plain}")
    with browser(round(float(width)), round(float(height))) as chromium:
        chromium.get(page.as_uri())
        chromium.get_screenshot_as_file(DOCS / "watch.png")


async def _terminal(runs: list[Path]) -> str:
    """The screen of `pulsetrain watch`, once a part of the runs is trained."""
    app = WatchApp(watch_runs(runs))
    async with app.run_test(size=TERMINAL) as pilot:
        while min(each.run.progress.share or 0.0 for each in app.runs) < WATCHED:
            await pilot.pause(0.2)
        return app.export_screenshot(title=f"pulsetrain watch {' '.join(f'runs/{run.name}' for run in runs)}")


def draw_sweep(folder: Path) -> None:
    """sweep.png: the page that examples/sweep.yaml makes."""
    command("sweep", str(EXAMPLES / "sweep.yaml"), folder=folder)
    with browser(900, 1200) as chromium:
        chromium.get((folder / "sweeps" / "digits" / "sweep.html").as_uri())
        until(chromium, "document.querySelectorAll('.scatterlayer .trace').length")
        chromium.get_screenshot_as_file(DOCS / "sweep.png")


def draw_demo_loss(folder: Path) -> None:
    """demo_loss.png: the figure of the run of `make demo`."""
    command("train", str(EXAMPLES / "byte_lm" / "config.yaml"), "--run", "runs/demo", folder=folder)
    shutil.copy(folder / "runs" / "demo" / "plots" / "loss.png", DOCS / "demo_loss.png")


PICTURES: dict[str, Callable[[Path], None]] = {
    "report": draw_report,
    "schedules": draw_schedules,
    "serve": draw_serve,
    "watch": draw_watch,
    "sweep": draw_sweep,
    "demo_loss": draw_demo_loss,
}


@contextmanager
def browser(width: int, height: int) -> Iterator[Any]:
    """Headless Chromium with a window of this size, in pixels."""
    options = webdriver.ChromeOptions()
    options.binary_location = _path_of("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_path_of("chromedriver")))
    try:
        resize(driver, width, height)
        yield driver
    finally:
        driver.quit()


@contextmanager
def dark(chromium: Any) -> Iterator[None]:
    """Prefer dark pages."""
    wanted = {"name": "prefers-color-scheme", "value": "dark"}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [wanted]})
    yield
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def resize(chromium: Any, width: int, height: int) -> None:
    """Give the window another size."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def until(chromium: Any, condition: str) -> None:
    """Wait until a condition in JavaScript holds."""
    WebDriverWait(chromium, 60).until(lambda each: each.execute_script(f"return {condition}"))


def _path_of(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise SystemExit(f"draw_pictures.py: {program} is not installed; on Debian: apt-get install chromium-driver")
    return found


def main(names: list[str]) -> None:
    """Draw these pictures."""
    unknown = [name for name in names if name not in PICTURES]
    if unknown:
        raise SystemExit(f"draw_pictures.py: {unknown[0]} is not a picture; there are {', '.join(PICTURES)}")
    for name in names or PICTURES:
        with tempfile.TemporaryDirectory(prefix="pulsetrain-pictures-") as folder:
            PICTURES[name](Path(folder))
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
