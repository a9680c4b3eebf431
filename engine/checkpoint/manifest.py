"""The manifest of a checkpoint: its name, the size and digest of every file, and a digest of the manifest itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, TypedDict, cast

__all__ = [
    "BEST", "DELETED", "FOLDER", "FORMATS", "MANIFEST", "STATES", "FileEntry", "Manifest", "is_checkpoint_name",
    "parse_manifest", "seal", "unseal",
]  # fmt: skip

MANIFEST, BEST = "manifest.json", "best"
DELETED = "deleted"  # the file that remembers the names of checkpoints that a rewind has deleted
FOLDER = re.compile(r"(?P<step>\d{9,})-(?P<name>[\w.+-]+?)(?:~(?P<repeat>\d+))?")
STATES = {1: "state.pt", 2: "state.pt", 3: "state.safetensors", 4: "state.safetensors"}  # the file in each format
FORMATS = tuple(STATES)  # 1 had no digest of its own; 2 and 3 are written by one process, 4 by several together

_FIELDS_OF_1 = frozenset({"format", "step", "name", "ordinal", "files"})


class FileEntry(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


class Manifest(TypedDict, total=False):
    """The content of a manifest."""

    format: int
    step: int
    name: str
    ordinal: int
    last_step: int  # the largest of any checkpoint so far, deleted ones included
    names: list[str]  # of the checkpoints of that step
    files: dict[str, FileEntry]
    unsaved: Mapping[str, list[str]]  # state of the run that the checkpoint lacks, by why


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name can be a checkpoint.

    >>> is_checkpoint_name("000001200-checkpoint"), is_checkpoint_name("latest")
    (True, False)
    """
    return FOLDER.fullmatch(name) is not None


def seal(content: Mapping[str, object]) -> bytes:
    """JSON that includes the digest of its own canonical form, so that any changed byte is detected."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


def unseal(sealed: bytes) -> dict[str, Any]:
    """The content that was sealed.

    >>> unseal(seal({"checkpoint": "000000001-checkpoint"}))
    {'checkpoint': '000000001-checkpoint'}

    Raises:
        ValueError: a byte has changed.
    """
    content = _json_object(sealed)
    content.pop("sha256", None)
    # compares bytes, not values: a space that became a tab is damage, too
    if seal(content) != sealed:
        raise ValueError("its digest does not match its content")
    return content


def parse_manifest(text: bytes) -> Manifest:
    """A checked manifest; one of an unknown format is returned unchecked.

    Raises:
        ValueError: it is damaged; the message says how.
    """
    manifest = _json_object(text)
    if "format" not in manifest:
        raise ValueError("it names no format")
    number = manifest["format"]
    if number not in FORMATS or type(number) is not int:
        return cast(Manifest, manifest)
    if number > 1:
        manifest = unseal(text)
    elif not manifest.keys() <= _FIELDS_OF_1:  # else one flipped bit in a later manifest would disable its digest
        raise ValueError(f"format 1 has no {', '.join(sorted(manifest.keys() - _FIELDS_OF_1))}")
    files = manifest.get("files")
    if not isinstance(files, dict) or STATES[number] not in files:
        raise ValueError("it has no list of files")
    if not all(re.fullmatch(r"\w[\w.+-]*", name) for name in files):
        raise ValueError("its list of files names one that cannot be in its folder")
    if not all(isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in files.values()):
        raise ValueError("its list of files has an entry without size or digest")
    if "ordinal" in manifest and type(manifest["ordinal"]) is not int:
        raise ValueError(f"its ordinal is {manifest['ordinal']!r}, not an integer")
    return cast(Manifest, manifest)


def _json_object(text: bytes) -> dict[str, object]:
    content = json.loads(text.decode("utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}")
    return content
