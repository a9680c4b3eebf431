"""The page of `pulsetrain serve` for tests in a browser: the server, a run that trains, and what the page shows."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.chromium import until

__all__ = ["CHART", "chart", "served", "tab", "text", "train"]

TRAINING = textwrap.dedent("""
    import sys, time
    from pulsetrain import Trainer, TrainingConfig, SupervisedStrategy
    from pulsetrain.engine import Events
    from pulsetrain.handlers import EventRecorder
    from pulsetrain.testing import tiny_loader, tiny_model

    folder, epochs, pause, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    config = TrainingConfig(seed=0, max_epochs=epochs, progress=False, learning_rate=rate)
    trainer = Trainer(
        tiny_model(), tiny_loader(), tiny_loader(), strategy=SupervisedStrategy("mse"), config=config,
        handlers=[EventRecorder(folder)],
    )
    trainer.on(Events.ITERATION_COMPLETED)(lambda engine: time.sleep(pause))
    trainer.train()
""")
CHART = "[...document.querySelectorAll('.chart')].find(c => c.dataset.metric === arguments[0] && c.dataset.points)"


def train(folder: Path, epochs: int, pause: float = 0.0, rate: float = 0.01) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", TRAINING, str(folder), str(epochs), str(pause), str(rate)]
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1"})


@contextmanager
def served(root: Path, *options: str) -> Iterator[str]:
    words = [sys.executable, "-m", "pulsetrain", "serve", str(root), "--port", "0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().rpartition(": ")[2].strip()
        finally:
            server.terminate()


def tab(browser: Any, name: str) -> None:
    next(each for each in browser.find_elements("css selector", "#tabs button") if each.text == name).click()


def text(browser: Any, selector: str = "#view") -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))


def chart(browser: Any, metric: str) -> Any:
    return until(browser, lambda: browser.execute_script(f"return {CHART}", metric))
