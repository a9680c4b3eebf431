"""The page in headless Chromium where answers come late, are refused, or are overtaken by what has changed since."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.pulsetrain.serve.test_changing_runs_in_a_browser import GrowingLog, seqs, show
from tests.support.chromium import headless, needs_chromium, until
from tests.support.ports import free_port
from tests.support.run_folders import write_run
from tests.support.served_page import served, tab, text

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = list(needs_chromium)

# `held` is the part of an address whose answers wait until `release` is called, `late` milliseconds for all answers.
HOLD = """
const real = window.fetch;
let waiting = [];
window.held = null;
window.late = 0;
window.release = () => { window.held = null; waiting.forEach((each) => each()); waiting = []; };
window.waits = () => waiting.length;
const every = [];
window.asked = (part) => every.filter((each) => each.includes(part)).length;
window.fetch = async (url, options) => {
  every.push(String(url));
  const answer = await real(url, options);
  if (window.late) await new Promise((resolve) => setTimeout(resolve, window.late));
  if (window.held && String(url).includes(window.held)) await new Promise((resolve) => waiting.push(resolve));
  return answer;
};
let resizing = 0;
window.resizeListeners = () => resizing;
for (const [name, step] of [["addEventListener", 1], ["removeEventListener", -1]]) {
  const listen = window[name];
  window[name] = function (event, ...others) {
    resizing += step * (event === "resize");
    listen.call(this, event, ...others);
  };
}
"""


PLOTS = "return document.querySelectorAll('.js-plotly-plot').length"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with headless() as browser:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HOLD})
        yield browser


def pause(chromium: Any, milliseconds: int) -> None:
    """Time for what must not happen."""
    chromium.execute_async_script("setTimeout(arguments[1], arguments[0])", milliseconds)


@contextmanager
def growing(log: GrowingLog, seconds: float = 0.2) -> Iterator[None]:
    """Iterations are added meanwhile."""
    ended = threading.Event()

    def add() -> None:
        while not ended.wait(seconds):
            log.add(output={"loss": 1.0})

    thread = threading.Thread(target=add)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_view_that_was_left_is_not_drawn_over_the_next_one(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], end=None)
    log = GrowingLog(tmp_path / "a", 10)
    with served(tmp_path) as address, growing(log, 0.1):
        show(chromium, address, "Timeline", "a")
        for _ in range(3):
            until(chromium, lambda: "started or resumed" in text(chromium) and chromium.execute_script(PLOTS) == 1)
            pause(chromium, 1000)
            tab(chromium, "Events")
            until(chromium, lambda: seqs(chromium))
            pause(chromium, 700)
            assert "started or resumed" not in text(chromium)
            tab(chromium, "Timeline")


def test_a_chart_of_a_view_that_was_left_no_longer_listens_to_the_window(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5])
    with served(tmp_path) as address:
        show(chromium, address, "Timeline", "a")
        for _ in range(3):
            until(chromium, lambda: chromium.execute_script(PLOTS) == 1)
            assert chromium.execute_script("return window.resizeListeners()") == 1
            tab(chromium, "Lineage")
            until(chromium, lambda: "No listed run was forked" in text(chromium))
            assert chromium.execute_script("return window.resizeListeners()") == 0
            tab(chromium, "Timeline")


def test_curves_grow_though_each_answer_takes_longer_than_the_pause_between_updates(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], end=None)
    log = GrowingLog(tmp_path / "a", 10)
    points = "return Number(document.querySelector('.chart[data-metric^=\"loss, each\"]')?.dataset.points)"
    with served(tmp_path) as address:
        show(chromium, address, "Curves", "a")
        before = until(chromium, lambda: chromium.execute_script(points))
        chromium.execute_script("window.late = 700")
        with growing(log):
            until(chromium, lambda: chromium.execute_script(points) > before)


def test_a_list_without_a_run_that_trains_takes_in_others(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], end=None)
    write_run(tmp_path / "b", [1.0, 0.5])
    names = "return [...document.querySelectorAll('#runs li')].map(each => each.dataset.run)"
    with served(tmp_path) as address:
        show(chromium, address, "Curves", "a")
        until(chromium, lambda: chromium.execute_script(names) == ["a", "b"])
        until(chromium, lambda: "val/loss" in text(chromium))  # it is followed now
        with growing(GrowingLog(tmp_path / "a", 10), 0.1):
            chromium.find_element("css selector", "#where").send_keys('status == "completed"')
            until(chromium, lambda: chromium.execute_script(names) == ["b"])
            write_run(tmp_path / "c", [1.0])
            until(chromium, lambda: chromium.execute_script(names) == ["b", "c"])


def test_a_list_that_comes_late_leaves_what_is_newer(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], end=None)
    write_run(tmp_path / "b")
    log = GrowingLog(tmp_path / "a", 10)
    status = "return document.querySelector('#runs li[data-run=a] .status').textContent"
    with served(tmp_path) as address:
        show(chromium, address, "Lineage", "a")
        until(chromium, lambda: text(chromium, "#runs"))
        assert chromium.execute_script(status) in ("running", "stalled")
        chromium.execute_script("window.held = '/api/runs'")
        chromium.find_element("css selector", "#where").send_keys("iteration > 1")
        until(chromium, lambda: chromium.execute_script("return window.waits()"))
        log.add("completed")
        until(chromium, lambda: chromium.execute_script(status) == "completed")
        chromium.execute_script("window.release()")
        until(chromium, lambda: not text(chromium, '#runs li[data-run="b"]'))
        assert chromium.execute_script(status) == "completed"


def test_forks_appear_in_the_tree(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5])
    with served(tmp_path) as address:
        show(chromium, address, "Lineage")
        until(chromium, lambda: "No listed run was forked" in text(chromium))
        write_run(tmp_path / "b", [0.25], parent={"run": str(tmp_path / "a"), "id": "a", "iteration": 5})
        until(chromium, lambda: text(chromium, ".tree .tree").startswith("b at iteration 5"))


def test_what_if_keeps_the_focus_while_a_run_trains(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], end=None)
    log = GrowingLog(tmp_path / "a", 10)
    with served(tmp_path) as address:
        show(chromium, address, "What%20if", "a")
        until(chromium, lambda: "of 10 iterations saved" in text(chromium, "#saved"))
        chromium.execute_script("document.querySelector('[aria-label=min_delta]').focus()")
        with growing(log):
            until(chromium, lambda: int(text(chromium, "#saved").split()[2]) > 12)
        focused = "return document.activeElement.getAttribute('aria-label')"
        assert chromium.execute_script(focused) == "min_delta"


def test_a_comparison_that_comes_late_does_not_replace_what_is_chosen_now(chromium: Any, tmp_path: Path):
    for name in ("a", "b"):
        write_run(tmp_path / name, [1.0, 0.5])
    with served(tmp_path) as address:
        show(chromium, address, "Lineage", "a", "b")
        until(chromium, lambda: text(chromium, "#runs"))
        chromium.execute_script("window.held = '/api/diff'")
        tab(chromium, "Compare")
        until(chromium, lambda: chromium.execute_script("return window.waits()"))
        chromium.find_element("css selector", '#runs li[data-run="b"] input').click()
        until(chromium, lambda: text(chromium) == "Select two runs at the left.")
        chromium.execute_script("window.release()")
        pause(chromium, 300)
        assert text(chromium) == "Select two runs at the left."


def test_a_wrong_condition_on_events_stays_wrong_while_the_run_trains(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], end=None)
    log = GrowingLog(tmp_path / "a", 10)
    refused = "return document.querySelector('#view [role=alert]').textContent"
    with served(tmp_path) as address:
        show(chromium, address, "Events", "a")
        until(chromium, lambda: seqs(chromium) == [*range(13)])
        box = chromium.find_element("css selector", "[aria-label='Condition on events']")
        box.send_keys('iteration > "x"')
        said = until(chromium, lambda: chromium.execute_script(refused))
        with growing(log, 0.1):
            pause(chromium, 1000)
            before = chromium.execute_script("return window.asked('/api/events')")
            pause(chromium, 4000)
            assert chromium.execute_script("return window.asked('/api/events')") <= before + 2  # one takes long
        assert chromium.execute_script(refused) == said
        assert seqs(chromium) == [*range(13)]
        box.clear()
        box.send_keys("iteration > 10")
        until(chromium, lambda: len(seqs(chromium)) == log.iteration - 10)


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The study of a sweep with two completed trials and a failed one, and a trial of it that is running."""
    pytest.importorskip("optuna", reason="pip install 'pulsetrain[sweep]'")
    from pulsetrain.sweep.study import open_study
    from tests.pulsetrain.sweep.test_sweep_pictures import add_trials, spec_of

    spec = spec_of(tmp_path, "val/loss", monkeypatch, "swept")
    add_trials(spec, 2)
    write_run(tmp_path / "swept" / "trials" / "0000", [1.0])
    study = open_study(spec)
    return study, study.ask()


