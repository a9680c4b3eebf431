"""Files of checkpoints on the disk: digested and synced while they are written, without losing an error."""

import errno
import hashlib
import os

import pytest

from pulsetrain.engine.checkpoint import disk
from pulsetrain.engine.checkpoint.digests import write_digested

LARGE = os.urandom(1 << 21)


def test_a_digest_is_of_the_bytes_in_their_order(tmp_path):
    def write(file):
        for part in (LARGE, b"small", LARGE[::-1]):  # large ones are digested beside the writing
            file.write(part)

    entry = disk.write_file(tmp_path / "file", write)
    content = LARGE + b"small" + LARGE[::-1]
    assert (tmp_path / "file").read_bytes() == content
    assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_memory_may_change_after_a_write(tmp_path):
    def write(file):
        buffer = bytearray(LARGE)
        file.write(buffer)
        buffer[:] = bytes(len(buffer))
        file.write(buffer)

    entry = disk.write_file(tmp_path / "file", write)
    assert entry["sha256"] == hashlib.sha256(LARGE + bytes(len(LARGE))).hexdigest()


def test_a_system_that_writes_a_part_at_a_time_is_asked_again():
    written = bytearray()

    def put(data):
        written.extend(data[:100_000])
        return min(len(data), 100_000)

    entry = write_digested(put, lambda file: file.write(LARGE))
    assert bytes(written) == LARGE
    assert entry == {"bytes": len(LARGE), "sha256": hashlib.sha256(LARGE).hexdigest()}


def test_an_error_of_an_early_sync_is_not_lost(tmp_path, monkeypatch):
    """The system reports it once: the sync at the end of the file would succeed."""
    real, calls = os.fsync, []

    def fails_once(descriptor):
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(disk, "_SYNCED", 1 << 20)
    monkeypatch.setattr(os, "fsync", fails_once)
    with pytest.raises(OSError, match="Input/output error"):
        disk.write_file(tmp_path / "file", lambda file: file.write(LARGE))
    assert len(calls) == 1


def test_a_large_file_is_synced_while_it_is_written_and_at_its_end(tmp_path, monkeypatch):
    real, positions = os.fsync, []

    def noted(descriptor):
        positions.append(os.fstat(descriptor).st_size)
        real(descriptor)

    monkeypatch.setattr(disk, "_SYNCED", 1 << 20)
    monkeypatch.setattr(os, "fsync", noted)
    disk.write_file(tmp_path / "file", lambda file: [file.write(LARGE) for _ in range(4)])
    assert positions[-1] == 4 * len(LARGE)
    assert len(positions) >= 2
