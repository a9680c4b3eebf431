"""Checkpoints: each is complete or absent, never half-written; none is overwritten; all are checked before loading."""

from __future__ import annotations

from pulsetrain.engine.checkpoint.choice import load_checkpoint, resolve
from pulsetrain.engine.checkpoint.formats import Form, check_form
from pulsetrain.engine.checkpoint.frozen import leave_out_frozen
from pulsetrain.engine.checkpoint.locations import CheckpointUrl, Location, location_of
from pulsetrain.engine.checkpoint.manager import CheckpointManager, check_name
from pulsetrain.engine.checkpoint.reader import check_checkpoint, find_checkpoints
from pulsetrain.engine.checkpoint.weights import Mismatch, load_safetensors, load_weights, save_safetensors

__all__ = [
    "CheckpointManager",
    "CheckpointUrl",
    "Form",
    "Mismatch",
    "Location",
    "check_checkpoint",
    "check_form",
    "check_name",
    "find_checkpoints",
    "leave_out_frozen",
    "load_checkpoint",
    "load_safetensors",
    "load_weights",
    "location_of",
    "resolve",
    "save_safetensors",
]