def test_trials_that_end_after_their_runs_are_shown(chromium: Any, tmp_path: Path, swept: tuple[Any, Any]):
    study, trial = swept
    with served(tmp_path) as address:
        show(chromium, address, "Sweeps")
        until(chromium, lambda: "1 running" in text(chromium, ".summary") and chromium.execute_script(PLOTS) == 1)
        study.tell(trial, 0.001)  # which changes no run
        until(chromium, lambda: "3 completed, 1 failed" in text(chromium, ".summary"))
        until(chromium, lambda: chromium.execute_script(PLOTS) == 1)
        assert chromium.execute_script("return window.resizeListeners()") == 1


@pytest.mark.usefixtures("swept")
def test_sweeps_that_were_left_are_no_longer_asked_for(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], end=None)
    with served(tmp_path) as address, growing(GrowingLog(tmp_path / "a", 10), 0.1):
        show(chromium, address, "Curves", "a")
        until(chromium, lambda: "val/loss" in text(chromium))  # it is followed now
        tab(chromium, "Sweeps")
        for milliseconds in (300, 500, 700, 900):  # while an update waits, in most cases
            until(chromium, lambda: chromium.execute_script(PLOTS) == 1)
            pause(chromium, milliseconds)
            tab(chromium, "Lineage")
            pause(chromium, 100)
            tab(chromium, "Sweeps")
        tab(chromium, "Lineage")
        pause(chromium, 1500)  # for what was on its way
        before = chromium.execute_script("return window.asked('/api/sweeps')")
        pause(chromium, 4000)
        assert chromium.execute_script("return window.asked('/api/sweeps')") == before
        assert chromium.execute_script("return window.resizeListeners()") == 0


