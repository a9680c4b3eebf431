"""The recorder writes whatever a run fires, never stops the run, and loses nothing before a kill."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulsetrain.engine.recording import EventLog
from tests.support.recordings_programs import Driver, Expected, Plan, check_ords, model, plans, shown
from tests.support.recordings_values import SAMPLED

common = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(autouse=True, scope="module")
def _engines_continue_a_log() -> Iterator[None]:
    """As a Trainer does that resumes; a new run of a plain Engine is refused in a folder that holds one."""
    with mock.patch("pulsetrain.handlers.run_files.ownership.holds_run", return_value=False):
        yield


@pytest.mark.slow
@settings(max_examples=120, **common)  # type: ignore[arg-type]
@given(plan=plans())
def test_whatever_is_fired_is_read_back_as_the_rules_say(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as name:
        driver = Driver(plan, Path(name))
        driver.run()
        log = EventLog(name)
        found = list(log.read())
        assert [shown(each) for each in found] == [model(each) for each in driver.expected]
        assert [each.seq for each in found] == [each.event.seq for each in driver.expected]
        assert [each for each in found if each.open] == []
        check_ords(found)
        assert (log.verify(), log.ended or not found) == ([], True)


@pytest.mark.slow
@settings(max_examples=25, **common)  # type: ignore[arg-type]
@given(several=st.lists(plans(max_bytes=st.integers(1, 2000)), min_size=3, max_size=4))
def test_within_a_budget_only_iterations_own_events_are_missing(several: list[Plan]) -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch("pulsetrain.handlers.recorder.event_recorder.LEAST_BYTES", 1),
    ):
        expected: list[Expected] = []
        for plan in several:
            driver = Driver(plan, Path(name))
            driver.run()
            expected += driver.expected
        log = EventLog(name)
        everything = list(log.read(superseded=True))
        found = [shown(each) for each in everything if not each.event.startswith("log_")]
        taken = sum(each.payload["events"] for each in everything if each.event == "log_thinned")
        assert len(found) == len(expected) - taken
        rest = iter(map(model, expected))
        assert all(each in rest for each in found), "in the order in which they came"
        kept = [model(each) for each in expected if each.event.type not in SAMPLED]
        assert [each for each in found if json.loads(each)[1] not in SAMPLED] == kept
        assert log.verify() == []


CLOSED_LATER = ("epoch_completed", "validation_completed", "completed", "terminate", "interrupt")  # by a second line


@pytest.mark.slow
@settings(max_examples=60, **common)  # type: ignore[arg-type]
@given(plan=plans(), second=plans(), data=st.data())
def test_a_run_killed_anywhere_leaves_the_events_before_and_the_next_continues(
    plan: Plan, second: Plan, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        killed, stop = Path(name) / "killed", data.draw(st.integers(1, 40))
        before: list[tuple[Expected, str, bool]] = []

        def look(driver: Driver) -> None:
            if len(driver.expected) >= stop and not killed.exists():
                shutil.copytree(Path(name) / "run" / "events", killed / "events")
                before.extend((each, model(each), each.over) for each in driver.expected)

        driver = Driver(plan, Path(name) / "run", look)
        driver.run()
        if not killed.exists():
            return
        tail = killed / "events" / "tail.jsonl"
        size = tail.stat().st_size
        content = tail.read_bytes().rstrip(b"\n")
        cut = round(data.draw(st.just(1.0) | st.floats(0, 1)) * len(content))  # it differs by the digits of times
        tail.write_bytes(content[:cut] + b"\n" * (size - cut))
        lines = [line and json.loads(line).get("seq") for line in content.split(b"\n")]  # the tail's first has no seq
        ends = [at for at, byte in enumerate(content + b"\n") if byte == ord("\n")]
        left = {seq for seq, end in zip(lines, ends, strict=True) if end <= cut}
        rest = content[:cut].rstrip(b"\n")
        log = EventLog(killed)
        found = {each.seq: each for each in log.read()}
        ended = log.ended  # its tail holds nothing
        sealed = {seq for header in log.headers for seq in range(header.seq[0], header.seq[1] + 1)}
        known = {each.event.seq for each, *_ in before}
        assert set(found) == known & (left | sealed)
        for each, expected, over in before:
            seq = each.event.seq
            if seq in found and not found[seq].open:
                assert shown(found[seq]) == expected
            elif seq in found:  # with its values still on a device or in transfer, or its last line truncated
                assert each.late or not over or each.event.type in CLOSED_LATER
                event = found[seq]
                same = (event.engine, event.event, event.epoch, event.iteration, event.t)
                mine = each.event
                assert same == (mine.engine, mine.type, mine.epoch, mine.iteration, mine.time_ns)

        again = Driver(second, killed)
        again.run()
        log = EventLog(killed)
        everything = list(log.read(superseded=True))
        newer = [each for each in everything if each.seq > max(found, default=-1) and not each.event.startswith("log_")]
        assert [shown(each) for each in newer] == [model(each) for each in again.expected]
        check_ords(newer)
        assert [each.seq for each in everything if each.seq in found] == list(found)
        assert [each.seq for each in everything] == sorted({each.seq for each in everything})
        assert set(map(shown, newer)) <= set(map(shown, log.read()))
        cut_off = len(rest) not in ends if rest else bool(sealed) and not ended
        assert bool(log.verify()) == cut_off, "half a line, or no beginning"
        assert log.ended or not again.expected
