"""The page in headless Chromium while runs change: what follows them, and what they leave as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.handlers.run_files.owner_process import processes
from tests.support.chromium import headless, needs_chromium, until
from tests.support.run_folders import BEGUN, SECOND, write_run
from tests.support.served_page import served, text

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = list(needs_chromium)


SLIDE = "const e = document.getElementById('patience'); e.value = arguments[0]; e.dispatchEvent(new Event('input'))"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with headless() as browser:
        yield browser


def show(chromium: Any, address: str, view: str, *runs: str) -> None:
    """Open the page at a view of some runs."""
    chromium.get("about:blank")
    chromium.get(f"{address}#view={view}" + "".join(f"&run={run}" for run in runs))


def test_what_if_shows_a_run_once_it_is_read_and_keeps_what_was_chosen(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5, 0.6, 0.7])
    write_run(tmp_path / "b", [1.0, 0.5])
    with served(tmp_path) as address:
        show(chromium, address, "What%20if", "a")
        until(chromium, lambda: text(chromium, "#saved") == "0 of 20 iterations saved")
        chromium.find_element("css selector", "[aria-label=Metric] option[value='val/accuracy']").click()
        chromium.execute_script(SLIDE, 1)
        until(chromium, lambda: text(chromium, "#saved") == "5 of 20 iterations saved")
        chromium.find_element("css selector", '#runs li[data-run="b"] input').click()
        until(chromium, lambda: text(chromium, "#saved") == "5 of 30 iterations saved")
        assert chromium.execute_script("return document.querySelector('[aria-label=Metric]').value") == "val/accuracy"


UNREAD = """
if (location.hash.includes("unread")) {
  window.isHidden = location.hash.includes("background");
  Object.defineProperty(document, "hidden", { get: () => window.isHidden });
  const real = window.fetch;
  let isUnread = true;
  window.fetch = async (url, options) => {
    const answer = await real(url, options);
    if (!isUnread || !String(url).startsWith("/api/names")) return answer;
    isUnread = false;
    return Response.json({ names: [], validated: [], pending: ["a"], errors: {}, gone: [], tokens: false });
  };
}
"""
SHOWN = {"What%20if": ("val/accuracy", "0 of 20 iterations saved"), "Curves": ("val/accuracy",)}


@pytest.fixture
def unread(chromium: Any) -> Iterator[None]:
    """The first answer of the server says that run "a" is still being read."""
    added = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": UNREAD})
    yield
    chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("view", SHOWN)
def test_a_page_shows_a_run_that_was_read_while_it_was_loaded(chromium: Any, tmp_path: Path, view: str):
    write_run(tmp_path / "a", [1.0, 0.5, 0.6, 0.7])
    with served(tmp_path) as address:
        show(chromium, address, view, "a")
        until(
            chromium, lambda: all(each in text(chromium) for each in SHOWN[view])
        )  # so that nothing of it changes any more
        chromium.get("about:blank")
        chromium.get(f"{address}#view={view}&run=a&unread")
        until(chromium, lambda: all(each in text(chromium) for each in SHOWN[view]))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("view", SHOWN)
def test_a_page_that_was_loaded_in_the_background_shows_a_run_that_was_read_meanwhile(
    chromium: Any, tmp_path: Path, view: str
):
    write_run(tmp_path / "a", [1.0, 0.5, 0.6, 0.7])
    with served(tmp_path) as address:
        chromium.get("about:blank")
        chromium.get(f"{address}#view={view}&run=a&unread&background")
        until(chromium, lambda: text(chromium).endswith("Reading a run for the first time ..."))
        chromium.execute_async_script("setTimeout(arguments[0], 200)")
        assert text(chromium, "#saved") == ""  # not an answer for no metric
        chromium.execute_script("window.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")
        until(chromium, lambda: all(each in text(chromium) for each in SHOWN[view]))


COUNTED = """
const real = window.fetch;
window.asked = [];
window.answers = [];
window.fetch = (url, options) => {
  if (!String(url).startsWith("/api/whatif")) return real(url, options);
  window.asked.push(new URLSearchParams(String(url).split("?")[1]).get("patience"));
  return new Promise((resolve) => window.answers.push(() => resolve(real(url, options))));
};
"""


def test_a_slider_that_moves_asks_once_at_a_time_and_then_for_its_last_value(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5, 0.6, 0.7])
    with served(tmp_path) as address:
        show(chromium, address, "What%20if", "a")
        until(chromium, lambda: text(chromium, "#saved") == "0 of 20 iterations saved")
        chromium.execute_script(COUNTED)  # an answer comes once it is called for
        for patience in (9, 8, 7, 1):
            chromium.execute_script(SLIDE, patience)
            chromium.execute_async_script("setTimeout(arguments[0], 120)")  # longer than the pause before a request
        assert chromium.execute_script("return window.asked") == ["9"]
        chromium.execute_script("window.answers.shift()()")
        until(chromium, lambda: chromium.execute_script("return window.asked") == ["9", "1"])
        chromium.execute_script("window.answers.shift()()")
        until(chromium, lambda: text(chromium, "#saved") == "5 of 20 iterations saved")


class GrowingLog:
    """A log to which iterations are added while the page is shown."""

    def __init__(self, folder: Path, iteration: int, rank: int = 0) -> None:
        facts = {"pid": os.getpid(), "processes": processes()}
        (folder / ".owner").write_text(json.dumps(facts))  # the run is going
        self._writer = LogWriter(folder / "events", rank, run=folder.name)
        self.iteration = iteration

    def add(self, event: str = "iteration_completed", **fields: Any) -> None:
        self.iteration += 1
        seq = self._writer.last_seq + 1
        at = {"epoch": 3, "iteration": self.iteration, "ord": seq, "seq": seq, "t": BEGUN + (100 + seq) * SECOND}
        self._writer.add(LoggedEvent(engine="trainer", event=event, **at, **fields))


def test_the_list_keeps_its_elements_and_the_focus_while_runs_change(chromium: Any, tmp_path: Path):
    for name in ("a", "b", "c"):
        write_run(tmp_path / name, [1.0, 0.5], end="completed" if name != "b" else None)
    log = GrowingLog(tmp_path / "b", 10)
    with served(tmp_path) as address:
        show(chromium, address, "Lineage", "a")
        until(chromium, lambda: text(chromium, '#runs li[data-run="b"]'))
        sort = chromium.find_element("css selector", "#sort")
        sort.find_element("css selector", "[value=updated]").click()
        item = chromium.find_element("css selector", '#runs li[data-run="b"]')
        box = item.find_element("css selector", "input")
        chromium.execute_script("arguments[0].focus()", box)
        before = item.text
        payload = {"metrics": {"val/loss": 0.25}, "seconds": 1.0}
        log.add("validation_completed", payload=payload)
        until(chromium, lambda: item.text != before)  # of an element that is gone, this is an error
        assert "val/loss 0.25" in item.text
        assert chromium.execute_script("return document.activeElement === arguments[0]", box)
        order = "return [...document.querySelectorAll('#runs li')].map(each => each.dataset.run)"
        assert chromium.execute_script(order) == ["a", "c", "b"]
        box.click()
        until(chromium, lambda: text(chromium, "#count") == "2 of 3")


def seqs(browser: Any) -> list[int]:
    rows = "return [...document.querySelectorAll('tbody tr')].map(row => Number(row.dataset.seq))"
    return [int(each) for each in browser.execute_script(rows)]


def test_events_of_each_rank_appear_while_a_run_trains(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5], end=None)
    log, other = GrowingLog(tmp_path / "a", 10), GrowingLog(tmp_path / "a", 10, rank=1)
    other.add("anomaly_detected", payload={"kind": "nan"})
    with served(tmp_path) as address:
        show(chromium, address, "Events", "a")
        until(chromium, lambda: seqs(chromium) == [*range(13)])
        log.add()
        until(chromium, lambda: seqs(chromium) == [*range(14)])
        assert "2026-09-21 " in text(chromium, "tbody tr")
        newest = next(each for each in chromium.find_elements("css selector", "label") if each.text == "newest first")
        newest.click()
        until(chromium, lambda: seqs(chromium) == [*reversed(range(14))])
        log.add()
        until(chromium, lambda: seqs(chromium) == [*reversed(range(15))])
        chromium.find_element("css selector", "[aria-label=Rank] option[value='1']").click()
        until(chromium, lambda: "anomaly_detected" in text(chromium, "tbody"))
        assert len(seqs(chromium)) == 1


def test_of_a_long_run_the_newest_events_come_first_and_the_others_with_more(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0] * 100, end=None)
    log = GrowingLog(tmp_path / "a", 500)
    with served(tmp_path) as address:
        show(chromium, address, "Events", "a")
        until(chromium, lambda: seqs(chromium) == [*range(200)])
        more = next(each for each in chromium.find_elements("css selector", "button") if each.text == "More")
        newest = next(each for each in chromium.find_elements("css selector", "label") if each.text == "newest first")
        newest.click()
        until(chromium, lambda: seqs(chromium) == [*reversed(range(401, 601))])
        log.add()
        until(chromium, lambda: seqs(chromium) == [*reversed(range(401, 602))])
        for number in (201, 1, 0):
            more.click()
            until(chromium, lambda: seqs(chromium) == [*reversed(range(number, 602))])  # noqa: B023
        assert not more.is_displayed()
        chromium.execute_script("arguments[0].click()", newest)  # the tabs cover it
        until(chromium, lambda: seqs(chromium) == [*range(200)])
        for number in (400, 600, 602):
            more.click()
            until(chromium, lambda: seqs(chromium) == [*range(number)])  # noqa: B023
        log.add()
        until(chromium, lambda: seqs(chromium) == [*range(603)])


def test_media_shows_the_newest_texts_and_pictures_of_a_run_that_trains(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0], end=None)
    (tmp_path / "a" / "notes.txt").write_text("first")
    log = GrowingLog(tmp_path / "a", 5)
    log.add("media_logged", payload={"name": "sample", "kind": "text", "value": "once upon"})
    with served(tmp_path) as address:
        show(chromium, address, "Media", "a")
        until(chromium, lambda: "once upon" in text(chromium))
        next(each for each in chromium.find_elements("css selector", "summary") if each.text == "notes.txt").click()
        until(chromium, lambda: "first" in text(chromium))
        (tmp_path / "a" / "notes.txt").write_text("second")
        log.add("media_logged", payload={"name": "sample", "kind": "text", "value": "a time"})
        until(chromium, lambda: "a time" in text(chromium) and "second" in text(chromium))  # it stays open
        assert "once upon" not in text(chromium)


def test_the_list_is_sorted_in_both_directions_with_runs_without_a_value_at_the_end(chromium: Any, tmp_path: Path):
    for name, losses in (("a", [0.5]), ("b", [2.0]), ("c", [1.0]), ("d", [])):
        write_run(tmp_path / name, losses)
    order = "return [...document.querySelectorAll('#runs li')].map(each => each.dataset.run).join('')"
    with served(tmp_path) as address:
        show(chromium, address, "Lineage", "a")
        until(chromium, lambda: chromium.execute_script(order) == "abcd")
        chromium.find_element("css selector", "#sort [value='val/loss']").click()
        until(chromium, lambda: chromium.execute_script(order) == "acbd")
        button = chromium.find_element("css selector", "#direction")
        button.click()
        assert chromium.execute_script(order) == "bcad"
        assert button.get_attribute("aria-pressed") == "true"
        button.click()
        assert chromium.execute_script(order) == "acbd"
