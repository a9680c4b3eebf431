"""Checkpoints: each complete or absent, never half; none is ever overwritten; each checked before it is loaded."""

from __future__ import annotations

from pulsetrain.engine.checkpoint.formats import Form, check_form
from pulsetrain.engine.checkpoint.locations import CheckpointUrl, Place, place_of
from pulsetrain.engine.checkpoint.manager import CheckpointManager, check_name
from pulsetrain.engine.checkpoint.reader import check_checkpoint, find_checkpoints, load_checkpoint
from pulsetrain.engine.checkpoint.weights import Mismatch, load_safetensors, load_weights, save_safetensors

__all__ = [
    "CheckpointManager",
    "CheckpointUrl",
    "Form",
    "Mismatch",
    "Place",
    "check_checkpoint",
    "check_form",
    "check_name",
    "find_checkpoints",
    "load_checkpoint",
    "load_safetensors",
    "load_weights",
    "place_of",
    "save_safetensors",
]
