"""Readers of a damaged log report the damage and keep the rest; they raise nothing and change nothing."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pulsetrain.cli import main
from pulsetrain.engine import Events
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter, diff
from pulsetrain.engine.recording.log.blocks import BLOCK_EVENTS, skippable
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.scan import recovered
from pulsetrain.engine.recording.log.tail import CHUNK
from pulsetrain.engine.recording.replay.playback import Replay

T = 1_790_000_000_000_000_000
BLOCKS = 24
KEPT = 0.98  # of the events outside the damaged part
SKIPPABLE = b"\x5e\x2a\x4d\x18"  # begins a block, with its magic after four bytes of length

# without shrinking, which takes minutes at this size
few = settings(max_examples=12, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))


def event(n: int) -> LoggedEvent:
    """The n-th event of a run that validates after each 512 iterations."""
    if n % 512 == 511:
        named = {"val/loss": 1000.0 / (n + 1)}
        payload = {"metrics": named, "seconds": 0.5}
        return LoggedEvent(n, "trainer", "validation_completed", 1, n, payload, metrics=named, seq=n, t=T)
    return LoggedEvent(n, "trainer", "iteration_completed", 1, n, output={"loss": n / 7}, lr=[0.1], seq=n, t=T + n)


class Whole:
    """An undamaged log; not a dataclass, of which hypothesis would print all megabytes.

    Args:
        starts: of the blocks, and of the table or the file's end.
    """

    def __init__(self, folder: Path, events: list[LoggedEvent], sealed: bytes, tail: bytes, starts: list[int]) -> None:
        self.folder, self.events = folder, events
        self.sealed, self.tail, self.starts = sealed, tail, starts

    def changed(self, sealed: bytes | None = None, tail: bytes | None = None, *, padded: bool = True) -> Path:
        """Its run folder with other files.

        Args:
            sealed: content of the sealed file.
            tail: content of the tail without the empty lines at its end.
            padded: add the empty lines.
        """
        folder = self.folder.parent / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "events").mkdir(parents=True)
        paths = log_files(folder / "events")
        paths[0].write_bytes(self.sealed if sealed is None else sealed)
        lines = self.tail if tail is None else tail
        paths[1].write_bytes(lines + b"\n" * (-len(lines) % CHUNK if padded else 0))
        return folder


def made(folder: Path, count: int, *, end: bool) -> Whole:
    writer, events = LogWriter(folder / "events"), [event(n) for n in range(count)]
    for each in events:
        writer.add(each)
    if end:
        writer.end()
    writer.close()
    sealed, tail = (path.read_bytes() for path in log_files(folder / "events"))
    starts = [at - 8 for at in _places(sealed, b"PTLB")]
    table = [at - 8 for at in _places(sealed, b"PTLT")]
    return Whole(folder, events, sealed, tail.rstrip(b"\n"), [*starts, *(table or [len(sealed)])])


def _places(data: bytes, magic: bytes) -> Iterator[int]:
    at = data.find(magic)
    while at >= 0:
        if data[at - 8 : at - 4] == SKIPPABLE:
            yield at
        at = data.find(magic, at + 1)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Many full blocks and their table."""
    whole = made(tmp_path_factory.mktemp("ended") / "whole", BLOCKS * BLOCK_EVENTS, end=True)
    assert len(whole.starts) == BLOCKS + 1
    return whole


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Three full blocks and 500 lines in the tail."""
    whole = made(tmp_path_factory.mktemp("going") / "whole", 3 * BLOCK_EVENTS + 500, end=False)
    assert len(whole.starts) == 4
    assert whole.tail.count(b"\n") == 500
    return whole


def check(folder: Path, whole: Whole, lost: range) -> EventLog:
    """All readers read the remaining events; of the events that are not in `lost`, nearly all are found unchanged.

    Args:
        lost: of the seqs, those that may be missing.
    """
    files = [path for path in log_files(folder / "events") if path.exists()]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    log = EventLog(folder)
    found = list(log.read())
    places = [each.seq for each in found]
    assert places == sorted(set(places))
    assert found == [whole.events[place] for place in places]
    others = len(whole.events) - len(lost)
    assert sum(place not in lost for place in places) >= KEPT * others
    damage = list(log.damage)
    assert log.verify() == damage  # reading everything has found it

    heard: list[int] = []
    for reading in (EventLog(folder), log):
        replay = Replay(reading)
        replay.add_event_handler(Events.VALIDATION_COMPLETED, lambda engine: heard.append(engine.state.iteration))
        replay.run()
    assert heard == 2 * [each.iteration for each in found if each.event == "validation_completed"]

    for a, b in ((folder, whole.folder), (whole.folder, folder)):
        compared = diff(a, b)
        assert compared.divergence is None
        assert compared.agreed <= len(whole.events)
        assert compared.report()
        assert json.dumps(compared.as_dict())
        if log.damage:
            assert not compared, "events that a damaged log lacks are not differences"
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before
    return log


def run(*words: object) -> tuple[int, str, str]:
    """The command's exit status and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def check_commands(folder: Path, whole: Whole) -> None:
    """Each command says by its exit status what it could read, and shows no traceback."""
    log = EventLog(folder)
    damaged = 3 if log.verify() else 0
    count = sum(1 for _ in log.read())
    status, out, err = run("events", folder, "--check")
    assert (status, err) == (damaged, "")
    assert ("; damaged" in out) == bool(damaged)
    validated = [each.seq for each in log.read(event="validation_completed")]  # each block holds two
    status, out, err = run("events", folder, "--format", "json", "--event", "validation_completed")
    assert status == damaged
    assert [json.loads(line)["seq"] for line in out.splitlines()] == validated
    assert err.count("damaged: ") == len(log.damage)
    handler = "early_stopping:patience=3,metric=val/loss"
    status, out, err = run("replay", folder, "--handler", handler, "--format", "json")
    if validated:
        assert (status, "damaged: " in err, "Traceback" in err) == (damaged, bool(damaged), False)
        assert json.loads(out)["iterations"] <= whole.events[-1].iteration
    else:
        assert (status, "this metric does not exist" in err, "Traceback" in err) == (2, True, False)
    status, out, err = run("diff", folder, whole.folder, "--format", "json")
    found = json.loads(out)
    assert (status, err) == (1 if not found["equal"] else 3 if found["damage"] else 0, "")
    if damaged:  # damage is not a difference; blocks with equal digests are not read
        assert status in (0, 3)
    elif count < len(whole.events):
        assert status == 1


