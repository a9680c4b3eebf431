"""The file formats of a checkpoint's state: torch's, or safetensors, whose arrays other tools can read."""

from __future__ import annotations

from typing import IO, Literal

import torch

from pulsetrain.engine.argument_checks import check_choice
from pulsetrain.engine.checkpoint.digests import Write
from pulsetrain.engine.checkpoint.manifest import STATES
from pulsetrain.engine.checkpoint.plain import Plain
from pulsetrain.engine.checkpoint.safetensors_file import file_writer, read_file
from pulsetrain.engine.checkpoint.tree_codec import decode_tree, encode_tree

__all__ = ["FORMS", "Form", "check_form", "read_state", "state_writer"]

Form = Literal["torch", "safetensors"]
FORMS: dict[Form, int] = {"torch": 2, "safetensors": 3}  # the manifest's format for each form

_TREE = "pulsetrain.checkpoint"  # the entry of the file's metadata with everything but the arrays


def state_writer(content: dict[str, Plain], form: Form) -> Write:
    """A function that writes the file of a plain state.

    Raises:
        CheckpointError: the form cannot hold the state.
    """
    if form == "torch":
        return lambda file: torch.save(content, file)
    tree, arrays = encode_tree(content)
    return file_writer(arrays, {_TREE: tree})


def read_state(file: IO[bytes], number: int) -> Plain:
    """Read a state from its file; tensors are on the CPU.

    Args:
        file: open for reading.
        number: the manifest's format.

    Raises:
        Exception: the file is not of that format.
    """
    if STATES[number] != STATES[FORMS["safetensors"]]:
        return torch.load(file, map_location="cpu", weights_only=True)
    arrays, metadata = read_file(file)
    if _TREE not in metadata:
        raise ValueError("it holds only arrays")
    return decode_tree(metadata[_TREE], arrays)


def check_form(caller: str, form: str | None) -> None:
    """Raise if there is no form of this name.

    Args:
        caller: function or class to name in the message.
        form: the name.

    Raises:
        ConfigurationError: there is none.
    """
    check_choice(caller, "form", form, FORMS)
