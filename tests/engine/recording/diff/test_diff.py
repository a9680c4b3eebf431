"""Two logs are compared event by event: differences, missing events, and fields that are not compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.diff.compare import diff
from pulsetrain.engine.recording.diff.result import ABSENT, field_table

T = 1_763_000_000_000_000_000
COUNT = 3000  # events: two blocks of 1024 and one that is not full


def run(count: int = COUNT, **changes: Callable[[int], Any]) -> list[LoggedEvent]:
    """A trainer's iterations, one event each; `changes` give fields of the event by its ord."""
    events = []
    for place in range(count):
        fields: dict[str, Any] = {"output": {"loss": 1 / (place + 1)}, "lr": [0.1]}
        fields |= {name: of(place) for name, of in changes.items()}
        events.append(
            LoggedEvent(place, "trainer", "iteration_completed", place // 100 + 1, place + 1, t=T + place, **fields)
        )
    return events


def write(folder: Path, events: Sequence[LoggedEvent], *, end: bool = True) -> Path:
    """A log of these events, numbered as they come."""
    writer = LogWriter(folder / "events")
    for seq, event in enumerate(events, start=writer.last_seq + 1):
        event.seq = seq
        writer.add(event)
    if end:
        writer.end()
    writer.close()
    return folder


def loss_from(first: int, change: float) -> Callable[[int], Any]:
    return lambda place: {"loss": 1 / (place + 1) + (change if place >= first else 0)}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class TestAgreement:
    def test_the_same_run_twice(self, tmp_path):
        found = diff(write(tmp_path / "a", run()), write(tmp_path / "b", run()))
        assert not found
        assert (found.agreed, found.divergence, found.missing, found.unread, found.growth) == (COUNT, None, (), 0, ())
        assert str(found) == f"{tmp_path / 'a'} and {tmp_path / 'b'} agree: 3,000 deterministic events"

    def test_times_and_numbers_of_the_bus_and_observed_events_do_not_count(self, tmp_path):
        events = run(observed=lambda place: {"seconds": place})
        events.insert(5, LoggedEvent(engine="trainer", event="checkpoint_saved", t=T))
        for event in events:
            event.t += 12345
        assert not diff(write(tmp_path / "a", run()), write(tmp_path / "b", events))

    def test_blocks_that_agree_are_not_read(self, tmp_path):
        a, b = (EventLog(write(tmp_path / name, run(output=loss_from(2500, change)))) for name, change in ZIPPED)
        b.verify()
        flip(tmp_path / "b" / "events" / "events.jsonl.zst", 600)  # in the middle of the first block
        b.refresh()
        found = diff(a, b)
        assert (found.divergence.ord, found.agreed, found.damage) == (2500, 2500, ())

    def test_a_log_that_was_sealed_elsewhere_is_cut_elsewhere(self, tmp_path):
        parts = run(output=loss_from(2500, 1e-9))
        for first, last in ((0, 700), (700, 1800), (1800, COUNT)):
            write(tmp_path / "b", parts[first:last])
        found = diff(write(tmp_path / "a", run()), tmp_path / "b")
        assert (found.divergence.ord, found.agreed) == (2500, 2500)

    def test_a_run_that_was_resumed_agrees_with_one_that_was_not(self, tmp_path):
        events = run()
        writer = LogWriter(tmp_path / "b" / "events")
        for seq, event in enumerate(run(1600, output=loss_from(1300, 9.0))):  # the repeated events are those of a
            event.seq = seq
            writer.add(event)
        writer.rewind(after=1199, ord=1200, seq=1600, t=T)
        for event in events[1200:]:
            event.seq = 1601 + event.ord - 1200
            writer.add(event)
        writer.end()
        writer.close()
        found = diff(write(tmp_path / "a", run()), tmp_path / "b")
        assert not found
        assert found.agreed == COUNT

    @pytest.mark.parametrize("end", [True, False], ids=["ended", "still going"])
    def test_the_open_tail_is_compared_too(self, tmp_path, end):
        a, b = write(tmp_path / "a", run(), end=end), write(tmp_path / "b", run(output=loss_from(2990, 1e-9)), end=end)
        assert diff(a, b).divergence.ord == 2990

    def test_values_that_a_kill_has_lost_do_not_count_but_their_event_does(self, tmp_path):
        lost = run(100)
        lost[98].open, lost[98].output = True, {"loss": None}
        write(tmp_path / "b", lost, end=False)
        assert not diff(write(tmp_path / "a", run(100)), tmp_path / "b")
        lost[98].event = "epoch_completed"
        assert diff(tmp_path / "a", write(tmp_path / "c", lost, end=False)).divergence.fields == {
            "event": ("iteration_completed", "epoch_completed")
        }

    def test_neither_holds_anything(self, tmp_path):
        assert not diff(write(tmp_path / "a", []), write(tmp_path / "b", []))


ZIPPED = (("a", 0.0), ("b", 1e-9))


class TestDivergence:
    @pytest.mark.parametrize("place", [0, 1, 1023, 1024, 2047, 2048, 2999])
    def test_the_first_event_that_differs(self, tmp_path, place):
        found = diff(write(tmp_path / "a", run()), write(tmp_path / "b", run(output=loss_from(place, 1e-9))))
        assert found
        assert (found.divergence.ord, found.agreed) == (place, place)
        assert found.divergence.fields == {"output.loss": (1 / (place + 1), 1 / (place + 1) + 1e-9)}
        assert (found.divergence.a.iteration, found.divergence.b.iteration) == (place + 1, place + 1)

    @pytest.mark.parametrize(
        ("x", "y", "fields"),
        [
            ({"a": 0.0}, {"a": -0.0}, {"payload.a": (0.0, -0.0)}),
            ({"a": 1}, {"a": 1.0}, {"payload.a": (1, 1.0)}),
            ({"a": "NaN"}, {"a": 1.0}, {"payload.a": ("NaN", 1.0)}),
            ({"a": [1, 2]}, {"a": [1, 2, 3]}, {"payload.a.2": (ABSENT, 3)}),
            (
                {"a": 1, "b": {"c": 2}},
                {"a": 1, "b": {"d": 2}},
                {"payload.b.c": (2, ABSENT), "payload.b.d": (ABSENT, 2)},
            ),
            ({"a": True}, {"a": 1}, {"payload.a": (True, 1)}),
            (None, {"a": 1}, {"payload": (None, {"a": 1})}),
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {}),
            ({"a": "NaN"}, {"a": "NaN"}, {}),
        ],
    )
    def test_fields_are_compared_by_their_bits(self, tmp_path, x, y, fields):
        a, b = (write(tmp_path / name, run(10, payload=lambda _, v=v: v)) for name, v in (("a", x), ("b", y)))
        found = diff(a, b)
        assert bool(found) == bool(fields)
        if fields:
            assert {k: repr(v) for k, v in found.divergence.fields.items()} == {k: repr(v) for k, v in fields.items()}

    @pytest.mark.parametrize(
        ("tolerances", "place"),
        [({"rtol": 1e-6}, 2000), ({"atol": 1e-6}, 2000), ({"atol": 1.0}, None), ({"rtol": 1e-12}, 1000)],
    )
    def test_within_a_tolerance_floats_agree(self, tmp_path, tolerances, place):
        def drift(at: int) -> Any:
            return {"loss": 1.0 + (1e-8 if at >= 1000 else 0) + (1e-4 if at >= 2000 else 0)}

        a, b = write(tmp_path / "a", run(output=lambda _: {"loss": 1.0})), write(tmp_path / "b", run(output=drift))
        found = diff(a, b, **tolerances)
        assert (found.divergence and found.divergence.ord) == place

    def test_no_tolerance_is_there_for_whole_numbers_text_and_places(self, tmp_path):
        for name, value in {"tokens": 2, "kind": "y", "flag": True, "number": "Infinity"}.items():
            before: dict[str, Any] = {"tokens": 1, "kind": "x", "flag": False, "number": 1e308}
            a = write(tmp_path / name / "a", run(5, payload=lambda _, v=before: v))
            b = write(tmp_path / name / "b", run(5, payload=lambda _, v=before | {name: value}: v))
            assert list(diff(a, b, rtol=0.9, atol=10.0).divergence.fields) == [f"payload.{name}"]

    @pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1"])
    def test_a_tolerance_that_is_none(self, tmp_path, value):
        with pytest.raises(ConfigurationError, match=r"diff\(atol=.*\): needs a number of at least 0"):
            diff(tmp_path, tmp_path, atol=value)

    def test_it_grows_by_decades_of_iterations(self, tmp_path):
        def drift(at: int) -> Any:
            return {"loss": 1.0 + max(at - 1000, 0) / 8, "same": at}

        same = run(output=lambda at: {"loss": 1.0, "same": at})
        found = diff(write(tmp_path / "a", same), write(tmp_path / "b", run(output=drift)))
        (growth,) = found.growth
        assert growth.name == "trainer output.loss"
        assert growth.largest == {(0, 0): 0.125, (1, 9): 1.25, (10, 99): 12.5, (100, 999): 125.0, (1000, 9999): 249.875}
        assert "  trainer output.loss  0.125  1.25  12.5   125      250" in str(found)
        assert "largest" not in found.report(growth=False)

    def test_it_is_followed_past_an_event_that_only_one_run_has(self, tmp_path):
        more = run(output=loss_from(500, 0.5))
        more.insert(300, LoggedEvent(0, "trainer", "validation_started", 4, 300, t=T))
        for place, event in enumerate(more):
            event.ord = place
        found = diff(write(tmp_path / "a", run()), write(tmp_path / "b", more))
        assert found.divergence.fields["event"] == ("iteration_completed", "validation_started")
        assert max(found.growth[0].largest.values()) == pytest.approx(0.5)
        (missing,) = found.missing
        assert (missing.side, missing.first, missing.last) == ("a", COUNT, COUNT)

    def test_a_non_finite_value_on_one_side_is_infinitely_far(self, tmp_path):
        nan = run(output=lambda place: {"loss": "NaN" if place > 100 else 1.0})
        found = diff(write(tmp_path / "a", run(output=lambda _: {"loss": 1.0})), write(tmp_path / "b", nan))
        assert set(found.growth[0].largest.values()) == {float("inf")}
        assert json.loads(json.dumps(found.as_dict()))["growth"]["trainer output.loss"][0]["largest"] == "Infinity"

    def test_the_report_shows_both_sides(self, tmp_path):
        found = diff(write(tmp_path / "a", run()), write(tmp_path / "b", run(output=loss_from(1500, 0.25))))
        lines = str(found).splitlines()
        assert lines[0].endswith("differ after 1,500 events that agree")
        assert lines[1] == "first difference: event 1,500, trainer's iteration_completed at epoch 16, iteration 1501"
        assert lines[3].split()[:3] == ["output.loss", repr(1 / 1501), repr(1 / 1501 + 0.25)]
        assert found.as_dict()["divergence"]["fields"] == {"output.loss": {"a": 1 / 1501, "b": 1 / 1501 + 0.25}}


