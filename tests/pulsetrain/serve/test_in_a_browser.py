"""The page in headless Chromium: real clicks on real runs, one of which trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulsetrain.cli import main
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.runs.tags import change_tags
from tests.pulsetrain.cli.test_cli_time_travel import CONFIG, MODULE
from tests.support.chromium import headless, needs_chromium, until
from tests.support.run_folders import BEGUN, SECOND, write_counting_run, write_run
from tests.support.served_page import CHART, chart, served, tab, text, train

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = list(needs_chromium)

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402

HOSTILE = "c<img src=x onerror=document.title=1>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, rate in (("a", 0.01), ("b", 0.1), (HOSTILE, 0.001)):
        assert train(root / name, 6, rate=rate).wait(timeout=120) == 0
    (root / "a" / "loss.png").write_bytes(bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8ffff3f0005fe02fe"
        "a735818d0000000049454e44ae426082"
    ))  # fmt: skip
    return root


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with served(root) as address:
        yield address


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with headless() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Any, address: str) -> Any:
    chromium.get("about:blank")
    chromium.get(address)
    until(chromium, lambda: chromium.find_elements("css selector", ".chart[data-points]"))
    yield chromium
    said = [line for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    assert not [line for line in said if "/api/" not in line["message"]]  # a refused question is answered by 400


def test_hostile_names_are_text(browser: Any):
    assert HOSTILE in text(browser, "#runs")
    assert browser.title == "Pulsetrain"
    assert not browser.find_elements("css selector", "#runs img")
    assert not browser.find_elements("css selector", ".chart img")


def test_runs_are_searched_selected_and_drawn(browser: Any):
    drawn = chart(browser, "val/loss")
    until(browser, lambda: int(drawn.get_attribute("data-points")) == 18)
    browser.find_element("css selector", '#runs li[data-run="b"] input').click()
    until(browser, lambda: int(chart(browser, "val/loss").get_attribute("data-points")) == 12)
    browser.find_element("css selector", "#search").send_keys("b")
    until(browser, lambda: len(browser.find_elements("css selector", "#runs li")) == 1)


def test_the_tags_of_a_run_are_listed(browser: Any, root: Path):
    change_tags(root / "a", added=["paper"])
    line = browser.find_element("css selector", '#runs li[data-run="a"]')
    until(browser, lambda: line.text.endswith("\npaper"))
    change_tags(root / "a", removed=["paper"])
    until(browser, lambda: "paper" not in line.text)


def test_a_condition_selects_and_a_wrong_one_says_why(browser: Any):
    box = browser.find_element("css selector", "#where")
    box.send_keys("training.learning_rate == 0.1")
    until(browser, lambda: len(browser.find_elements("css selector", "#runs li")) == 1)
    box.clear()
    box.send_keys("rate >")
    until(browser, lambda: "rate >" in text(browser, "#where-error"))


def test_a_zoom_of_one_chart_zooms_all(browser: Any):
    drawn = chart(browser, "loss, each iteration")
    ranges = "return [...document.querySelectorAll('.chart')].map(c => c.dataset.x).filter(Boolean).map(JSON.parse)"
    until(browser, lambda: len(browser.execute_script(ranges)) >= 3)
    area = drawn.find_element("css selector", ".area")
    move = ActionChains(browser).move_to_element_with_offset(area, -100, 0).click_and_hold()
    move.move_by_offset(100, 0).release().perform()

    def are_all(narrow: bool) -> bool:
        found = browser.execute_script(ranges)
        return len({tuple(each) for each in found}) == 1 and (found[0][1] - found[0][0] < 15) is narrow

    until(browser, lambda: are_all(narrow=True))
    lines = browser.execute_script("return arguments[0].lines.map(line => [...line.x])", drawn)
    low, high = browser.execute_script("return JSON.parse(arguments[0].dataset.x)", drawn)
    assert all(len([x for x in line if x < low]) == len([x for x in line if x > high]) == 1 for line in lines)
    ActionChains(browser).move_to_element(area).double_click().perform()
    until(browser, lambda: browser.execute_script("return JSON.parse(arguments[0].dataset.x)", drawn) == [1, 24])


def test_a_chart_below_the_window_is_drawn_once_it_is_seen(browser: Any, address: str):
    browser.set_window_size(500, 600)
    try:
        browser.get("about:blank")
        browser.get(address)
        chart(browser, "val/loss")
        last = "[...document.querySelectorAll('.chart')].at(-1)"
        assert browser.execute_script(f"return {last}.getBoundingClientRect().top > innerHeight + 100")
        assert browser.execute_script(f"return {last}.dataset.points") is None
        browser.execute_script(f"{last}.scrollIntoView()")
        until(browser, lambda: browser.execute_script(f"return {last}.dataset.points"))
    finally:
        browser.set_window_size(1400, 1100)


def test_the_nearest_point_is_named(browser: Any):
    drawn = chart(browser, "val/loss")
    until(browser, lambda: drawn.get_attribute("data-points") == "18")
    area = drawn.find_element("css selector", ".area")
    for step in range(0, area.size["height"], 20):  # the line's end is somewhere at the right edge
        ActionChains(browser).move_to_element_with_offset(
            area, area.size["width"] // 2 - 12, step - area.size["height"] // 2
        ).perform()
        if said := text(browser, ".tip"):
            break
    run, _, place = said.partition("\n")
    assert run in ("a", "b", HOSTILE)
    assert place.endswith(" at 24")


def test_a_chart_without_a_finite_value_ignores_the_pointer(browser: Any):
    said = browser.execute_async_script("""
        const done = arguments[arguments.length - 1];
        import("/chart.js").then(({ lineChart }) => {
          const { element, draw } = lineChart("none", () => {});
          document.getElementById("view").append(element);
          draw({ lines: [{ name: "a", color: "red", x: [1, 2], y: [NaN, NaN] }], range: null, log: false, xTitle: "" });
          const errors = [], area = element.querySelector(".area"), { left, top } = area.getBoundingClientRect();
          addEventListener("error", (event) => errors.push(event.message));
          area.dispatchEvent(new PointerEvent("pointermove", { clientX: left + 30, clientY: top + 30 }));
          done([element.dataset.x, element.dataset.y, errors]);
        });
    """)
    assert said == ["[1,2]", "null", []]


def test_smoothing_and_log_change_what_is_drawn(browser: Any):
    drawn = chart(browser, "loss, each iteration")
    values = "return [...arguments[0].lines[0].y.slice(0, 5)]"
    before, axis = browser.execute_script(values, drawn), drawn.get_attribute("data-y")
    slider = "document.getElementById('smoothing')"
    browser.execute_script(f"{slider}.value = 0.9; {slider}.dispatchEvent(new Event('input'))")
    until(browser, lambda: browser.execute_script(values, drawn) != before)
    browser.find_element("css selector", "#log").click()
    until(browser, lambda: drawn.get_attribute("data-y") != axis)
    assert min(json.loads(drawn.get_attribute("data-y"))) > 0


def test_the_axis_of_a_constant_is_near_its_value(browser: Any):
    box = "[...document.querySelectorAll('#runs li')].find(e => e.dataset.run === arguments[0]).querySelector('input')"
    for other in ("b", HOSTILE):
        browser.execute_script(f"{box}.click()", other)
    until(browser, lambda: browser.find_elements("css selector", '.chart[data-metric="learning_rate"]'))
    browser.execute_script("document.querySelector('.chart[data-metric=learning_rate]').scrollIntoView()")
    drawn = chart(browser, "learning_rate")
    until(browser, lambda: json.loads(drawn.get_attribute("data-y")) == pytest.approx([0.009, 0.011]))


def test_long_names_and_control_characters_do_not_break_the_page(chromium: Any, tmp_path: Path):
    for name in ("long-" + "x" * 200, "ctl-\x1b[31m\u202eabc"):
        write_run(tmp_path / name, [1.0, 0.5])
    chromium.set_window_size(500, 900)
    try:
        with served(tmp_path) as address:
            chromium.get(address)
            until(chromium, lambda: chart(chromium, "val/loss").get_attribute("data-runs") == "2")
            assert "ctl-\\u{1b}[31m\\u{202e}abc" in text(chromium, "#runs")
            for name in ("Curves", "Timeline", "Events", "Compare", "What if", "Media", "Processes"):
                tab(chromium, name)
                until(chromium, lambda: text(chromium) or chromium.find_elements("css selector", ".chart .trace"))
                for wide in ("document.documentElement", "document.querySelector('main')"):
                    assert chromium.execute_script(f"return {wide}.scrollWidth <= {wide}.clientWidth"), name
    finally:
        chromium.set_window_size(1400, 1100)


def colors(browser: Any) -> dict[str, str]:
    """The color of each selected run, of which all runs that are not selected have the same."""
    items = "[...document.querySelectorAll('#runs li')].map(e => [e.dataset.run, e.querySelector('input').checked, "
    found = browser.execute_script(f"return {items} getComputedStyle(e.querySelector('.dot')).backgroundColor])")
    others = {color for _, selected, color in found if not selected}
    assert len(others) == 1
    chosen = {run: color for run, selected, color in found if selected}
    assert not others & {*chosen.values()}
    return chosen


def test_selected_runs_have_different_colors(chromium: Any, tmp_path: Path):
    names = [f"r{number:02}" for number in range(25)]
    for name in names:
        write_run(tmp_path / name, [1.0, 0.5])

    def click(name: str) -> None:
        chromium.execute_script(f"document.querySelector('#runs li[data-run={name}] input').click()")

    def is_drawn(runs: int) -> bool:
        return bool(chromium.execute_script(f"return {CHART}?.dataset.runs", "val/loss") == str(runs))

    with served(tmp_path) as address:
        chromium.get("about:blank")
        chromium.get(f"{address}#view=Curves&run=r03&run=r13&run=r23")
        until(chromium, lambda: is_drawn(3))
        first = colors(chromium)
        assert len({*first.values()}) == len(first) == 3
        drawn = chromium.execute_script(f"return {CHART}.lines.map(line => line.color)", "val/loss")
        assert len({*drawn}) == 3
        click("r03")
        click("r07")
        click("r08")
        second = colors(chromium)
        assert len({*second.values()}) == len(second) == 4
        assert {run: second[run] for run in ("r13", "r23")} == {run: first[run] for run in ("r13", "r23")}
        until(chromium, lambda: "run=r08" in chromium.current_url)
        chromium.refresh()
        until(chromium, lambda: is_drawn(4))
        assert colors(chromium) == second
        for name in names[14:23]:  # more than there are colors
            click(name)
        for name in names[14:20]:
            click(name)
        last = colors(chromium)
        assert len({*last.values()}) == len(last) == 7


def test_tables_and_differences_fit_a_narrow_window(chromium: Any, root: Path, address: str):
    chromium.set_window_size(500, 900)
    try:
        chromium.get("about:blank")
        chromium.get(f"{address}#view=Compare&run=a&run=b")
        until(chromium, lambda: "training.learning_rate" in text(chromium))
        style = "getComputedStyle(document.getElementById('difference'))"
        assert chromium.execute_script(f"return [{style}.whiteSpace, {style}.overflowX]") == ["pre", "auto"]
        for name in ("Compare", "Events"):
            tab(chromium, name)
            until(chromium, lambda: len(chromium.find_elements("css selector", "tbody tr")) > 5)
            fits = "const e = document.querySelector('.scroll'); return e.scrollWidth <= e.clientWidth"
            assert chromium.execute_script(fits), name
    finally:
        chromium.set_window_size(1400, 1100)


def test_runs_without_token_counts_are_named(chromium: Any, tmp_path: Path):
    write_counting_run(tmp_path / "counting")
    for name in ("old", "older"):
        write_run(tmp_path / name, [1.0, 0.5])
    with served(tmp_path) as address:
        chromium.get(address)
        until(chromium, lambda: chart(chromium, "loss, each iteration").get_attribute("data-runs") == "3")
        axis = chromium.find_element("css selector", '[aria-label="X axis"]')
        axis.find_element("css selector", "[value=tokens]").click()
        said = until(chromium, lambda: text(chromium, "#omitted"))
        assert said.startswith("Without 2 of 3 runs, whose logs have no token counts: old, older.")
        assert chart(chromium, "loss, each iteration").get_attribute("data-runs") == "1"
        axis.find_element("css selector", "[value=iteration]").click()
        until(chromium, lambda: chart(chromium, "loss, each iteration").get_attribute("data-runs") == "3")
        assert text(chromium, "#omitted") == ""


def test_every_view_shows_the_runs(browser: Any):
    tab(browser, "Timeline")
    until(browser, lambda: len(browser.find_elements("css selector", ".chart .trace")) >= 6)
    tab(browser, "Events")
    until(browser, lambda: "iteration_completed" in text(browser, "tbody"))
    browser.find_element("css selector", '[aria-label="Condition on events"]').send_keys(
        "iteration > 22 and epoch == 6"
    )
    until(
        browser, lambda: "iteration_completed" in text(browser, "tbody") and "started\ttrainer\t0" not in text(browser)
    )
    tab(browser, "Compare")
    until(browser, lambda: "differ after" in text(browser))
    assert "training.learning_rate" in text(browser)
    tab(browser, "What if")
    until(browser, lambda: "iterations saved" in text(browser))
    slider = "document.getElementById('patience')"
    browser.execute_script(f"{slider}.value = 50; {slider}.dispatchEvent(new Event('input'))")
    until(browser, lambda: text(browser, "#saved") == "0 of 72 iterations saved")
    assert text(browser, "tbody").count("nowhere") == 3
    browser.find_element("css selector", '[aria-label="Handler"] option[value=LossSpikeGuard]').click()
    until(browser, lambda: text(browser, "thead").startswith("run\tspikes"))
    tab(browser, "Media")
    until(browser, lambda: browser.execute_script("return document.querySelector('figure img')?.naturalWidth") == 1)
    tab(browser, "Lineage")
    until(browser, lambda: "No listed run was forked" in text(browser))
    tab(browser, "Sweeps")
    until(browser, lambda: "There is no sweep in this folder" in text(browser))
    tab(browser, "Processes")
    until(browser, lambda: "the run has ended" in text(browser))


def test_a_fork_is_shown_below_its_run_with_its_changes(chromium: Any, tmp_path: Path):
    (tmp_path / "small_parts.py").write_text(MODULE)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    runs = tmp_path / "runs"
    assert main(["train", str(tmp_path / "config.yaml"), "--run", str(runs / "a")]) == 0
    words = ["--set", "training.learning_rate=0.02", "--set", "training.max_epochs=4"]
    assert main(["fork", str(runs / "a"), "--at", "20", "--into", str(runs / "b"), *words]) == 0
    with served(runs) as address:
        chromium.get("about:blank")
        chromium.get(f"{address}#view=Lineage")
        shown = until(chromium, lambda: text(chromium, ".tree .tree"))
        assert shown == "b at iteration 16: training.learning_rate: 0.01 -> 0.02; training.max_epochs: 3 -> 4"
        assert text(chromium, ".tree").startswith("a val/loss 0.")
        assert text(chromium, "#view-error") == ""


LATE = """
const real = window.fetch;
window.fetch = (url, options) => {
  if (!String(url).startsWith("/api/events")) return real(url, options);
  window.fetch = real;
  return new Promise((resolve) => {
    window.answer = (done) => real(url, options).then((response) => {
      const read = response.json.bind(response);
      response.json = async () => { const found = await read(); setTimeout(done); return found; };
      resolve(response);
    });
  });
};
"""


def test_a_late_answer_does_not_replace_that_of_a_later_question(browser: Any):
    tab(browser, "Events")
    until(browser, lambda: "iteration_completed" in text(browser, "tbody"))
    browser.execute_script(LATE)  # the next question is answered once `answer` is called
    for kind in ("iteration_started", "validation_completed"):
        browser.find_element("css selector", f"[aria-label=Type] option[value={kind}]").click()
    until(browser, lambda: "iteration_started" not in text(browser, "tbody"))
    shown = text(browser, "tbody")
    assert "validation_completed" in shown
    browser.execute_async_script("window.answer(arguments[0])")
    assert text(browser, "tbody") == shown


def test_a_run_that_trains_is_drawn_while_it_does(browser: Any, root: Path):
    training = train(root / "live", 2000, pause=0.05)  # it is killed
    try:
        until(browser, lambda: browser.find_elements("css selector", '#runs li[data-run="live"]'), 60)
        browser.find_element("css selector", '#runs li[data-run="live"] input').click()

        def newest() -> float:
            newest = "filter(line => line.name === 'live').map(line => line.x.at(-1))"
            script = f"return Math.max(...({CHART}?.lines ?? []).{newest}, 0)"
            return float(browser.execute_script(script, "loss, each iteration"))

        until(browser, lambda: newest() > 24)  # further than the other runs
        before = newest()
        until(browser, lambda: newest() > before + 10)
        assert "running" in text(browser, "#runs")
    finally:
        training.kill()
        training.wait()
    until(browser, lambda: "killed" in text(browser, '#runs li[data-run="live"]'), 60)


def test_a_trial_of_a_sweep_leads_to_its_curves(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("optuna", reason="optuna is not installed")
    from tests.pulsetrain.sweep.test_sweep_pictures import add_trials, spec_of

    add_trials(spec_of(tmp_path, "val/loss", monkeypatch, "<b>sweep"), 2)
    for number in range(2):
        write_run(tmp_path / "<b>sweep" / "trials" / f"{number:04}", [1.0, 0.5])
    with served(tmp_path) as address:
        chromium.get(f"{address}#view=Sweeps")
        until(chromium, lambda: text(chromium, "h2") == "<b>sweep")
        assert "2 completed, 1 failed; the best is trial 1: val/loss 0.5" in text(chromium, ".summary")
        assert "<script>alert(1)</script>" in text(chromium)
        until(chromium, lambda: chromium.find_elements("css selector", ".chart .trace"))
        chromium.find_element("css selector", "button.link").click()
        until(chromium, lambda: chart(chromium, "val/loss").get_attribute("data-points") == "2")
        selected = "return [...document.querySelectorAll('#runs li')].filter(e => e.querySelector('input').checked)"
        assert chromium.execute_script(f"{selected}.map(e => e.dataset.run)") == ["<b>sweep/trials/0001"]


def test_the_sweeps_are_read_again_while_their_runs_never_rest(chromium: Any, address: str):
    chromium.get(address)
    chromium.set_script_timeout(30)
    asked = chromium.execute_async_script(
        """const done = arguments[0], real = window.fetch;
        let asked = 0;
        window.fetch = (...words) => { asked += String(words[0]).includes("sweeps"); return real(...words); };
        import("/sweeps.js").then(({ sweeps }) => {
          const view = sweeps(document.createElement("div"), {});
          const changes = setInterval(view.update, 100);
          setTimeout(() => { clearInterval(changes); window.fetch = real; done(asked); }, 3500);
        });"""
    )
    assert 2 <= asked <= 5


def test_a_run_that_is_removed_while_it_is_shown_leaves_the_others(browser: Any, root: Path):
    shutil.copytree(root / "a", root / "gone")
    until(browser, lambda: browser.find_elements("css selector", '#runs li[data-run="gone"]'), 60)
    browser.find_element("css selector", '#runs li[data-run="gone"] input').click()
    until(browser, lambda: int(chart(browser, "val/loss").get_attribute("data-points")) >= 24, 60)
    shutil.rmtree(root / "gone")
    until(browser, lambda: not browser.find_elements("css selector", '#runs li[data-run="gone"]'), 60)
    until(browser, lambda: "gone" not in browser.current_url)
    browser.find_element("css selector", '#runs li[data-run="b"] input').click()
    names = f"return ({CHART}?.lines ?? []).map(each => each.name)"
    until(browser, lambda: "b" not in (found := browser.execute_script(names, "val/loss")) and found)
    assert text(browser, "#view-error") == ""


def test_a_page_of_runs_that_are_gone_forgets_them(browser: Any, address: str):
    browser.get("about:blank")
    browser.get(f"{address}#view=Curves&run=never&run=a")
    until(browser, lambda: int(chart(browser, "val/loss").get_attribute("data-points")) == 6)
    until(browser, lambda: "never" not in browser.current_url)


def test_more_tabs_than_a_browser_has_connections(chromium: Any, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5])
    first = chromium.current_window_handle
    with served(tmp_path) as address:
        try:
            chromium.get(address)
            for _ in range(8):
                until(chromium, lambda: text(chromium, "#state") == "live")
                assert len(chromium.find_elements("css selector", "#runs li")) == 1
                chromium.switch_to.new_window("tab")
                chromium.get(address)
            writer = LogWriter(tmp_path / "a" / "events")
            at = {"epoch": 3, "iteration": 11, "seq": 1000, "t": BEGUN + 1000 * SECOND}
            writer.add(LoggedEvent(1000, "trainer", "iteration_completed", output={"loss": 1.0}, **at))
            writer.close()
            write_run(tmp_path / "b", [1.0])
            for window in (chromium.current_window_handle, first):  # which was hidden while they changed
                chromium.switch_to.window(window)
                until(chromium, lambda: chromium.find_elements("css selector", '#runs li[data-run="b"]'))
                until(chromium, lambda: chart(chromium, "loss, each iteration").get_attribute("data-points") == "11")
        finally:
            for each in chromium.window_handles:
                if each != first:
                    chromium.switch_to.window(each)
                    chromium.close()
            chromium.switch_to.window(first)


def test_nothing_is_asked_of_another_machine(browser: Any, address: str):
    names = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert names
    assert all(name.startswith((address, "data:")) for name in names)


def test_without_javascript_the_page_says_what_to_do(chromium: Any, address: str):
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get("about:blank")
        chromium.get(address)
        said = chromium.find_element("css selector", "body").text
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "This page needs JavaScript. Without it: pulsetrain runs lists the runs" in said
    assert "Curves" not in said
    assert not chromium.find_element("css selector", "#search").is_displayed()


def test_the_server_says_so_when_it_is_gone(chromium: Any, root: Path):
    words = [sys.executable, "-m", "pulsetrain", "serve", str(root), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        chromium.get(server.stdout.readline().rpartition(": ")[2].strip())
        until(chromium, lambda: "live" in text(chromium, "#state"))
        server.terminate()
        assert server.wait(timeout=60) is not None
    until(chromium, lambda: "connection lost" in text(chromium, "#state"))
