"""Blocks of a sealed log: a skippable frame that describes the block, then a zstd frame with its lines.

    skippable frame: 0x184D2A5E, length (4 bytes each, little endian), "PTLB", CRC-32 (4), header as JSON
    zstd frame:      the lines, with its own content checksum

The CRC covers the header; the header holds the CRC of the zstd frame. `zstd -dc` ignores skippable frames.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from pulsetrain.engine.recording.log.records import LoggedEvent, deterministic_parts

if TYPE_CHECKING:
    from zstandard import ZstdCompressor

__all__ = [
    "BLOCK_BYTES", "BLOCK_EVENTS", "BLOCK_MAGIC", "FRAME_BYTES", "SEAM", "Block", "Data", "EngineRange", "Header",
    "content_at", "find_next", "parse", "seal", "seam_of", "skippable", "unpack",
]  # fmt: skip

Data: TypeAlias = mmap.mmap | bytes  # the content of a sealed file

BLOCK_EVENTS = 1024  # a block ends where ord // 1024 changes,
BLOCK_BYTES = 1 << 24  # or after so many bytes of lines
_MOST_BYTES = 1 << 26  # that a block is read with: a forged header must not fill the memory
BLOCK_MAGIC = b"PTLB"
SEAM = "log_resumed"  # the event that marks where a resumed run continues
_SKIPPABLE = b"\x5e\x2a\x4d\x18"
_FRAME = struct.Struct("<4sI4sI")
FRAME_BYTES = _FRAME.size  # before the content of a skippable frame
LEVEL = 1  # on lines of JSON it is faster than 3, and the result is no larger


class EngineRange(msgspec.Struct, gc=False):
    """The events of one engine in a block."""

    iteration: tuple[int, int]  # least and greatest
    epoch: tuple[int, int]
    events: dict[str, int]  # number of each type


class Header(msgspec.Struct, gc=False):
    """Describes a block: enough to decide whether to read it."""

    v: int  # format version
    after: int  # seq of the last event of the block before, -1 for none: any other shows that blocks are missing
    seq: tuple[int, int]  # first and last
    ord: tuple[int, int]  # first and last; (-1, -1) if all events are observed ones
    t: tuple[int, int]
    count: int
    size: int  # bytes of the lines
    frame: int  # bytes of the zstd frame
    crc: int  # CRC-32 of the zstd frame
    digest: str  # the first 16 bytes of SHA-256 over the deterministic parts, joined by newlines
    engines: dict[str, EngineRange]
    seams: list[tuple[int, int, int]] = []  # one for each resume: seq of its record, and the record's `after` and `ord`
    thinned: int = 0  # events that were removed
    run: str = ""  # id of the run; format 1 has none


class Block(NamedTuple):
    """Where a complete block is in a file."""

    header: Header
    start: int  # of its skippable frame
    frame: int  # of its zstd frame
    end: int


_encode_header = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(Header).decode


@cache
def _compressor() -> ZstdCompressor:
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)


def seal(
    version: int,
    events: Sequence[LoggedEvent],
    lines: Sequence[bytes],
    after: int,
    thinned: int = 0,
    seq: tuple[int, int] | None = None,
    run: str = "",
) -> tuple[Header, bytes]:
    """Make a block of these events, in the order of seq, and their lines: its header, and both frames.

    Args:
        after: the last seq before it.
        thinned: how many events were removed from it.
        seq: first and last, removed events included; by default those of `events`.
        run: id of the run.
    """
    import hashlib  # here: readers do without it

    data = b"\n".join(lines) + b"\n"
    frame = bytes(_compressor().compress(data))
    ords = [event.ord for event in events if event.ord >= 0]
    parts = deterministic_parts(events, lines)
    header = Header(
        v=version,
        after=after,
        seq=seq or (events[0].seq, events[-1].seq),
        ord=(ords[0], ords[-1]) if ords else (-1, -1),
        t=(events[0].t, events[-1].t),
        count=len(events),
        size=len(data),
        frame=len(frame),
        crc=zlib.crc32(frame),
        digest=hashlib.sha256(b"\n".join(parts)).hexdigest()[:32],
        engines=_ranges(events),
        seams=[seam_of(event) for event in events if event.event == SEAM],
        thinned=thinned,
        run=run,
    )
    return header, skippable(BLOCK_MAGIC, _encode_header(header)) + frame


def _ranges(events: Sequence[LoggedEvent]) -> dict[str, EngineRange]:
    """The range of each engine, in the order of their first events."""
    names = dict.fromkeys([event.engine for event in events])
    ranges = {}
    for name in names:
        of_it = [event for event in events if event.engine == name] if len(names) > 1 else events
        iterations, epochs = [event.iteration for event in of_it], {event.epoch for event in of_it}
        counts = Counter([event.event for event in of_it])
        ranges[name] = EngineRange((min(iterations), max(iterations)), (min(epochs), max(epochs)), dict(counts))
    return ranges


def seam_of(event: LoggedEvent) -> tuple[int, int, int]:
    """A seam's seq, the last seq before the events that it supersedes, and the ord of the first new event.

    The seq is that of its record, except for a record that replaces a lost one.
    """
    return event.payload.get("seq", event.seq), event.payload["after"], event.payload["ord"]


def skippable(magic: bytes, content: bytes) -> bytes:
    """A frame that zstd ignores and `content_at` reads."""
    return _FRAME.pack(_SKIPPABLE, len(content) + 8, magic, zlib.crc32(content)) + content


def parse(data: Data, start: int) -> Block | None:
    """The block at this offset, its zstd frame unread; None if there is no valid header, or the frame is cut off."""
    found = content_at(data, start, BLOCK_MAGIC)
    if found is None:
        return None
    content, frame = found
    try:
        header = _decode_header(content)
    except msgspec.DecodeError:
        return None
    end = frame + header.frame
    return Block(header, start, frame, end) if end <= len(data) else None


def unpack(data: Data, block: Block) -> bytes | None:
    """The block's lines, each with its newline; None if the frame is damaged, or holds other lines than it should."""
    frame, header = bytes(data[block.frame : block.end]), block.header
    if zlib.crc32(frame) != header.crc or header.size > _MOST_BYTES:
        return None
    import zstandard

    try:
        if zstandard.frame_content_size(frame) != header.size:
            return None
        lines = bytes(zstandard.ZstdDecompressor().decompress(frame))
    except zstandard.ZstdError:
        return None
    return lines if lines.count(b"\n") == header.count and lines.endswith(b"\n") else None


def content_at(data: Data, start: int, magic: bytes) -> tuple[bytes, int] | None:
    """The content of the skippable frame with this magic, and its end; None if it is missing, damaged or cut off.

    >>> content_at(skippable(b"PTLB", b"{}"), 0, b"PTLB")
    (b'{}', 18)
    """
    if start + _FRAME.size > len(data):
        return None
    first, length, found, crc = _FRAME.unpack_from(data, start)
    end = start + 8 + length
    if first != _SKIPPABLE or found != magic or length < 8 or end > len(data):
        return None
    content = bytes(data[start + _FRAME.size : end])
    return (content, end) if zlib.crc32(content) == crc else None


def find_next(data: Data, start: int, magics: tuple[bytes, ...] = (BLOCK_MAGIC,)) -> int:
    """The offset of the next possible frame with one of these magics, from `start` on; the data's length if none."""
    while True:
        start = data.find(_SKIPPABLE, start)
        if start < 0:
            return len(data)
        if data[start + 8 : start + 12] in magics:
            return start
        start += 1
