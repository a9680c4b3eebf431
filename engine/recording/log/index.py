"""Where the blocks of a sealed file begin, and what they hold: from the table at its end, or from the blocks.

The table is a skippable frame with "PTLT" that ends with its own length and "PTLE". It repeats every header, and has
beside them, as lists over all blocks, what finds one of ten thousand without decoding the others.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pulsetrain.engine.recording.log.blocks import FRAME_BYTES, Header, content_at, parse, skippable

__all__ = ["TABLE_MAGIC", "Index"]

TABLE_MAGIC, END_MAGIC = b"PTLT", b"PTLE"
_END = struct.Struct("<Q4s")
_NOWHERE = -1  # iteration and epoch of an engine in a block that holds nothing of it


class Reach(msgspec.Struct, gc=False):
    """How far an engine is in each block: the least and the greatest; -1 where a block holds nothing of it."""

    iteration: tuple[list[int], list[int]]
    epoch: tuple[list[int], list[int]]


class _Table(msgspec.Struct, gc=False):
    v: int
    events: int
    start: list[int]  # offsets of the blocks
    after: list[int]
    seq: tuple[list[int], list[int]]  # first and last
    engines: dict[str, Reach]
    seams: list[tuple[int, int, int]]  # of all blocks
    headers: list[msgspec.Raw]


_encode = msgspec.json.Encoder().encode
_decode_table = msgspec.json.Decoder(_Table).decode
_decode_header = msgspec.json.Decoder(Header).decode


class Index:
    """The blocks of a sealed file, in order.

    Args:
        blocks: offsets and headers.
    """

    def __init__(self, blocks: Sequence[tuple[int, Header]] = ()) -> None:
        headers = [header for _, header in blocks]
        self._table = _Table(
            v=max([0, *(header.v for header in headers)]),
            events=sum(header.count for header in headers),
            start=[start for start, _ in blocks],
            after=[header.after for header in headers],
            seq=([header.seq[0] for header in headers], [header.seq[1] for header in headers]),
            engines=_reaches(headers),
            seams=[seam for header in headers for seam in header.seams],
            headers=[],
        )
        self._headers: dict[int, Header] = dict(enumerate(headers))

    @classmethod
    def of_table(cls, data: Any) -> tuple[Index, int] | None:
        """What the table at the end of a buffer says, and where it begins; None where there is no whole one."""
        if len(data) < _END.size:
            return None
        length, magic = _END.unpack_from(data, len(data) - _END.size)
        start = len(data) - length
        if magic != END_MAGIC or start < 0:
            return None
        content = content_at(data, start, TABLE_MAGIC)
        if content is None:
            return None
        index = cls()
        try:
            index._table = _decode_table(content[0][: -_END.size])
        except msgspec.DecodeError:
            return None
        last = parse(data, index._table.start[-1]) if len(index) else None
        if len(index) and (last is None or last.end != start):  # something was cut out before it, or is damaged
            return None
        return index, start

    def table(self, version: int) -> bytes:
        """The frame that `of_table` reads."""
        table = msgspec.structs.replace(self._table, v=version, headers=[msgspec.Raw(_encode(h)) for h in self.headers])
        content = _encode(table)
        return skippable(TABLE_MAGIC, content + _END.pack(FRAME_BYTES + len(content) + _END.size, END_MAGIC))

    def __len__(self) -> int:
        return len(self._table.start)

    @property
    def version(self) -> int:
        """The newest format of any block."""
        return self._table.v

    @property
    def events(self) -> int:
        """How many all blocks hold."""
        return self._table.events

    @property
    def last_seq(self) -> int:
        """The last one's; -1 for none."""
        return self._table.seq[1][-1] if len(self) else -1

    @property
    def next_ord(self) -> int | None:
        """Behind the last deterministic event, or what the last seam says; None where there is neither."""
        for number in reversed(range(len(self))):
            header = self.header(number)
            if header.ord[1] >= 0:
                return header.ord[1] + 1
            if header.seams:  # a block begins with it
                return header.seams[-1][2]
        return None

    @property
    def seams(self) -> list[tuple[int, int, int]]:
        """Those of all blocks: seq of the record, and its `after` and `ord`."""
        return self._table.seams

    @property
    def engines(self) -> list[str]:
        """Their names, in the order in which they come."""
        return list(self._table.engines)

    def start(self, number: int) -> int:
        """The offset of a block."""
        return self._table.start[number]

    def header(self, number: int) -> Header:
        """A block's."""
        found = self._headers.get(number)
        if found is None:
            found = self._headers[number] = _decode_header(self._table.headers[number])
        return found

    @property
    def headers(self) -> list[Header]:
        """All of them."""
        return [self.header(number) for number in range(len(self))]

    def gaps(self) -> Iterator[tuple[int, int, int]]:
        """Where blocks are missing: the number of the block behind, and the last seq before and in what is missing."""
        table = self._table
        before = [-1, *table.seq[1][:-1]]
        if table.after != before:
            for number, (found, expected) in enumerate(zip(table.after, before, strict=False)):
                if found != expected:
                    yield number, expected, found

    def between(self, seq: tuple[int | None, int | None]) -> range:
        """The blocks that may hold a seq within these bounds, both included."""
        first, last = seq
        low = 0 if first is None else bisect_left(self._table.seq[1], first)
        high = len(self) if last is None else bisect_right(self._table.seq[0], last)
        return range(low, high)

    def reach(self, engine: str) -> Reach | None:
        """How far an engine is in each block; None where no block holds anything of it."""
        return self._table.engines.get(engine)


def _reaches(headers: Sequence[Header]) -> dict[str, Reach]:
    names = dict.fromkeys(name for header in headers for name in header.engines)
    reaches = {}
    for name in names:
        parts = [header.engines.get(name) for header in headers]
        nowhere = (_NOWHERE, _NOWHERE)
        iterations = [nowhere if part is None else part.iteration for part in parts]
        epochs = [nowhere if part is None else part.epoch for part in parts]
        reaches[name] = Reach(_columns(iterations), _columns(epochs))
    return reaches


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [least for least, _ in pairs], [greatest for _, greatest in pairs]