def block_of(whole: Whole, at: int) -> range:
    """The seqs of the block that this byte lies in; none, where it lies in the table."""
    number = sum(start <= at for start in whole.starts) - 1
    end = min(BLOCK_EVENTS * (number + 1), len(whole.events))
    return range(BLOCK_EVENTS * number, end) if number < len(whole.starts) - 1 else range(0)


def places_in(whole: Whole) -> st.SearchStrategy[int]:
    """A byte of the sealed file: anywhere, in a header, where two blocks meet, in the table."""
    size = len(whole.sealed)
    near = [start + by for start in whole.starts for by in (*range(-4, 20), 60) if 0 <= start + by < size]
    return st.one_of(st.integers(0, size - 1), st.sampled_from(near), st.integers(size - 30, size - 1))


class TestSealed:
    @pytest.mark.slow
    @few
    @given(data=st.data())
    def test_a_flipped_bit_is_found_and_costs_one_block(self, ended: Whole, data: st.DataObject):
        closed = data.draw(st.booleans())  # otherwise without a table: each block is found from the one before
        content = bytearray(ended.sealed if closed else ended.sealed[: ended.starts[-1]])
        at = data.draw(places_in(ended).filter(lambda at: at < len(content)))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        folder = ended.changed(content)
        log = check(folder, ended, block_of(ended, at))
        assert log.damage
        if block_of(ended, at):
            assert all(each.start <= at < each.end for each in log.damage if "missing" not in each.reason)
        check_commands(folder, ended)

    @pytest.mark.slow
    @few
    @given(data=st.data())
    def test_a_cut_is_found_and_costs_only_the_events_after_it(self, ended: Whole, data: st.DataObject):
        at = data.draw(places_in(ended))
        folder = ended.changed(ended.sealed[:at])
        whole_blocks = sum(start <= at for start in ended.starts[1:])
        log = check(folder, ended, range(whole_blocks * BLOCK_EVENTS, len(ended.events)))
        table = ended.starts[-1]  # which repeats what the blocks and the tail say
        assert log.ended == (at >= table)
        assert bool(log.damage) == (at != table)
        check_commands(folder, ended)

    @pytest.mark.slow
    @few
    @given(number=st.integers(0, BLOCKS), tail=st.sampled_from([b"", b"\0" * CHUNK, None]))
    def test_a_cut_between_two_blocks_is_found_even_with_an_empty_tail(
        self, ended: Whole, number: int, tail: bytes | None
    ):
        folder = ended.changed(ended.sealed[: ended.starts[number]], b"" if tail is None else tail)
        if tail is None:
            log_files(folder / "events")[1].unlink()
        log = check(folder, ended, range(number * BLOCK_EVENTS, len(ended.events)))
        assert not log.ended
        assert len(log.damage) == 1
        assert len(log) == number * BLOCK_EVENTS
        status, out, _ = run("events", folder, "--check")
        assert (status, "not closed" in out) == (3, True)
        assert run("diff", folder, ended.folder)[0] == 3

    @pytest.mark.slow
    @few
    @given(first=st.integers(0, BLOCKS - 2), count=st.integers(1, 5))
    def test_blocks_cut_out_of_the_middle_are_found_and_the_others_kept(self, ended: Whole, first: int, count: int):
        last = min(first + count, BLOCKS - 1)
        table = ended.starts[-1]  # a log that was not closed has no table
        folder = ended.changed(ended.sealed[: ended.starts[first]] + ended.sealed[ended.starts[last] : table])
        log = check(folder, ended, range(first * BLOCK_EVENTS, last * BLOCK_EVENTS))
        (damage,) = log.damage
        assert "missing" in damage.reason
        check_commands(folder, ended)

    @pytest.mark.slow
    @few
    @given(data=st.data())
    def test_bytes_written_over_are_found_however_many(self, ended: Whole, data: st.DataObject):
        at = data.draw(places_in(ended))
        count = data.draw(st.integers(1, 3000))
        rubbish = data.draw(st.binary(min_size=1, max_size=20)) * count
        content = (ended.sealed[:at] + rubbish[:count] + ended.sealed[at + count :])[: len(ended.sealed)]
        lost = range(min(block_of(ended, at), default=0), max(block_of(ended, at + count), default=0) + 1)
        if not block_of(ended, at + count):
            lost = range(lost.start, len(ended.events))
        folder = ended.changed(content)
        log = check(folder, ended, lost)
        assert log.damage or content == ended.sealed


