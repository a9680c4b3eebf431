"""Written events are read back, also after a crash and from damaged files."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsetrain.engine.errors import RecordingError, RunFolderError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter, read_ranks
from pulsetrain.engine.recording.log.blocks import BLOCK_EVENTS
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.tail import written

T = 1_790_000_000_000_000_000


def event(n: int, **fields: object) -> LoggedEvent:
    """The n-th event of a run whose every tenth is an observed one."""
    place = -1 if n % 10 == 9 else n - n // 10
    known = {"engine": "trainer", "event": "iteration_completed", "epoch": n // 500, "iteration": n}
    return LoggedEvent(place, **{**known, **fields}, seq=2 * n, t=T + n)


def write(folder: Path, count: int, *, end: bool = True, rank: int = 0) -> list[LoggedEvent]:
    writer = LogWriter(folder, rank)
    events = [event(n, output={"loss": n / 7}) for n in range(count)]
    for each in events:
        writer.add(each)
    if end:
        writer.end()
    writer.close()
    return events


def test_written_events_are_read_back_in_order(tmp_path: Path):
    events = write(tmp_path, 3000)
    log = EventLog(tmp_path)
    assert list(log.read()) == events
    assert len(log) == 3000
    assert log.ended
    assert log.verify() == []
    assert log.engines == ["trainer"]


@pytest.mark.parametrize("count", [1, 5, 900])
@pytest.mark.parametrize("newest", [1, 5, 899, 900, 2000])
def test_the_newest_events_of_a_block_are_decoded_alone(count: int, newest: int, tmp_path: Path):
    events = write(tmp_path, count)
    assert EventLog(tmp_path).block(0, newest) == events[-newest:]


RESTS = [b"", b"\n\n\n", b"\n\0\0\n", b'\n{"seq":', b'\n{"seq":\n\n\0', b"\n" * 150_000, b"\n" * 150_000 + b"{\n"]


@pytest.mark.parametrize("rest", RESTS)
def test_what_follows_the_last_line_of_a_tail_is_left_out(rest: bytes):
    line = b'{"seq":1,"c":5}'
    assert written(line + rest) == (line + rest).rstrip(b"\n\0")


def test_standard_tools_read_it(tmp_path: Path):
    if shutil.which("zstd") is None:
        pytest.skip("no zstd command here")
    events = write(tmp_path, 1500, end=False)
    sealed, tail = log_files(tmp_path)
    text = subprocess.run(["zstd", "-dc", sealed], capture_output=True, check=True).stdout + tail.read_bytes()
    lines = [json.loads(line) for line in text.splitlines() if line]
    lines = [line for line in lines if line["event"] != "log_tail"]
    assert [line["seq"] for line in lines] == [each.seq for each in events]
    assert lines[1499]["output"] == {"loss": 1499 / 7}


def test_a_log_without_its_table_is_the_same(tmp_path: Path):
    events = write(tmp_path, 3000)
    sealed, _ = log_files(tmp_path)
    content = sealed.read_bytes()
    sealed.write_bytes(content[: content.rfind(b"PTLT") - 8])
    log = EventLog(tmp_path)
    assert list(log.read()) == events
    assert log.ended
    assert log.damage == []


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({"seq": (3000, 3010)}, range(1500, 1506)),
        ({"iteration": (2500, None)}, range(2500, 3000)),
        ({"epoch": (None, 0)}, range(500)),
        ({"engine": "evaluator"}, []),
        ({"event": ("spike", "iteration_completed"), "iteration": (7, 7)}, [7]),
        ({"where": lambda e: e.output["loss"] > 2990 / 7}, range(2991, 3000)),
    ],
    ids=["seq", "iteration", "epoch", "engine", "event", "where"],
)
def test_a_query_gives_what_it_asks_for(tmp_path: Path, query: dict, wanted: object):
    events = write(tmp_path, 3000)
    assert list(EventLog(tmp_path).read(**query)) == [events[n] for n in wanted]


def test_a_query_reads_only_the_blocks_that_may_hold_an_answer(tmp_path: Path):
    write(tmp_path, 5000)
    sealed, _ = log_files(tmp_path)
    log = EventLog(tmp_path)
    position = sealed.read_bytes().find(b"PTLB", 100)  # the second block's
    damaged = bytearray(sealed.read_bytes())
    damaged[position + 700] ^= 1
    sealed.write_bytes(damaged)
    log = EventLog(tmp_path)
    assert len(list(log.read(iteration=(4500, 4600)))) == 101
    assert log.damage == []
    assert len(log.verify()) == 1


def test_an_open_event_keeps_its_position_and_gets_its_values_later(tmp_path: Path):
    writer = LogWriter(tmp_path)
    first = event(0, open=True)
    writer.add(first)
    for n in range(1, 3 * BLOCK_EVENTS):
        writer.add(event(n))
    (found,) = EventLog(tmp_path).read(seq=(0, 0))
    assert found.open
    first.metrics = {"val/loss": 0.5}
    writer.complete(first)
    writer.end()
    (found,) = EventLog(tmp_path).read(seq=(0, 0))
    assert (found.metrics, found.open) == ({"val/loss": 0.5}, False)
    assert [each.seq for each in EventLog(tmp_path).read()] == [2 * n for n in range(3 * BLOCK_EVENTS)]
    writer.close()


def test_blocks_of_two_runs_line_up_whatever_observed_events_lie_between(tmp_path: Path):
    write(tmp_path / "a", 4000)
    writer = LogWriter(tmp_path / "b")
    for seq, n in enumerate(range(3600)):
        writer.add(_deterministic(n, seq))
    writer.end()
    writer.close()
    a, b = EventLog(tmp_path / "a").headers, EventLog(tmp_path / "b").headers
    assert [header.ord for header in a] == [header.ord for header in b]
    assert [header.digest for header in a] == [header.digest for header in b]
    assert all(header.ord[0] % BLOCK_EVENTS == 0 for header in a)


def _deterministic(place: int, seq: int) -> LoggedEvent:
    """The deterministic event of that place in `write`'s run, at another time."""
    n = place + place // 9
    same = event(n, output={"loss": n / 7})
    same.seq, same.t = seq, T + 5 * seq
    return same


