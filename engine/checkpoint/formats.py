"""The forms that a state's file may have: torch's, or safetensors', whose arrays other tools read."""

from __future__ import annotations

from typing import IO, Any, Literal

import torch

from pulsetrain.engine.checkpoint.digesting import Write
from pulsetrain.engine.checkpoint.manifest import STATES
from pulsetrain.engine.checkpoint.safetensors_file import file_writer, read_file
from pulsetrain.engine.checkpoint.tree_codec import put_together, take_apart
from pulsetrain.engine.errors import unknown_name

__all__ = ["FORMS", "Form", "check_form", "read_state", "state_writer"]

Form = Literal["torch", "safetensors"]
FORMS: dict[Form, int] = {"torch": 2, "safetensors": 3}  # the manifest's format that goes with each

_SKELETON = "pulsetrain.checkpoint"  # the entry of the metadata with all that is no array


def state_writer(content: dict[str, Any], form: Form) -> Write:
    """What writes a plain state's file.

    Raises:
        CheckpointError: the form has no room for it.
    """
    if form == "torch":
        return lambda file: torch.save(content, file)
    skeleton, arrays = take_apart(content)
    return file_writer(arrays, {_SKELETON: skeleton})


def read_state(file: IO[bytes], number: int) -> Any:
    """The state from its file, on the CPU.

    Args:
        file: open for reading.
        number: the manifest's format.

    Raises:
        Exception: it is no such file.
    """
    if STATES[number] != STATES[FORMS["safetensors"]]:
        return torch.load(file, map_location="cpu", weights_only=True)
    arrays, metadata = read_file(file)
    if _SKELETON not in metadata:
        raise ValueError("it holds arrays alone")
    return put_together(metadata[_SKELETON], arrays)


def check_form(place: str, form: str | None) -> None:
    """Whether there is a form of this name.

    Raises:
        ConfigurationError: there is none.
    """
    if form not in FORMS:
        raise unknown_name(place, "form", form, tuple(FORMS))