class TestTail:
    @pytest.mark.slow
    @few
    @given(data=st.data())
    def test_a_flipped_bit_is_found_and_costs_one_line(self, going: Whole, data: st.DataObject):
        content = bytearray(going.tail)
        at = data.draw(st.integers(0, len(content) - 1))
        number = content[:at].count(b"\n")
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        folder = going.changed(tail=bytes(content))
        first = 3 * BLOCK_EVENTS + number - 1  # after the tail's head
        joined = going.tail[at : at + 1] == b"\n"  # the flip has joined two lines
        log = check(folder, going, range(first, first + 1 + joined))
        (damage,) = log.damage
        assert damage.file == "tail.jsonl"
        assert len(log) >= len(going.events) - 1 - joined
        check_commands(folder, going)

    @pytest.mark.slow
    @few
    @given(data=st.data())
    def test_a_cut_costs_the_line_it_splits_and_those_after_it(self, going: Whole, data: st.DataObject):
        at = data.draw(st.integers(0, len(going.tail)))
        folder = going.changed(tail=going.tail[:at], padded=False)
        left = [*going.tail[:at].split(b"\n")]
        is_whole = going.tail[at : at + 1] in (b"", b"\n")  # its last line is
        kept = 3 * BLOCK_EVENTS + max(len(left) - (not is_whole or not left[-1]) - 1, 0)  # after the tail's head
        log = check(folder, going, range(kept, len(going.events)))
        assert len(log) == kept
        assert len(log.damage) == 1
        assert not log.ended
        check_commands(folder, going)

    @pytest.mark.slow
    @few
    @given(data=st.data())
    def test_rubbish_between_lines_is_found_and_costs_nothing(self, going: Whole, data: st.DataObject):
        lines = going.tail.split(b"\n")
        rubbish = data.draw(st.binary(min_size=1, max_size=40).filter(lambda text: text.strip(b"\n\0")))
        lines.insert(data.draw(st.integers(0, len(lines))), rubbish)
        log = check(going.changed(tail=b"\n".join(lines)), going, range(0))
        assert len(log) == len(going.events)
        assert log.damage


