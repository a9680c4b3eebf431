"""The blocks of a sealed file, their offsets and headers: from the table at its end, or from the blocks themselves.

The table is a skippable frame with "PTLT" that ends with its own length and "PTLE". It repeats every header. Lists over
all blocks beside them find one block of ten thousand without decoding the others' headers.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from pulsetrain.engine.recording.log.blocks import FRAME_BYTES, Data, Header, content_at, parse, skippable

__all__ = ["TABLE_MAGIC", "Index", "Reach"]

TABLE_MAGIC, END_MAGIC = b"PTLT", b"PTLE"
_END = struct.Struct("<Q4s")
_ABSENT = -1  # iteration and epoch of an engine in a block that holds none of its events


class Reach(msgspec.Struct, gc=False):
    """The least and the greatest iteration and epoch of an engine, by block; -1 for a block without its events."""

    iteration: tuple[list[int], list[int]]
    epoch: tuple[list[int], list[int]]


_encode = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(Header).decode


class Index(msgspec.Struct, dict=True, rename={"version": "v", "encoded": "headers"}):
    """The blocks of a sealed file, in order; encoded, it is the table."""

    version: int  # the newest format of any block
    events: int  # number of events in all blocks
    start: list[int]  # offsets of the blocks
    after: list[int]
    seq: tuple[list[int], list[int]]  # first and last
    engines: dict[str, Reach]  # in the order of their first events
    seams: list[tuple[int, int, int]]  # of all blocks: seq of each record, and its `after` and `ord`
    encoded: list[msgspec.Raw]  # the headers
    ord: tuple[list[int], list[int]] = ([], [])  # first and last; format 1 has none
    run: str = ""

    @classmethod
    def of_blocks(cls, blocks: Sequence[tuple[int, Header]] = ()) -> Index:
        """The index of the blocks with these offsets and headers."""
        headers = [header for _, header in blocks]
        index = cls(
            version=max([0, *(header.v for header in headers)]),
            events=sum(header.count for header in headers),
            start=[start for start, _ in blocks],
            after=[header.after for header in headers],
            seq=_columns([header.seq for header in headers]),
            engines=_reaches(headers),
            seams=[seam for header in headers for seam in header.seams],
            encoded=[],
            ord=_columns([header.ord for header in headers]),
            run=next((header.run for header in reversed(headers) if header.run), ""),
        )
        index._decoded.update(enumerate(headers))
        return index

    @cached_property
    def _decoded(self) -> dict[int, Header]:
        return {}

    @classmethod
    def of_table(cls, data: Data) -> tuple[Index, int] | None:
        """The index that the table at the end of the data describes, and the table's offset; None if it is damaged."""
        if len(data) < _END.size:
            return None
        length, magic = _END.unpack_from(data, len(data) - _END.size)
        start = len(data) - length
        if magic != END_MAGIC or start < 0:
            return None
        content = content_at(data, start, TABLE_MAGIC)
        if content is None:
            return None
        try:
            index = msgspec.json.decode(content[0][: -_END.size], type=cls)
        except msgspec.DecodeError:
            return None
        last = parse(data, index.start[-1]) if len(index) else None
        if len(index) and (last is None or last.end != start):  # the blocks before it are cut or damaged
            return None
        return index, start

    def table(self, version: int) -> bytes:
        """The frame that `of_table` reads."""
        headers = [msgspec.Raw(_encode(header)) for header in self.headers]
        content = _encode(msgspec.structs.replace(self, version=version, encoded=headers))
        return skippable(TABLE_MAGIC, content + _END.pack(FRAME_BYTES + len(content) + _END.size, END_MAGIC))

    def __len__(self) -> int:
        return len(self.start)

    @property
    def last_seq(self) -> int:
        """Seq of the last event; -1 if there are no blocks."""
        return self.seq[1][-1] if len(self) else -1

    @property
    def next_ord(self) -> int | None:
        """The ord after the last deterministic event, or the last seam's `ord`; None if there is neither."""
        for number in reversed(range(len(self))):
            header = self.header(number)
            if header.ord[1] >= 0:
                return header.ord[1] + 1
            if header.seams:  # a block begins at a seam
                return header.seams[-1][2]
        return None

    def header(self, number: int) -> Header:
        """Header of a block."""
        found = self._decoded.get(number)
        if found is None:
            found = self._decoded[number] = _decode_header(self.encoded[number])
        return found

    @property
    def headers(self) -> list[Header]:
        """Headers of all blocks."""
        return [self.header(number) for number in range(len(self))]

    def gaps(self) -> Iterator[tuple[int, int, int]]:
        """Missing blocks: the number of the block after each gap, and the last seq before and in the gap."""
        before = [-1, *self.seq[1][:-1]]
        if self.after != before:
            for number, (found, expected) in enumerate(zip(self.after, before, strict=False)):
                if found != expected:
                    yield number, expected, found

    def holding(self, record: str) -> list[int]:
        """Numbers of the blocks that hold a record of the log itself, which no engine published."""
        own = self.engines.get("")
        near = [number for number, last in enumerate(own.iteration[1]) if last >= 0] if own is not None else []
        return [number for number in near if record in self.header(number).engines[""].events]

    def between(self, seq: tuple[int | None, int | None]) -> range:
        """Numbers of the blocks that may hold a seq within these bounds, both included."""
        first, last = seq
        low = 0 if first is None else bisect_left(self.seq[1], first)
        high = len(self) if last is None else bisect_right(self.seq[0], last)
        return range(low, high)


def _reaches(headers: Sequence[Header]) -> dict[str, Reach]:
    names = dict.fromkeys(name for header in headers for name in header.engines)
    reaches = {}
    for name in names:
        parts = [header.engines.get(name) for header in headers]
        absent = (_ABSENT, _ABSENT)
        iterations = [absent if part is None else part.iteration for part in parts]
        epochs = [absent if part is None else part.epoch for part in parts]
        reaches[name] = Reach(_columns(iterations), _columns(epochs))
    return reaches


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [least for least, _ in pairs], [greatest for _, greatest in pairs]
