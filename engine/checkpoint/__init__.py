"""Checkpoints: each complete or absent, never half; none is ever overwritten; each checked before it is loaded."""

from __future__ import annotations

from engine.checkpoint.forms import Form, check_form
from engine.checkpoint.manager import CheckpointManager, check_name
from engine.checkpoint.places import CheckpointUrl, Place, place_of
from engine.checkpoint.reading import check_checkpoint, find_checkpoints, load_checkpoint
from engine.checkpoint.weights import Mismatch, load_safetensors, load_weights, save_safetensors

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
