"""Finds out what a log has lost: parts that cannot be read, and events that must have been there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from pulsetrain.engine.recording.log.blocks import SEAM, Data, Header, parse
from pulsetrain.engine.recording.log.index import Index
from pulsetrain.engine.recording.log.records import LOST, LoggedEvent
from pulsetrain.engine.recording.log.run_file import RUN_FILE, newer_format, read_run_file
from pulsetrain.engine.recording.log.scan import Contents, Damage, Recovered
from pulsetrain.engine.recording.log.tail import CHUNK

__all__ = [
    "damage_inside",
    "damage_of_another_run",
    "damage_of_block",
    "damage_of_record",
    "find_damage",
]


def find_damage(sealed: Path, data: Data, contents: Contents, tail: Path, found: Recovered, size: int) -> list[Damage]:
    """The damage that the two files of a log show without reading the blocks.

    Args:
        sealed: the sealed file.
        data: its bytes.
        contents: its blocks.
        tail: the tail.
        found: its lines.
        size: its size in bytes.
    """
    index, head = contents.index, found.head
    last = index.last_seq
    complete = head is not None and head.after <= last and not head.ended  # every event is in a block or in the tail
    damage = [
        each
        for each in contents.damage
        # a block or table that was being written when the process was killed
        if not (complete and each.start >= contents.end and each.end == len(data))
    ]
    if found.torn:
        reason = f"damaged lines: {len(found.torn)}" + _iterations(index, len(index), found.events, to_end=True)
        damage.append(Damage(tail.name, 0, 0, reason, last))
    elif head is not None and size % CHUNK:
        reason = f"cut off after {size} bytes: the last events may be missing"
        reason += _iterations(index, len(index), found.events, to_end=True)
        damage.append(Damage(tail.name, 0, 0, reason, max([last, *(event.seq for event in found.events)])))
    damage.extend(_missing_blocks(sealed, data, index))
    damage.extend(_missing_numbers(sealed, index))
    damage.extend(_missing_around(sealed, contents, tail, found))
    return damage


def damage_of_block(file: Path, start: int, end: int, header: Header) -> Damage:
    """The damage of a block that cannot be read although its header can.

    Args:
        file: the sealed file.
        start: offset of the block.
        end: offset after it.
        header: of the block.
    """
    reason = f"{header.count} events, seq {header.seq[0]} to {header.seq[1]}"
    parts = (
        f"iterations {max(part.iteration[0], 0)} to {part.iteration[1]} of {name!r}"
        for name, part in header.engines.items()
        if name
    )
    named = [*parts]
    own = header.engines.get("")
    if own is not None and LOST in own.events:  # which named other iterations, before the last of the block
        last = next((part.iteration[1] for name, part in header.engines.items() if name), "the end")
        named.append(f"with a record of events that were lost between iteration 0 and {last}")
    return Damage(file.name, start, end, ", ".join((reason, *named)))


def damage_inside(file: Path, start: int, header: Header, events: Sequence[LoggedEvent]) -> Damage | None:
    """The damage of a block whose events skip numbers, although nothing in it says why; None if they do not.

    Args:
        file: the sealed file.
        start: offset of the block.
        header: of the block.
        events: of the block.
    """
    if header.thinned or any(event.event in (LOST, SEAM) for event in events):
        return None
    numbers = [event.ord for event in events if event.ord >= 0]
    jump = next((pair for pair in pairwise(numbers) if pair[1] != pair[0] + 1), None)
    if jump is None:
        return None
    after = next(event for event in events if event.ord == jump[0])
    reason = f"events are missing: ord {jump[0] + 1} to {jump[1] - 1}: after iteration {after.iteration}"
    return Damage(file.name, start, start, reason, after.seq)


def damage_of_another_run(file: Path, run: str, folder: Path) -> Damage | None:
    """The damage of a log that was recorded by another run than the one that run.json describes; None if it was not.

    Args:
        file: the sealed file.
        run: id of the run that recorded the log; empty if it is not known.
        folder: the run folder.
    """
    described = read_run_file(folder)
    known = described.get("id")
    if not run or not known or run == known or newer_format(described):
        return None
    return Damage(file.name, 0, 0, f"the log of another run, {run}; {RUN_FILE} is of run {known}")


def damage_of_record(file: Path, record: LoggedEvent) -> Damage:
    """The damage that a `log_lost` record reports."""
    payload = record.payload if isinstance(record.payload, dict) else {}
    reason = payload.get("reason") or f"{payload.get('events', 'an unknown number of')} events were lost"
    after = payload.get("after", -1)
    kept = f"; the unreadable bytes are in {', '.join(payload['kept'])}" if payload.get("kept") else ""
    return Damage(file.name, 0, 0, f"{reason}{kept}", after if isinstance(after, int) else -1)


def _missing_blocks(sealed: Path, data: Data, index: Index) -> Iterator[Damage]:
    for number, before, after in index.gaps():
        block = parse(data, index.start[number - 1]) if number else None
        start = block.end if block is not None else 0
        reason = f"the events after seq {before} are missing, up to seq {after}"
        yield Damage(sealed.name, start, index.start[number], reason + _iterations(index, number), before)


def _iterations(
    index: Index, number: int, tail: Sequence[LoggedEvent] = (), place: int = 0, *, to_end: bool = False
) -> str:
    """Between which iterations events are missing, as text: before a block, or before this place in the tail.

    Args:
        index: the blocks.
        number: of the block; beyond the last one for the tail.
        tail: its events.
        place: of one of them.
        to_end: whether any event after that may be missing, too.
    """
    engine = next((name for name in (*index.engines, *(event.engine for event in tail)) if name), None)
    if engine is None:
        return ""
    first, last = index.engines[engine].iteration if engine in index.engines else ([], [])
    before = [*last[:number], *(event.iteration for event in tail[:place] if event.engine == engine)]
    known = [*first[number:], *(event.iteration for event in tail[place:] if event.engine == engine)]
    start = next((each for each in reversed(before) if each >= 0), 0)  # not the greatest: a run may have resumed
    after = next((each for each in known if each >= 0 and not to_end), "the end")
    return f": between iteration {start} and {after} of {engine!r}"


def _missing_numbers(sealed: Path, index: Index) -> Iterator[Damage]:
    """Jumps of `ord` between blocks that follow each other."""
    first, last = index.ord
    expected: int | None = None
    before = 0  # the block that ends with it; those in between have no numbered events
    for number, (low, high) in enumerate(zip(first, last, strict=True)):
        if low < 0:
            continue
        if expected is not None and low > expected and not _explained(index, before, number):
            reason = f"events are missing: ord {expected} to {low - 1}{_iterations(index, number)}"
            yield Damage(sealed.name, index.start[number], index.start[number], reason, index.seq[0][number] - 1)
        expected, before = high + 1, number


def _explained(index: Index, before: int, number: int) -> bool:
    """Whether a jump of `ord` from one block to another is reported in another way."""
    around = [index.header(each) for each in range(before, number + 1)]
    missing = any(index.after[each] != index.seq[1][each - 1] for each in range(before + 1, number + 1))  # whole blocks
    lost = any(LOST in part.events for header in around for part in header.engines.values())
    return missing or lost or any(header.thinned for header in around) or _continues_earlier(index, number)


def _continues_earlier(index: Index, number: int) -> bool:
    """Whether the block begins an attempt that continues one before the last, whose events are there."""
    return any(
        ord == index.ord[0][number]
        and any(
            index.ord[0][each] <= ord - 1 <= index.ord[1][each] and index.seq[0][each] <= after
            for each in range(number)
        )
        for _, after, ord in index.header(number).seams
    )


def _missing_around(sealed: Path, contents: Contents, tail: Path, found: Recovered) -> Iterator[Damage]:
    """What is lost at the end of the sealed file, in the tail, or between the two."""
    index, head = contents.index, found.head
    last, expected = index.last_seq, index.next_ord
    if head is None:
        if not contents.ended and not found.torn and (index.run or (not len(index) and not found.events)):
            reason = f"lost, or its beginning is: the events after seq {last} may be missing"
            reason += _iterations(index, len(index), found.events, to_end=True)
            yield Damage(tail.name, 0, 0, reason, last)
    else:
        if index.run and head.run != index.run:
            yield Damage(tail.name, 0, 0, f"the tail of another run, {head.run}", last)
        elif head.after > last:
            reason = f"the events after seq {last} are missing, up to seq {head.after}"
            where = _iterations(index, len(index), found.events)
            yield Damage(sealed.name, contents.end, contents.end, reason + where, last)
        if head.after >= last:
            expected = head.ord
    if not found.torn:
        yield from _missing_lines(tail, index, found.events, expected)


def _missing_lines(tail: Path, index: Index, events: Sequence[LoggedEvent], expected: int | None) -> Iterator[Damage]:
    last = index.last_seq
    for number, event in enumerate(events):
        if event.event == SEAM:
            expected = event.payload["ord"]
        elif event.event == LOST:
            expected = None
        elif event.ord >= 0:
            if expected is not None and event.ord != expected:
                reason = f"the events before seq {event.seq} are missing: ord {expected} to {event.ord - 1}"
                yield Damage(tail.name, 0, 0, reason + _iterations(index, len(index), events, number), last)
            expected = event.ord + 1
        last = event.seq