class TestMissing:
    def test_a_run_that_ends_earlier_differs(self, tmp_path):
        found = diff(write(tmp_path / "a", run()), write(tmp_path / "b", run(1500)))
        assert found
        assert found.divergence is None
        (missing,) = found.missing
        assert (missing.side, missing.first, missing.last, missing.event.iteration) == ("b", 1500, 2999, 1501)
        assert found.agreed == 1500
        assert "missing in" in str(found)
        assert "1,500 events, 1,500 to 2,999; the first is trainer's iteration_completed at epoch 16" in str(found)

    def test_one_side_is_empty(self, tmp_path):
        found = diff(write(tmp_path / "a", []), write(tmp_path / "b", run()))
        assert [(each.side, each.first, each.last) for each in found.missing] == [("a", 0, 2999)]

    def test_a_run_resumed_in_another_folder_lacks_the_earlier_events(self, tmp_path):
        found = diff(write(tmp_path / "a", run()), write(tmp_path / "b", run()[1500:]))
        assert [(each.side, each.first, each.last) for each in found.missing] == [("b", 0, 1499)]
        assert found.agreed == 1500

    def test_also_after_a_divergence(self, tmp_path):
        found = diff(write(tmp_path / "a", run()), write(tmp_path / "b", run(2500, output=loss_from(10, 1.0))))
        assert found.divergence.ord == 10
        assert [(each.side, each.first, each.last) for each in found.missing] == [("b", 2500, 2999)]
        assert "500 events, as counted after the first difference" in str(found)
        assert "the first is" not in str(found), "an event of another kind may be the one that is missing"


