"""The screen of `pulsetrain watch`, driven by keys."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import Input, Static

from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.watch.app import WatchApp
from pulsetrain.watch.watched import Watched, watch_runs
from pulsetrain.watch.widgets import CurveGrid, CurveView, EventList
from tests.pulsetrain.runs.test_live import Writing
from tests.pulsetrain.runs.test_summary import own

Script = Callable[[WatchApp, Pilot[None]], Awaitable[None]]


def drive(runs: list[Watched], script: Script, size: tuple[int, int] = (150, 50), where: str = "") -> None:
    """Run the script beside the application, which polls often."""

    async def main() -> None:
        app = WatchApp(runs, where, poll=0.05)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.screen.is_attached and bool(app.query(EventList)))
            await script(app, pilot)

    asyncio.run(main())


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Wait until the condition holds; fail if it does not within ten seconds."""
    for _ in range(500):
        await pilot.pause(0.02)
        if holds():
            return
    raise AssertionError(screen(pilot.app))


def screen(app: object) -> str:
    """The characters on the screen."""
    lines = app.screen._compositor.render_strips()  # type: ignore[attr-defined]
    return "\n".join(strip.text for strip in lines)


def a_run(folder: Path, last: int = 300) -> Writing:
    log = Writing(folder)
    own(folder, os.getpid())
    log.add("started", payload={"total_iterations": 1000, "max_epochs": 2})
    log.train(1, last)
    return log


def test_it_shows_a_run_and_follows_it(tmp_path: Path):
    log = a_run(tmp_path / "run")

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "iteration 300/1,000" in screen(app))
        shown = screen(app)
        for text in ("● run", "30%", "val/loss  1.003", "300, 0.0 MB", "anomalies", "80 samples/s"):
            assert text in shown
        log.train(301, 302)
        log.add("anomaly_detected", 302, payload={"kind": "loss_spike", "value": 7.5, "batch_indices": [4]})
        await until(pilot, lambda: "iteration 302/1,000" in screen(app))
        await until(pilot, lambda: "loss_spike: 7.5, batch rows 4" in screen(app))

    drive(watch_runs([tmp_path / "run"]), script)


def test_space_pauses_and_continues(tmp_path: Path):
    log = a_run(tmp_path / "run")

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "iteration 300/1,000" in screen(app))
        await pilot.press("space")
        log.train(301, 310)
        await pilot.pause(0.3)
        assert "paused, while the runs continue" in screen(app)
        assert "iteration 300/1,000" in screen(app)
        await pilot.press("space")
        await until(pilot, lambda: "iteration 310/1,000" in screen(app))
        assert "paused" not in screen(app)

    drive(watch_runs([tmp_path / "run"]), script)


def test_arrow_keys_scroll_the_curves_and_tab_moves_on(tmp_path: Path):
    log = a_run(tmp_path / "run")

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        curves = app.query_one(CurveGrid)
        await until(pilot, lambda: len(app.query(CurveView)) == 5 and curves.max_scroll_y > 0)
        assert app.focused is curves
        await pilot.press("pagedown")
        await until(pilot, lambda: curves.scroll_offset.y > 0)
        await pilot.press("home")
        await until(pilot, lambda: curves.scroll_offset.y == 0)
        await pilot.press("tab", "tab")
        events = app.query_one(EventList)
        assert app.focused is events
        await until(pilot, lambda: events.scroll_offset.y == events.max_scroll_y > 0)
        await pilot.press("pageup", "pageup")
        await until(pilot, lambda: not events.follows)
        top = events.line(events.scroll_offset.y)
        log.train(301, 310)
        await until(pilot, lambda: events.events[-1][1].event.iteration == 310)
        assert events.line(events.scroll_offset.y) == top
        await pilot.press("end")
        await until(pilot, lambda: events.follows)
        log.train(311, 320)
        await until(pilot, lambda: "      320  " in screen(app) and events.scroll_offset.y == events.max_scroll_y)

    drive(watch_runs([tmp_path / "run"]), script, size=(100, 40))


