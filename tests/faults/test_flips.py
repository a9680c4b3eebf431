"""Any changed byte and any truncated file of a checkpoint is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.checkpoint.formats import FORMS, Form
from pulsetrain.engine.errors import CheckpointError

FILES = ("state", "manifest.json")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


@pytest.fixture
def checkpoint(tmp_path: Path, form: Form) -> Path:
    return CheckpointManager(tmp_path).save({"w": torch.arange(3.0), "n": 7}, "c", step=12, form=form)


def file_of(checkpoint: Path, name: str) -> Path:
    (file,) = checkpoint.glob(f"{name}*")
    return file


@contextmanager
def restored(file: Path) -> Iterator[bytes]:
    """The file's content, which is restored at the end; the checkpoint then loads again."""
    content = file.read_bytes()
    yield content
    file.write_bytes(content)
    assert load_checkpoint(file.parent)["n"] == 7


def noticed(path: Path) -> bool:
    """Whether loading refuses it by the project's own error; any other one fails the test."""
    try:
        load_checkpoint(path)
    except CheckpointError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed(name: str, checkpoint: Path):
    file = file_of(checkpoint, name)
    with restored(file) as content:
        unnoticed = []
        for position in range(len(content)):
            for mask in (1, 2, 4, 8, 16, 32, 64, 128):
                damaged = bytearray(content)
                damaged[position] ^= mask
                file.write_bytes(damaged)
                if not noticed(checkpoint):
                    unnoticed.append((position, mask))
        assert unnoticed == []


@pytest.mark.slow
def test_every_changed_byte_of_the_manifest_is_noticed(checkpoint: Path):
    file = checkpoint / "manifest.json"
    with restored(file) as content:
        unnoticed = []
        for position in range(len(content)):
            for value in {*b' \t\n\r"{}[]:,0123456789abcdefABCDEFfnt\\\x00\xff'} - {content[position]}:
                file.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
                if not noticed(checkpoint):
                    unnoticed.append((position, value))
        assert unnoticed == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_cut_is_noticed(name: str, checkpoint: Path):
    file = file_of(checkpoint, name)
    with restored(file) as content:
        unnoticed = []
        for length in range(len(content)):
            file.write_bytes(content[:length])
            if not noticed(checkpoint):
                unnoticed.append(length)
        assert unnoticed == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_grew_or_is_gone_is_noticed(name: str, checkpoint: Path):
    file = file_of(checkpoint, name)
    with restored(file) as content:
        for longer in (content + b"\x00", content + b"\n", b" " + content, content + content):
            file.write_bytes(longer)
            assert noticed(checkpoint)
        file.unlink()
        assert noticed(checkpoint)


def test_a_damaged_checkpoint_is_skipped_whichever_byte_it_is(checkpoint: Path, form: Form):
    manager = CheckpointManager(checkpoint.parent)
    newer = manager.save({"w": torch.ones(3), "n": 8}, "c", step=13, form=form)
    for name in FILES:
        file = file_of(newer, name)
        content = file.read_bytes()
        for position in range(0, len(content), 29):
            damaged = bytearray(content)
            damaged[position] ^= 0xFF
            file.write_bytes(damaged)
            assert manager.get_latest() == checkpoint
        file.write_bytes(content)
    assert manager.get_latest() == newer