class TestDamage:
    """An event that a damaged log has lost is not a difference."""

    def test_a_damaged_block_is_left_out(self, tmp_path):
        a, b = write(tmp_path / "a", run(output=loss_from(0, 1e-9))), write(tmp_path / "b", run())
        flip(b / "events" / "events.jsonl.zst", 600)
        found = diff(a, b, atol=1e-6)
        assert not found
        assert (found.agreed, found.unread) == (COUNT - 1024, 1024)
        assert len(found.damage) == 1
        assert "seq 0 to 1023" in found.damage[0]
        assert "not compared: 1,024 events" in str(found)

    def test_a_difference_after_it_is_found(self, tmp_path):
        a, b = write(tmp_path / "a", run()), write(tmp_path / "b", run(output=lambda at: {"loss": float(at > 2000)}))
        flip(b / "events" / "events.jsonl.zst", 600)
        assert diff(a, b).divergence.ord == 1024

    @pytest.mark.slow
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_whatever_was_cut_or_flipped_nothing_false_is_said(self, tmp_path_factory, data):
        folder = tmp_path_factory.mktemp("damaged")
        a, b = write(folder / "a", run(2100)), write(folder / "b", run(2100))
        path = b / "events" / "events.jsonl.zst"
        size = path.stat().st_size
        cut = data.draw(st.booleans())
        at = data.draw(st.integers(0, size - 1))
        if cut:
            path.write_bytes(path.read_bytes()[:at])
        else:
            flip(path, at)
        found = diff(a, b)
        assert found.divergence is None
        assert found.agreed + found.unread + sum(each.last - each.first + 1 for each in found.missing) == 2100
        if not cut:
            assert not found
            assert found.agreed >= 2100 - 1024

    def test_a_log_of_a_newer_format(self, tmp_path, monkeypatch):
        write(tmp_path / "b", run(10))
        monkeypatch.setattr("pulsetrain.engine.recording.log.writer.FORMAT", 3)
        write(tmp_path / "a", run(10))
        with pytest.raises(RecordingError, match="has format 3, and this version reads up to 2"):
            diff(tmp_path / "a", tmp_path / "b")

    def test_no_log(self, tmp_path):
        with pytest.raises(RecordingError, match="holds no event log"):
            diff(write(tmp_path / "a", run(10)), tmp_path)

    def test_reading_changes_nothing(self, tmp_path):
        a, b = write(tmp_path / "a", run(1500)), write(tmp_path / "b", run(1500, output=loss_from(7, 1.0)), end=False)
        shutil.copytree(tmp_path, copy := tmp_path.with_name("copy"))
        str(diff(a, b))
        for path in copy.rglob("*.*"):
            assert path.read_bytes() == (tmp_path / path.relative_to(copy)).read_bytes()


