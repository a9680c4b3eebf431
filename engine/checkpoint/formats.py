"""The file formats of a checkpoint's state: torch's, or safetensors, whose arrays other tools can read.

Processes that each hold a piece of the tensors write a safetensors file each. That of the main process has all the
rest of the state as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Literal, NamedTuple

import torch

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.blocks import Block
from pulsetrain.engine.checkpoint.digests import Write
from pulsetrain.engine.checkpoint.manifest import STATES
from pulsetrain.engine.checkpoint.pieces import Piece, StoredPiece, check_cover
from pulsetrain.engine.checkpoint.plain import Plain
from pulsetrain.engine.checkpoint.safetensors_file import file_writer, read_file, read_header
from pulsetrain.engine.checkpoint.tree_codec import Encoded, decode_tree, encode_tree
from pulsetrain.engine.errors import CheckpointError

__all__ = [
    "FORMS",
    "IN_PIECES",
    "Form",
    "StateFile",
    "check_form",
    "piece_file",
    "read_state",
    "state_file",
    "stored_pieces",
]

Form = Literal["torch", "safetensors"]
FORMS: dict[Form, int] = {"torch": 2, "safetensors": 3}  # the manifest's format for each form
IN_PIECES = 4

# entries of a file's metadata: everything but the arrays, and where those that are pieces begin
_TREE, _OFFSETS = "pulsetrain.checkpoint", "pulsetrain.pieces"


class StateFile(NamedTuple):
    """How a state is written."""

    write: Write
    format: int  # for the manifest
    pieces: Mapping[str, Piece] = {}  # of this process, by the name of their tensor

    @property
    def name(self) -> str:
        """The file's name in the checkpoint's folder."""
        return STATES[self.format]

    def check(self, stored: Mapping[str, Sequence[StoredPiece]]) -> None:
        """Check that the pieces in the files of all processes are the tensors of this state.

        Raises:
            CheckpointError: a tensor lacks a part, or only another process has it; the message names it.
        """
        # a piece without items belongs to a tensor that others save, under its first name if it has several
        others = sorted(
            name
            for name in stored.keys() - self.pieces.keys()
            if any(math.prod(each.block.shape) for each in stored[name])
        )
        if others:
            raise CheckpointError(
                f"{others[0]}: another process saves a part of it, and the main one has no such tensor: the processes "
                "need the same model and handlers"
            )
        for name, piece in self.pieces.items():
            check_cover(name, piece.shape, piece.data.dtype, stored.get(name, ()))


def state_file(content: dict[str, Plain], form: Form) -> StateFile:
    """How to write the file of a plain state, with the pieces that this process has of its tensors.

    Raises:
        CheckpointError: the form cannot hold the state.
    """
    if form == "torch":
        return StateFile(lambda file: torch.save(content, file), FORMS[form])
    encoded = encode_tree(content)
    metadata = {_TREE: encoded.text}
    if not encoded.pieces:
        return StateFile(file_writer(encoded.arrays, metadata), FORMS[form])
    return StateFile(file_writer(encoded.arrays, metadata | _offsets(encoded)), IN_PIECES, encoded.pieces)


def piece_file(content: dict[str, Plain]) -> Write:
    """A function that writes the pieces alone that a process has of a state, of which another one writes the rest."""
    encoded = encode_tree(content)
    # without those that another process writes, or nobody has: readers look at each piece of each file
    encoded = encoded._replace(pieces={name: each for name, each in encoded.pieces.items() if each.data.numel()})
    return file_writer({name: encoded.arrays[name] for name in encoded.pieces}, _offsets(encoded))


def stored_pieces(files: Iterable[Callable[[], IO[bytes]]]) -> dict[str, list[StoredPiece]]:
    """The pieces in a checkpoint's files, by the name of their tensor.

    Args:
        files: functions that open one each.
    """
    found: dict[str, list[StoredPiece]] = {}
    for open_file in files:
        with open_file() as opened:
            entries, metadata = read_header(opened)
        for name, offset in json.loads(metadata.get(_OFFSETS, "{}")).items():
            pieces, entry = found.setdefault(name, []), entries[name]
            if isinstance(offset, dict):
                blocks = [Block(*map(tuple, each)) for each in offset["blocks"]]
                pieces += [StoredPiece(open_file, entry, each) for each in blocks]
            else:
                pieces.append(StoredPiece.of(open_file, entry, offset))
    return found


def read_state(file: IO[bytes], number: int, pieces: Mapping[str, list[StoredPiece]] | None = None) -> Plain:
    """Read a state from its file; tensors are on the CPU, and those in pieces are stored tensors.

    Args:
        file: open for reading.
        number: the manifest's format.
        pieces: those in all files.

    Raises:
        Exception: the file is not of that format.
    """
    if STATES[number] != STATES[FORMS["safetensors"]]:
        return torch.load(file, map_location="cpu", weights_only=True)
    pieces = pieces or {}
    arrays, metadata = read_file(file, without=pieces)
    if _TREE not in metadata:
        raise ValueError("it holds only arrays")
    return decode_tree(metadata[_TREE], arrays, pieces)


def _offsets(encoded: Encoded) -> dict[str, str]:
    """Where each piece begins in its tensor; or, of one that is made of several blocks, where each of them is."""
    found = {name: {"blocks": each.blocks} if each.blocks else each.offset for name, each in encoded.pieces.items()}
    return {_OFFSETS: json.dumps(found)}


def check_form(caller: str, form: str | None) -> None:
    """Raise if there is no form of this name.

    Args:
        caller: function or class to name in the message.
        form: the name.

    Raises:
        ConfigurationError: there is none.
    """
    check_choice(caller, "form", form, FORMS)
