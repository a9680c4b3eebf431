"""The report's page in headless Chromium: drawing, mouse and buttons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.report import write_report
from tests.support.chromium import headless, needs_chromium, until

pytest.importorskip("plotly", reason="plotly is not installed")
pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = list(needs_chromium)

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402

T = 1_763_000_000_000_000_000
ITERATIONS, SPIKE = 30_000, 7_777
NAMES = ("first", "<script>alert(1)<")


def write_run(folder: Path, shift: float) -> Path:
    writer = LogWriter(folder / "events")

    def add(event: str, iteration: int, **fields: Any) -> None:
        seq = writer.last_seq + 1
        logged = LoggedEvent(seq, "trainer", event, 1, iteration, seq=seq, t=T + iteration * 10**7, **fields)
        writer.add(logged)

    add("started", 0)
    for n in range(1, ITERATIONS + 1):
        loss = 9.0 if n == SPIKE else 1 + shift + math.exp(-n / 5000) + 0.1 * math.sin(n * n)
        add("iteration_completed", n, output={"loss": loss if n != 20_000 else "NaN"}, lr=[1e-3])
        if n % 5000 == 0:
            add("validation_completed", n, payload={"metrics": {"val/loss": loss}, "seconds": 1.0})
    add("terminate", ITERATIONS, payload={"reason": "EarlyStopping: no gain"})
    writer.end()
    writer.close()
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / name, 0.5 * index) for index, name in enumerate(NAMES)]
    return write_report(runs, folder / "report.html").path


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with headless() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Any, page: Path) -> Any:
    chromium.get(page.as_uri())
    until(chromium, lambda: chromium.find_elements("css selector", ".scatterlayer .trace"))
    return chromium


def over(browser: Any, subplot: str, right: float) -> Any:
    """Move the mouse over a panel, to this distance from its left edge."""
    panel = browser.find_element("css selector", f".nsewdrag[data-subplot={subplot}]")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", panel)
    at = int(panel.rect["width"] * (right - 0.5))
    ActionChains(browser).move_to_element_with_offset(panel, at, 0).move_by_offset(1, 0).perform()
    return panel


def hovered(browser: Any) -> str:
    # Chromium may ignore the first move right after a page has loaded
    ActionChains(browser).move_by_offset(1, 0).perform()
    script = "return [...document.querySelectorAll('.hoverlayer text')].map(each => each.textContent).join(' | ')"
    return browser.execute_script(script)


def opacities(browser: Any) -> list[str]:
    """The lines of the panel with each iteration's loss, as they are drawn."""
    script = "return [...document.querySelectorAll('.subplot.x2y2 .scatterlayer .trace')].map(e => e.style.opacity)"
    return browser.execute_script(script)


def ranges(browser: Any) -> list[list[float]]:
    script = (
        "const layout = document.querySelector('.js-plotly-plot')._fullLayout;"
        "return Object.keys(layout).filter(k => /^xaxis/.test(k)).map(k => layout[k].range.map(Number))"
    )
    return browser.execute_script(script)


def press(browser: Any, label: str) -> None:
    buttons = browser.find_elements("css selector", ".updatemenu-button")
    next(button for button in buttons if button.text == label).click()


def test_every_curve_is_drawn_with_its_spike(browser):
    for subplot, runs in (("x2y2", 2), ("x3y3", 2), ("x4y4", 2)):
        paths = browser.find_elements("css selector", f".subplot.{subplot} .scatterlayer path.js-line")
        drawn = [path for path in paths if len(path.get_attribute("d")) > 20]
        assert len(drawn) >= runs
    heights = browser.execute_script(
        "return [...document.querySelectorAll('.subplot.x2y2 .scatterlayer .trace')].map(e => e.getBBox().height)"
    )
    assert max(heights) > 3 * min(heights), "a spike of one iteration among 30,000 is as high as it was"
    assert len(browser.find_elements("css selector", ".subplot.xy .scatterlayer .points path")) > 10


def test_hovering_shows_the_values_with_iteration_and_run(browser):
    over(browser, "x3y3", 0.5)
    text = until(browser, lambda: hovered(browser))
    assert "iteration 15,000" in text
    assert "first : 1." in text
    assert "<script>alert(1)< : 1." in text


def test_hovering_over_the_timeline_shows_what_happened(browser):
    over(browser, "xy", 0.935)
    text = until(browser, lambda: "stopped" in (found := hovered(browser)) and found)
    assert "first : stopped: EarlyStopping: no gain" in text


def test_the_buttons_change_how_smooth_the_curves_are(browser):
    before = opacities(browser)
    seen = {}
    for label in ("no smoothing", "strong", "light"):
        press(browser, label)
        seen[label] = opacities(browser)
    assert seen["no smoothing"] == ["1", "0", "0"] * 2
    assert seen["strong"] == ["0.22", "0", "1"] * 2
    assert seen["light"] == ["0.22", "1", "0"] * 2 == before


def test_the_values_can_be_seen_on_a_logarithmic_scale(browser):
    press(browser, "log")
    scale = "return document.querySelector('.js-plotly-plot')._fullLayout.yaxis2.type"
    until(browser, lambda: browser.execute_script(scale) == "log")


def test_zooming_into_one_panel_zooms_all(browser):
    before = ranges(browser)
    assert len(before) == 4
    panel = over(browser, "x2y2", 0.3)
    ActionChains(browser).click_and_hold().move_by_offset(int(panel.rect["width"] * 0.3), 0).release().perform()
    after = until(browser, lambda: ranges(browser) != before and ranges(browser))
    assert all(each == after[0] for each in after)
    assert after[0][1] - after[0][0] < 0.5 * (before[0][1] - before[0][0])


def test_the_legend_hides_a_run_everywhere_and_smoothing_does_not_bring_it_back(browser):
    count = "return document.querySelectorAll('.subplot.x2y2 .scatterlayer .trace').length"
    assert browser.execute_script(count) == 6
    browser.find_elements("css selector", ".legend .legendtoggle")[0].click()
    until(browser, lambda: browser.execute_script(count) == 3)
    press(browser, "strong")
    assert browser.execute_script(count) == 3


def test_nothing_is_loaded_from_the_network_and_no_error_is_logged(browser):
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert browser.get_log("browser") == []
    titles = browser.find_elements("css selector", ".modebar-btn")
    assert not [each for each in titles if "Share" in (each.get_attribute("data-title") or "")]


def test_the_page_follows_the_preference_for_dark(browser):
    look = "[document.body, document.querySelector('.js-plotly-plot')].map(e => getComputedStyle(e))"
    looks = f"const [page, figure] = {look}; return [page.backgroundColor, figure.filter]"
    for preference, found in (
        ("dark", ["rgb(17, 24, 39)", "invert(1) hue-rotate(180deg)"]),
        ("light", ["rgb(243, 244, 246)", "none"]),
    ):
        wanted = {"features": [{"name": "prefers-color-scheme", "value": preference}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
        assert browser.execute_script(looks) == found


def test_the_tool_bar_does_not_cover_the_legend_of_a_narrow_page(browser):
    browser.set_window_size(500, 900)
    places = "['.modebar', '.legend'].map(each => document.querySelector(each).getBoundingClientRect())"
    apart = f"const [bar, legend] = {places}; return bar.bottom <= legend.top || bar.left >= legend.right"
    try:
        until(browser, lambda: browser.execute_script(apart))
    finally:
        browser.set_window_size(1400, 1100)
