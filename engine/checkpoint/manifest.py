"""The manifest of a checkpoint: what it is called, and the size and digest of every file; it vouches for itself too."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["BEST", "FOLDER", "FORMATS", "MANIFEST", "STATES", "is_checkpoint_name", "parse_manifest", "seal", "unseal"]

MANIFEST, BEST = "manifest.json", "best"
FOLDER = re.compile(r"(?P<step>\d{9,})-(?P<name>[\w.+-]+?)(?:~(?P<again>\d+))?")
STATES = {1: "state.pt", 2: "state.pt", 3: "state.safetensors"}  # the state's file in each format
FORMATS = tuple(STATES)  # 1 had no digest of its own; 2 and 3 are written, by the form of the state

_FIELDS_OF_1 = frozenset({"format", "step", "name", "ordinal", "files"})


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is a checkpoint, or may become one."""
    return FOLDER.fullmatch(name) is not None


def seal(content: Mapping[str, Any]) -> bytes:
    """JSON with the digest of its own canonical form, so that any change of its bytes is found."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


def unseal(sealed: bytes) -> dict[str, Any]:
    """What was sealed.

    Raises:
        ValueError: any byte of it has changed.
    """
    content = _json_object(sealed)
    content.pop("sha256", None)
    # the bytes, not the values alone: a space that became a tab is damage too
    if seal(content) != sealed:
        raise ValueError("its digest is not its own")
    return content


def parse_manifest(text: bytes) -> dict[str, Any]:
    """A manifest whose entries can be relied on; of a format that is not known, as it is.

    Raises:
        ValueError: it is damaged; the message says how.
    """
    manifest = _json_object(text)
    if "format" not in manifest:
        raise ValueError("it names no format")
    number = manifest["format"]
    if number not in FORMATS or type(number) is not int:
        return manifest
    if number > 1:
        manifest = unseal(text)
    elif not manifest.keys() <= _FIELDS_OF_1:  # or one bit away from a later format would be without its digest
        raise ValueError(f"format 1 has no {', '.join(sorted(manifest.keys() - _FIELDS_OF_1))}")
    files = manifest.get("files")
    if not isinstance(files, dict) or STATES[number] not in files:
        raise ValueError("it has no list of files")
    if not all(re.fullmatch(r"\w[\w.+-]*", name) for name in files):
        raise ValueError("its list of files names one that cannot be in its folder")
    if not all(isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in files.values()):
        raise ValueError("its list of files has an entry without size or digest")
    if "ordinal" in manifest and type(manifest["ordinal"]) is not int:
        raise ValueError(f"its ordinal is {manifest['ordinal']!r}")
    return manifest


def _json_object(text: bytes) -> dict[str, Any]:
    content = json.loads(text.decode("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    return content
