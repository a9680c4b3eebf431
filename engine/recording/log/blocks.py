"""Blocks of a sealed log: a zstd frame of lines, behind a skippable frame that says what is in it.

    skippable frame: 0x184D2A5E, length (4 bytes each, little endian), "PTLB", CRC-32 (4), header as JSON
    zstd frame:      the lines, with its own content checksum

The CRC is the header's; the header holds that of the zstd frame. `zstd -dc` passes over skippable frames.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pulsetrain.engine.recording.log.records import LoggedEvent, deterministic_parts

__all__ = [
    "BLOCK_EVENTS", "FRAME_BYTES", "SEAM", "EngineRange", "Header", "Parsed", "content_at", "find_next", "parse",
    "seal", "seam_of", "skippable", "unpack",
]  # fmt: skip

BLOCK_EVENTS = 1024  # a block ends where ord // 1024 changes
BLOCK_MAGIC = b"PTLB"
SEAM = "log_resumed"  # the event that marks where a resumed run goes on
_SKIPPABLE = b"\x5e\x2a\x4d\x18"
_FRAME = struct.Struct("<4sI4sI")
FRAME_BYTES = _FRAME.size  # before the content of a skippable frame
LEVEL = 1  # on lines of JSON it is faster than 3 and no larger


class EngineRange(msgspec.Struct, gc=False):
    """What a block holds of one engine."""

    iteration: tuple[int, int]  # first and last
    epoch: tuple[int, int]
    events: dict[str, int]  # how many of each


class Header(msgspec.Struct, gc=False):
    """What a block holds: enough to decide whether it need be read."""

    v: int  # format version
    after: int  # seq of the last event before, -1 for none: where it is not, blocks are missing
    seq: tuple[int, int]  # first and last
    ord: tuple[int, int]  # likewise; (-1, -1) where there are observed events alone
    t: tuple[int, int]
    count: int
    size: int  # bytes of the lines
    frame: int  # bytes of the zstd frame
    crc: int  # CRC-32 of the zstd frame
    digest: str  # the first 16 bytes of SHA-256 over the deterministic parts, joined by newlines
    engines: dict[str, EngineRange]
    seams: list[tuple[int, int, int]] = []  # of resumes in it: seq of the record, and its `after` and `ord`
    thinned: int = 0  # events that were taken out


class Parsed(NamedTuple):
    """A block found whole."""

    header: Header
    start: int  # of its skippable frame
    frame: int  # of its zstd frame
    end: int


_encode_header = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(Header).decode
_compressor: Any = None


def _compress(data: bytes) -> bytes:
    global _compressor
    if _compressor is None:
        import zstandard

        _compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    return bytes(_compressor.compress(data))


def seal(
    version: int,
    events: Sequence[LoggedEvent],
    lines: Sequence[bytes],
    after: int,
    thinned: int = 0,
    seq: tuple[int, int] | None = None,
) -> tuple[Header, bytes]:
    """A block of these events, in the order of seq, with their lines: its header, and both frames.

    Args:
        after: the last seq before it.
        thinned: how many events were taken out of it.
        seq: first and last, those that were taken out among them.
    """
    data = b"\n".join(lines) + b"\n"
    frame = _compress(data)
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
    )
    return header, skippable(BLOCK_MAGIC, _encode_header(header)) + frame


def _ranges(events: Sequence[LoggedEvent]) -> dict[str, EngineRange]:
    """Of each engine, in the order in which they come."""
    names = dict.fromkeys([event.engine for event in events])
    ranges = {}
    for name in names:
        of_it = [event for event in events if event.engine == name] if len(names) > 1 else events
        iterations, epochs = [event.iteration for event in of_it], {event.epoch for event in of_it}
        counts = Counter([event.event for event in of_it])
        ranges[name] = EngineRange((min(iterations), max(iterations)), (min(epochs), max(epochs)), dict(counts))
    return ranges


def seam_of(event: LoggedEvent) -> tuple[int, int, int]:
    """Of a record that marks one: its seq, the seq behind which events come again, and the ord of the first of them."""
    return event.seq, event.payload["after"], event.payload["ord"]


def skippable(magic: bytes, content: bytes) -> bytes:
    """A frame that zstd passes over, which `content_at` reads."""
    return _FRAME.pack(_SKIPPABLE, len(content) + 8, magic, zlib.crc32(content)) + content


def parse(data: Any, start: int) -> Parsed | None:
    """The block that begins at this offset of a buffer, its frame not yet read; None where there is no whole header."""
    found = content_at(data, start, BLOCK_MAGIC)
    if found is None:
        return None
    content, frame = found
    try:
        header = _decode_header(content)
    except msgspec.DecodeError:
        return None
    end = frame + header.frame
    return Parsed(header, start, frame, end) if end <= len(data) else None


def unpack(data: Any, block: Parsed) -> bytes | None:
    """The block's lines, each with its newline; None where the frame is damaged."""
    frame = bytes(data[block.frame : block.end])
    if zlib.crc32(frame) != block.header.crc:
        return None
    import zstandard

    return bytes(zstandard.ZstdDecompressor().decompress(frame, max_output_size=block.header.size))


def content_at(data: Any, start: int, magic: bytes) -> tuple[bytes, int] | None:
    """What a skippable frame of ours holds, and where it ends; None where there is no whole one."""
    if start + _FRAME.size > len(data):
        return None
    first, length, found, crc = _FRAME.unpack_from(data, start)
    end = start + 8 + length
    if first != _SKIPPABLE or found != magic or length < 8 or end > len(data):
        return None
    content = bytes(data[start + _FRAME.size : end])
    return (content, end) if zlib.crc32(content) == crc else None


def find_next(data: Any, start: int, magics: tuple[bytes, ...] = (BLOCK_MAGIC,)) -> int:
    """Where the next frame of ours may begin at or behind this offset; the buffer's length where nowhere."""
    while True:
        start = data.find(_SKIPPABLE, start)
        if start < 0:
            return len(data)
        if data[start + 8 : start + 12] in magics:
            return start
        start += 1
