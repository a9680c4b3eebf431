"""Checkpoints of tensors that several processes hold: each writes its piece, and any process reads what it needs."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pulsetrain.engine import CheckpointError
from pulsetrain.engine.checkpoint import CheckpointManager, check_checkpoint, load_checkpoint, reader
from pulsetrain.engine.checkpoint.disk import Disk
from pulsetrain.engine.checkpoint.formats import StateFile
from pulsetrain.engine.checkpoint.manifest import FileEntry
from pulsetrain.engine.checkpoint.pieces import Piece, StoredPiece, StoredTensor
from pulsetrain.engine.checkpoint.safetensors_file import Entry, file_writer, read_header
from pulsetrain.engine.checkpoint.snapshot import Snapshot

WHOLE = torch.arange(35, dtype=torch.float64).reshape(7, 5)


def quarter(rank: int) -> dict[str, Any]:
    """What one of four processes saves of a matrix: 4 or 3 rows, and 3 or 2 columns; two have the same bias."""
    row, column = divmod(rank, 2)
    block = WHOLE[4 * row : 4 * row + 4, 3 * column : 3 * column + 3]
    bias = Piece(torch.ones(2) * row, (4,), (2 * row,)) if column == 0 else Piece(torch.empty(0), (4,), (0,))
    matrix = Piece(block, (7, 5), (4 * row, 3 * column))
    weights = {"matrix": matrix, "bias": bias, "again": matrix, "tied": bias}
    return {"model": weights, "step": 3, "plain": torch.ones(1)}


class Four:
    """Processes 1 to 3, which write once they may."""

    def __init__(self, write: Callable[[int], Mapping[str, FileEntry]]) -> None:
        self._write, self.events = write, []  # type: ignore[var-annotated]

    def opened(self) -> None:
        self.events.append("opened")

    def written(self) -> dict[str, FileEntry]:
        assert self.events == ["opened"]
        return {name: entry for rank in (1, 2, 3) for name, entry in self._write(rank).items()}


def saved(folder: Path, without: tuple[int, ...] = ()) -> Path:
    manager = CheckpointManager(folder)
    target = manager.target("checkpoint", 7)
    write = lambda rank: {} if rank in without else manager.write_pieces(quarter(rank), target, rank)  # noqa: E731
    path = manager.save(quarter(0), step=7, form="safetensors", others=Four(write), target=target)
    assert isinstance(path, Path)
    return path


def test_a_process_writes_nothing_about_pieces_that_it_does_not_have(tmp_path: Path):
    folder = saved(tmp_path)
    for rank, names in ((1, {"model/matrix"}), (2, {"model/matrix", "model/bias"})):
        with (folder / f"rank-{rank:05d}.safetensors").open("rb") as file:
            entries, metadata = read_header(file)
        assert entries.keys() == names
        assert json.loads(metadata["pulsetrain.pieces"]).keys() == names


def test_of_a_checkpoint_that_another_process_has_checked_what_is_read_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, read, digest_of = saved(tmp_path), list[str](), reader.digest_of
    monkeypatch.setattr(reader, "digest_of", lambda file: read.append(Path(file.name).name) or digest_of(file))  # type: ignore[func-returns-value]
    damaged = folder / "rank-00003.safetensors"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="rank-00003"):
        load_checkpoint(folder, in_pieces=("model",))
    read.clear()
    matrix = load_checkpoint(folder, in_pieces=("model",), checked=True)["model"]["matrix"]  # type: ignore[call-overload,index]
    assert read == ["state.safetensors"]
    for _ in range(2):
        assert torch.equal(matrix.block((4, 0), (3, 3)), WHOLE[4:, :3])
    assert read == ["state.safetensors", "rank-00002.safetensors"]
    with pytest.raises(CheckpointError, match=r"rank-00003.*digest differs"):
        matrix.block((4, 3), (1, 1))
    with pytest.raises(CheckpointError, match=r"rank-00003.*digest differs"):
        load_checkpoint(folder, checked=True)


def test_a_tensor_without_items_is_saved_by_the_main_process(tmp_path: Path):
    manager, nothing = CheckpointManager(tmp_path), Piece(torch.empty(0, 3), (0, 3), (0, 0))
    target = manager.target("checkpoint", 7)
    state = {"model": {"nothing": nothing}}
    others = Four(lambda rank: manager.write_pieces(state, target, rank))
    path = manager.save(state, step=7, form="safetensors", others=others, target=target)
    assert load_checkpoint(path)["model"]["nothing"].shape == (0, 3)  # type: ignore[call-overload,index]


def test_pieces_of_four_processes_are_one_checkpoint(tmp_path: Path):
    path = saved(tmp_path)
    assert sorted(each.name for each in path.iterdir()) == [
        "manifest.json", "rank-00001.safetensors", "rank-00002.safetensors", "rank-00003.safetensors",
        "state.safetensors",
    ]  # fmt: skip
    found = load_checkpoint(path)
    assert found["step"] == 3
    assert found["plain"].tolist() == [1.0]
    assert found["model"]["matrix"].equal(WHOLE)
    assert found["model"]["bias"].tolist() == found["model"]["tied"].tolist() == [0, 0, 1, 1]
    assert found["model"]["again"].equal(WHOLE)
    assert CheckpointManager(tmp_path).size(path) == sum(each.stat().st_size for each in path.iterdir())


def test_a_process_reads_the_block_that_it_needs(tmp_path: Path):
    found = load_checkpoint(saved(tmp_path), in_pieces=("model",))["model"]["matrix"]
    assert type(found) is StoredTensor
    assert found.shape == (7, 5)
    assert found.dtype == torch.float64
    for top, left in product(range(7), range(5)):
        for height, width in product(range(8 - top), range(6 - left)):
            assert found.block((top, left), (height, width)).equal(WHOLE[top : top + height, left : left + width])


def test_of_a_long_piece_what_is_needed_is_read():
    file = io.BytesIO()
    file_writer({"long": torch.arange(200_000.0).reshape(1000, 200)}, {})(file)
    count = 0

    class Counting(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            nonlocal count
            count += len(buffer)
            return super().readinto(buffer)

    entry = read_header(io.BytesIO(file.getvalue()))[0]["long"]
    counting = lambda: Counting(file.getvalue())  # noqa: E731
    pieces = [StoredPiece.of(counting, entry, (at, 0)) for at in (1000, 0)]
    stored = StoredTensor("long", (2000, 200), torch.float32, pieces)
    assert stored.block((1500, 0), (3, 2)).tolist() == [[100_000, 100_001], [100_200, 100_201], [100_400, 100_401]]
    assert count == 3 * 2 * 4


def test_a_checkpoint_that_lacks_a_piece_is_not_committed(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"model/matrix: 26 of its 35 items are in the files"):
        saved(tmp_path, without=(2,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("in_pieces", [(), ("model",)])
def test_a_piece_that_no_file_has_is_an_error(
    in_pieces: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "check", lambda self, stored: None)
        path = saved(tmp_path, without=(2,))
    with pytest.raises(CheckpointError, match=r"model/matrix: 26 of its 35 items are in the files"):
        load_checkpoint(path, in_pieces=in_pieces)


def test_what_only_another_process_saves_is_named(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    target = manager.target("checkpoint", 7)

    def write(rank: int) -> Mapping[str, FileEntry]:
        more = {"average": Piece(torch.ones(1), (3,), (rank - 1,))}
        return manager.write_pieces({**quarter(rank), "handlers": more}, target, rank)

    with pytest.raises(CheckpointError, match="handlers/average: another process saves a part of it"):
        manager.save(quarter(0), step=7, form="safetensors", others=Four(write), target=target)


def test_a_folder_that_the_processes_do_not_share_is_an_error(tmp_path: Path):
    mine, theirs = CheckpointManager(tmp_path / "mine"), CheckpointManager(tmp_path / "theirs")
    target, other = mine.target("checkpoint", 7), theirs.target("checkpoint", 7)
    Disk().begin(other)
    others = Four(lambda rank: theirs.write_pieces(quarter(rank), other, rank))
    with pytest.raises(OSError, match="another process has written it, and this one does not see it"):
        mine.save(quarter(0), step=7, form="safetensors", others=others, target=target)
    assert mine.valid() == []


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        (((0, 0), (2, 0), (3, 0)), "two pieces overlap, at (2, 0) and (3, 0)"),
        (((0, 0), (2, 0), (5, 0)), "is not of this tensor"),
        (((0, 0), (0, 0), (4, 0)), "two pieces overlap, at (0, 0) and (0, 0)"),
    ],
    ids=["overlap", "beyond", "twice"],
)
def test_pieces_that_do_not_fit_are_refused(offsets: Any, said: str):
    entry = Entry(torch.float32, (2, 3), 0)
    pieces = [StoredPiece.of(io.BytesIO, entry, at) for at in offsets]
    with pytest.raises(CheckpointError, match=re.escape(said)):
        StoredTensor("w", (6, 3), torch.float32, pieces)
    for shape, dtype in (((6, 3), torch.float64), ((18,), torch.float32)):
        with pytest.raises(CheckpointError, match="is not of this tensor"):
            StoredTensor("w", shape, dtype, pieces)


def test_every_file_is_compared_with_the_manifest(tmp_path: Path):
    path = saved(tmp_path)
    file = path / "rank-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00002\.safetensors: its digest differs"):
        check_checkpoint(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"rank-00002\.safetensors: cannot be read"):
        check_checkpoint(path)


def test_a_process_that_cannot_write_leaves_no_checkpoint(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    target = manager.target("checkpoint", 7)

    def write(rank: int) -> Mapping[str, FileEntry]:
        if rank == 2:
            raise OSError(28, "No space left on device")
        return manager.write_pieces(quarter(rank), target, rank)

    with pytest.raises(OSError, match="No space left"):
        manager.save(quarter(0), step=7, form="safetensors", others=Four(write), target=target)
    assert list(tmp_path.iterdir()) == []
    assert manager.get_latest() is None


def test_a_copy_of_a_state_has_its_pieces():
    state = quarter(0)
    copy = Snapshot().copy(state)
    expected: Tensor = state["model"]["matrix"].data.clone()
    state["model"]["matrix"].data.zero_()
    piece = copy["model"]["matrix"]
    assert piece.data.equal(expected)
    assert (piece.shape, piece.offset) == ((7, 5), (0, 0))
    WHOLE[:] = torch.arange(35, dtype=torch.float64).reshape(7, 5)


def test_a_type_that_safetensors_lacks_is_refused(tmp_path: Path):
    piece = Piece(torch.ones(2, dtype=torch.complex128), (4,), (0,))
    with pytest.raises(CheckpointError, match=r"checkpoint\['w'\]: torch.complex128 cannot be saved in pieces"):
        CheckpointManager(tmp_path).save({"w": piece}, form="safetensors")


def test_a_tensor_with_the_memory_of_a_piece_is_one_of_its_own(tmp_path: Path):
    manager = CheckpointManager(tmp_path)
    data = torch.ones(2)
    state = {"mine": data, "model": Piece(data, (2,), (0,)), "again": data}
    found = load_checkpoint(manager.save(state, form="safetensors"))
    assert [found[name].tolist() for name in ("mine", "model", "again")] == [[1.0, 1.0]] * 3