@pytest.mark.usefixtures("swept")
def test_sweeps_are_drawn_though_plotly_could_not_be_loaded_at_first(chromium: Any, tmp_path: Path):
    chromium.execute_cdp_cmd("Network.enable", {})
    chromium.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/plotly.js"]})
    try:
        with served(tmp_path) as address:
            show(chromium, address, "Sweeps")
            until(chromium, lambda: "plotly.js cannot be loaded" in text(chromium, "#view-error"))
            assert chromium.execute_script(PLOTS) == 0
            chromium.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
            until(chromium, lambda: chromium.execute_script(PLOTS) == 1)
            until(chromium, lambda: text(chromium, "#view-error") == "")
    finally:
        chromium.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        chromium.execute_cdp_cmd("Network.disable", {})


@contextmanager
def answering(port: int, status: int) -> Iterator[Callable[[], int]]:
    """A server that gives every request this answer; what is returned counts them."""
    count = 0

    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal count
            count += 1
            self.send_error(status)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield lambda: count
        finally:
            server.shutdown()
            thread.join()


def test_a_page_follows_again_after_a_proxy_has_answered_for_the_server(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5])
    port = free_port()
    with served(tmp_path, "--port", str(port)) as address:
        show(chromium, address, "Lineage", "a")
        until(chromium, lambda: text(chromium, "#state") == "live")
    with answering(port, 503) as requests:
        until(chromium, requests)  # its answer ends what the browser tries by itself
        until(chromium, lambda: text(chromium, "#state").startswith("connection lost"))
        time.sleep(1)
    with served(tmp_path, "--port", str(port)):
        until(chromium, lambda: text(chromium, "#state") == "live")
        write_run(tmp_path / "b", [1.0])
        until(chromium, lambda: text(chromium, '#runs li[data-run="b"]'))