def test_a_writer_continues_where_the_last_one_was_killed(tmp_path: Path):
    events = write(tmp_path, 1700, end=False)
    writer = LogWriter(tmp_path)
    assert (writer.last_seq, writer.next_ord) == (events[-1].seq, 1530)
    for n in range(1700, 3000):
        writer.add(event(n, output={"loss": n / 7}))
    writer.end()
    writer.close()
    log = EventLog(tmp_path)
    assert [each.seq for each in log.read()] == [2 * n for n in range(3000)]
    assert log.verify() == []


def test_a_log_keeps_within_its_budget_and_says_what_it_took_out(tmp_path: Path):
    whole = write(tmp_path / "whole", 30_000)
    size = log_files(tmp_path / "whole")[0].stat().st_size
    writer = LogWriter(tmp_path, max_bytes=size // 2)
    for n, each in enumerate(whole):
        writer.add(event(n, event="spike") if n == 1234 else each)
    writer.end()
    assert writer.nbytes < 0.6 * size
    writer.close()
    log = EventLog(tmp_path)
    assert log.verify() == []
    (said, *_) = log.read(event="log_thinned")
    assert said.payload["events"] > 1000
    left = list(log.read(event="iteration_completed"))
    assert {each.iteration for each in left} >= set(range(0, 30_000, 100))
    assert [each.iteration for each in left][-1000:] == list(range(29_000, 30_000))  # new ones are kept
    assert [each.iteration for each in log.read(event="spike")] == [1234]
    assert [each.iteration for each in log.read(iteration=(0, 500), event="iteration_completed")] == list(
        range(0, 501, 100)
    )


def test_a_writer_killed_right_after_a_seam_continues_with_its_ord(tmp_path: Path):
    write(tmp_path, 100, end=False)
    writer = LogWriter(tmp_path)
    writer.rewind(after=40, ord=19, seq=300, t=T)
    writer.close()
    for sealed in (False, True):
        writer = LogWriter(tmp_path)
        assert writer.next_ord == 19
        if not sealed:
            writer.seal()
        writer.close()


def test_two_writers_on_one_folder_are_refused(tmp_path: Path):
    writer = LogWriter(tmp_path)
    with pytest.raises(RunFolderError, match="another recorder is writing it"):
        LogWriter(tmp_path)
    writer.close()
    LogWriter(tmp_path).close()


def test_a_folder_without_a_log_is_refused(tmp_path: Path):
    with pytest.raises(RecordingError, match="holds no event log"):
        EventLog(tmp_path)
    with pytest.raises(RecordingError, match="nowhere: does not exist"):
        EventLog(tmp_path / "nowhere")


def test_a_log_of_a_newer_format_is_refused_by_reader_and_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.engine.recording.log.writer.FORMAT", 99)
    write(tmp_path, 10)
    for opens in (EventLog, LogWriter):
        with pytest.raises(RecordingError, match="format 99"):
            opens(tmp_path)


def test_reading_changes_nothing(tmp_path: Path):
    write(tmp_path, 1500, end=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    log = EventLog(tmp_path)
    list(log.read())
    log.verify()
    log.refresh()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_reader_sees_events_written_while_it_opens_the_log(tmp_path: Path):
    writer = LogWriter(tmp_path)
    writer.add(event(0))
    log = EventLog(tmp_path)
    assert len(log) == 1
    for n in range(1, 2000):
        writer.add(event(n))
    log.refresh()
    assert [each.seq for each in log.read()] == [2 * n for n in range(2000)]
    writer.close()


def test_the_logs_of_several_ranks_are_read_by_iteration_and_rank(tmp_path: Path):
    for rank in (0, 1, 2):
        write(tmp_path, 1200, rank=rank, end=rank != 1)
    found = [(each.iteration, rank) for rank, each in read_ranks(tmp_path, iteration=(1100, None))]
    assert found == [(iteration, rank) for iteration in range(1100, 1200) for rank in range(3)]


names = st.text(max_size=8)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=30), st.data())
def test_whatever_was_written_is_read_back_however_the_tail_was_cut(payloads, data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = LogWriter(folder, run="a")
        for n, payload in enumerate(payloads):
            writer.add(LoggedEvent(n, "trainer", "custom", payload=payload, seq=n, t=T))
            if data.draw(st.integers(0, 9)) == 0:
                writer.seal()
        writer.close()
        assert [each.payload for each in EventLog(folder).read()] == payloads
        _, tail = log_files(folder)
        content = tail.read_bytes().rstrip(b"\n")
        cut = data.draw(st.integers(0, len(content)))
        tail.write_bytes(content[:cut])
        ends = [at for at, byte in enumerate(content) if byte == ord("\n")] + [len(content)] * bool(content)
        lost = sum(end > cut for end in ends[1:])  # a line that lacks only its newline is complete; the first: the head
        log = EventLog(folder)
        assert [each.payload for each in log.read()] == payloads[: len(payloads) - lost]
        assert log.damage