class TestThinned:
    """An event removed by thinning is not a difference."""

    @pytest.fixture
    def thinned(self, tmp_path: Path) -> Path:
        writer = LogWriter(tmp_path / "thinned" / "events", max_bytes=100_000)
        for seq, event in enumerate(run(8000)):
            event.seq = seq
            writer.add(event)
        writer.end()
        writer.close()
        return tmp_path / "thinned"

    def test_the_remaining_events_are_compared(self, tmp_path, thinned):
        kept = sum(1 for event in EventLog(thinned).read() if event.ord >= 0)
        assert kept < 7000
        found = diff(write(tmp_path / "a", run(8000)), thinned)
        assert not found
        assert (found.agreed, found.unread) == (kept, 8000 - kept)
        assert diff(thinned, thinned).agreed == kept

    def test_a_difference_in_it_is_found(self, tmp_path, thinned):
        other = write(tmp_path / "a", run(8000, output=loss_from(150, 1e-9)))
        assert diff(other, thinned).divergence.a.iteration == 200  # each hundredth was kept


class TestEnvironment:
    def test_it_is_named_and_does_not_count_as_a_difference(self, tmp_path):
        a, b = write(tmp_path / "a", run(10)), write(tmp_path / "b", run(10))
        (a / "run.json").write_text(json.dumps({"environment": {"threads": 2, "device": "cpu"}}))
        (b / "run.json").write_text(json.dumps({"environment": {"threads": 1, "device": "cpu"}}))
        found = diff(a, b)
        assert not found
        assert found.environment == ("threads: 2 -> 1",)
        assert "environment differs: threads: 2 -> 1" in str(found)

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"environment": 3}', "\xff"])
    def test_a_run_file_that_says_nothing(self, tmp_path, content):
        a, b = write(tmp_path / "a", run(10)), write(tmp_path / "b", run(10))
        (a / "run.json").write_text(json.dumps({"environment": {"threads": 2}}))
        (b / "run.json").write_text(content, encoding="latin-1")
        assert diff(a, b).environment == ()


@pytest.mark.parametrize("at", [0, 3, 39, 40, 41, 500, 999])
@pytest.mark.parametrize("length", [1, 30, 1000])
def test_of_long_values_the_table_shows_where_they_differ(at: int, length: int):
    text = "the same " * 200
    a, b = (f"{text[:at]}{mark}{text[at : at + length]}" for mark in ("OLD", "NEW"))
    (_, row) = field_table({"payload.reason": (a, b)}, "a", "b")
    assert "OLD" in row
    assert "NEW" in row
    assert len(row) < 120


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_damaged_block_is_reported_although_its_digest_agrees(side: str, tmp_path: Path):
    for name in ("a", "b"):
        write(tmp_path / name, run())
    sealed = tmp_path / side / "events" / "events.jsonl.zst"
    flip(sealed, sealed.stat().st_size // 3)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [damage.partition(":")[0] for damage in found.damage] == [str(tmp_path / side)]