def test_a_cut_in_the_middle_of_the_log_leaves_the_tail_in_place(going: Whole):
    """The sealed part is cut inside its last block: the tail's later events are read."""
    folder = going.changed(going.sealed[:-100])
    log = check(folder, going, range(2 * BLOCK_EVENTS, 3 * BLOCK_EVENTS))
    assert log.damage
    assert len(log) == 2 * BLOCK_EVENTS + 500


@pytest.mark.slow
def test_every_flipped_bit_and_every_cut_of_a_small_sealed_log_is_found(tmp_path: Path):
    writer = LogWriter(tmp_path / "whole")
    for n in range(60):
        writer.add(event(n))
        if n in (19, 39):
            writer.seal()
    writer.end()
    writer.close()
    sealed, tail = log_files(tmp_path / "whole")
    content = sealed.read_bytes()
    damaged, damaged_tail = log_files(tmp_path)
    shutil.copy(tail, damaged_tail)
    table = content.rfind(b"PTLT") - 8
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 8)
        damaged.write_bytes(changed)
        log = EventLog(tmp_path)
        assert log.verify(), at
        assert len(list(log.read())) >= 40, at  # the other blocks
        damaged.write_bytes(content[:at])
        log = EventLog(tmp_path)
        assert bool(log.verify()) == (at != table), at  # the table repeats what the blocks and the tail say


@pytest.mark.slow
def test_every_flipped_bit_of_a_small_tail_is_found_and_costs_one_line(tmp_path: Path):
    writer = LogWriter(tmp_path / "whole")
    for n in range(12):
        writer.add(event(n))
    writer.close()
    sealed, tail = log_files(tmp_path / "whole")
    content = tail.read_bytes()
    lines = len(content.rstrip(b"\n")) + 1
    damaged_sealed, damaged = log_files(tmp_path)
    shutil.copy(sealed, damaged_sealed)
    for at in range(lines):
        changed = bytearray(content)
        changed[at] ^= 1 << (at % 8)
        damaged.write_bytes(changed)
        log = EventLog(tmp_path)
        assert log.damage, at
        assert len(list(log.read())) >= 10, at  # a lost newline joins two


def test_a_log_without_events_is_sound_and_empty_files_are_not(tmp_path: Path):
    LogWriter(tmp_path).close()
    with tempfile.TemporaryDirectory() as other:
        LogWriter(Path(other)).close()
        assert not diff(tmp_path, other)
    log = EventLog(tmp_path)
    assert (list(log.read()), log.verify(), log.ended) == ([], [], False)
    assert Replay(log).run().iteration == 0
    for path in log_files(tmp_path):
        path.write_bytes(b"")
    log = EventLog(tmp_path)
    assert (list(log.read()), len(log.verify()), log.ended) == ([], 1, False)
    assert Replay(log).run().iteration == 0


def test_a_forged_block_is_damage_and_takes_no_memory(tmp_path: Path):
    """A small block of 1.5 GiB of lines, whatever its header says of its size and of the number of its lines."""
    piece, pieces = b"{}\n" * (1 << 20), 512
    size = pieces * len(piece)
    compressor = zstandard.ZstdCompressor(write_checksum=True).compressobj(size=size)
    frame = b"".join([*(compressor.compress(piece) for _ in range(pieces)), compressor.flush()])
    writer = LogWriter(tmp_path / "events")
    writer.add(event(0))
    writer.end()
    writer.close()
    sealed, _ = log_files(tmp_path / "events")
    header = EventLog(tmp_path).headers[0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for claimed in (size, header.size, 1 << 26):
        forged = msgspec.structs.replace(
            header, size=claimed, count=claimed // 3, frame=len(frame), crc=zlib.crc32(frame)
        )
        sealed.write_bytes(skippable(b"PTLB", msgspec.json.encode(forged)) + frame)
        assert EventLog(tmp_path).verify()
        assert list(EventLog(tmp_path).read()) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # kilobytes


@pytest.mark.parametrize("bad", [b'{"seq":"x"}', b"[1]", b'{"seq":1,', b""])
def test_a_line_of_the_tail_that_is_no_event_costs_no_other(bad: bytes):
    """Its checksum is right: other software, or an error of ours, has written it."""

    def line(text: bytes) -> bytes:
        return b'%b,"c":%d}' % (text[:-1], zlib.adler32(text))

    good = [msgspec.json.encode(event(n)) for n in range(3)]
    lines = [line(each) for each in (good[0], bad + b"}", *good[1:])]
    found = recovered(lines)
    assert found.events == [event(n) for n in range(3)]
    assert found.torn == [lines[1]]