def test_a_filter_selects_events_and_a_wrong_one_is_explained(tmp_path: Path):
    log = a_run(tmp_path / "run")

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        events = app.query_one(EventList)
        await until(pilot, lambda: len(events.events) > 400)
        await pilot.press("slash")
        field = app.query_one("#condition", Input)
        assert app.focused is field
        field.value = "evnt == 3"
        await pilot.press("enter")
        await until(pilot, lambda: "no field 'evnt'; did you mean 'event'?" in screen(app))
        field.value = 'event == "validation_completed"'
        await pilot.press("enter")
        await until(pilot, lambda: len(events.events) == 3)
        assert "did you mean" not in screen(app)
        assert all("validation_completed" in events.line(number) for number in range(3))
        log.train(301, 400)
        await until(pilot, lambda: len(events.events) == 4)
        await pilot.press("slash")
        field.value = "q is what"  # the keys of the screen are text here
        await pilot.press("q", "space", "escape")
        assert field.value == 'event == "validation_completed"'
        assert not app.is_paused
        await pilot.press("slash")
        field.value = ""
        await pilot.press("enter")
        await until(pilot, lambda: len(events.events) > 400)

    drive(watch_runs([tmp_path / "run"]), script)


def test_a_condition_from_the_beginning(tmp_path: Path):
    a_run(tmp_path / "run")
    where = 'event == "checkpoint_saved"'

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(app.query_one(EventList).events) == 3)
        assert app.query_one("#condition", Input).value == where

    drive(watch_runs([tmp_path / "run"], predicate(where)), script, where=where)


def test_runs_are_compared_in_one_curve_or_shown_one_by_one(tmp_path: Path):
    a_run(tmp_path / "a")
    a_run(tmp_path / "b", last=200)

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(app.query(CurveView)) == 5)
        view = app.query(CurveView).first()
        assert [each.name for _, each in view.runs] == ["a", "b"]
        await until(pilot, lambda: "val/loss  1.003  1.005" in screen(app))
        await pilot.press("c")
        await until(pilot, lambda: [each.name for _, each in view.runs] == ["a"])
        await pilot.press("n")
        await until(pilot, lambda: [each.name for _, each in view.runs] == ["b"])
        await until(pilot, lambda: "○ a" in screen(app) and "● b" in screen(app))
        await pilot.press("c")
        await until(pilot, lambda: len(view.runs) == 2)
        view = app.query(CurveView)[1]  # whose values differ a hundredfold
        before = view.render().plain
        await pilot.press("l")
        await until(pilot, lambda: view.render().plain != before)

    drive(watch_runs([tmp_path / "a", tmp_path / "b"]), script)


def test_a_run_that_begins_disappears_and_comes_back(tmp_path: Path):
    folder = tmp_path / "run"

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "is not there yet; waiting for it" in screen(app))
        a_run(folder)
        await until(pilot, lambda: "iteration 300/1,000" in screen(app))
        assert not app.query_one("#problems", Static).display
        shutil.rmtree(folder)
        await until(pilot, lambda: "has disappeared" in screen(app))
        a_run(folder, last=7)
        await until(pilot, lambda: "iteration 7/1,000" in screen(app))

    drive(watch_runs([folder]), script)


def test_a_damaged_log_and_a_newer_one_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = a_run(tmp_path / "a", last=900)
    sealed, _ = log.writer.files
    content = bytearray(sealed.read_bytes())
    content[len(content) // 2] ^= 1
    sealed.write_bytes(content)
    monkeypatch.setattr("pulsetrain.engine.recording.log.writer.FORMAT", 3)
    a_run(tmp_path / "b", last=900)

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "damaged log: events.jsonl.zst" in screen(app))
        await until(pilot, lambda: "has format 3, and this version reads up to 2" in screen(app))

    drive(watch_runs([tmp_path / "a", tmp_path / "b"]), script)


def test_hostile_names_and_texts_are_text(tmp_path: Path):
    hostile = "[red]x[/red]\x1b[31m\x1b]0;owned\x07"
    folder = tmp_path / "[bold]run"
    log = a_run(folder)
    log.add("metrics_logged", 300, payload={"metrics": {hostile: 1.0}})
    log.add("handler_failed", 300, payload={"handler": hostile, "event": "[/]", "error": hostile})

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: r"[red]x[/red]\x1b[31m\x1b]0;owned\x07  1" in screen(app))
        shown = screen(app)
        assert "● [bold]run" in shown
        assert r"handler [red]x[/red]\x1b[31m" in shown
        assert "\x1b" not in shown

    drive(watch_runs([folder]), script, size=(220, 100))


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (250, 80)])
def test_it_fits_terminals_of_any_size(size: tuple[int, int], tmp_path: Path):
    a_run(tmp_path / "run")

    async def script(app: WatchApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "● run" in screen(app))
        await pilot.resize_terminal(90, 30)
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)

    drive(watch_runs([tmp_path / "run"]), script, size=size)
