"""A state to be saved, and manifests that vouch for what has been altered."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from pulsetrain.engine.checkpoint.manifest import seal, unseal

STATE = {"weights": torch.arange(5.0), "step": 3, "nested": {"rates": [0.1, float("inf")]}}


def relabel(path: Path, **labels: Any) -> None:
    """Another manifest that vouches for itself; None takes a label away."""
    manifest = {**unseal((path / "manifest.json").read_bytes()), **labels}
    (path / "manifest.json").write_bytes(seal({name: value for name, value in manifest.items() if value is not None}))


def vouch(path: Path) -> None:
    """Have the manifest vouch for the state that is there now."""
    name = state_file(path).name
    state = (path / name).read_bytes()
    relabel(path, files={name: {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}})


def state_file(path: Path) -> Path:
    """The file with a checkpoint's state, of whichever form."""
    (file,) = path.glob("state.*")
    return file
