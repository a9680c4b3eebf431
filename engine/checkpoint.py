"""Checkpoints on disk: each complete or absent, never half; none is ever overwritten.

The order of writing: a temporary folder, its files, fsync, a manifest with every file's size and digest, fsync,
rename, fsync of the parent; then the pointer to the best one; only then older ones are deleted. What could not be
loaded again is refused before the first file is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from engine.errors import CheckpointError, ConfigurationError, RunFolderError
from engine.logs import get_logger

__all__ = ["CheckpointManager", "check_checkpoint", "find_checkpoints", "load_checkpoint"]

FORMAT = 1
_STATE, _MANIFEST, _BEST, _PARTIAL = "state.pt", "manifest.json", "best", ".partial-"
_FOLDER = re.compile(r"(?P<step>\d{9,})-(?P<name>[\w.+-]+?)(?:~(?P<again>\d+))?")

# what torch.load(weights_only=True) reads back as it was; subclasses bring their own class along, which it refuses
_WHOLE = frozenset({str, bool, float, type(None), torch.Size, torch.dtype, torch.device})
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_KEYS = frozenset({str, bool, int, float, type(None)})
_INT_BITS = 2039  # of the largest integer that it reads


class CheckpointManager:
    """Saves, finds and loads checkpoints in one folder; needs no engine. One writer at a time.

    Args:
        checkpoint_dir: made where it is missing. What a crash left half-written there is removed.
        keep_last_n: how many of the newest stay; the best one stays as well.

    Raises:
        ConfigurationError: keep_last_n is no whole number of at least 1.
        RunFolderError: the folder cannot be made or written.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str], keep_last_n: int = 3) -> None:
        if not isinstance(keep_last_n, int) or isinstance(keep_last_n, bool) or keep_last_n < 1:
            raise ConfigurationError(f"CheckpointManager({keep_last_n=}): needs a whole number of at least 1")
        self.checkpoint_dir = Path(checkpoint_dir)
        self.keep_last_n = keep_last_n
        try:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            for leftover in self.checkpoint_dir.glob(f"{_PARTIAL}*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()
        except OSError as error:
            raise RunFolderError(f"CheckpointManager({str(checkpoint_dir)!r}): cannot be used: {error}") from error

    def save(
        self,
        checkpoint: Mapping[str, Any],
        name: str = "checkpoint",
        is_best: bool = False,
        *,
        step: int | None = None,
        keep: Iterable[Path] = (),
    ) -> Path:
        """Write a checkpoint; when this returns it is durable.

        Args:
            checkpoint: dicts, lists and tuples of tensors, strings, bytes, numbers and None. numpy's scalars become
                numbers, its arrays tensors.
            name: labels the folder; a name used again makes a new folder.
            is_best: point `get_best` at it.
            step: what the folder is numbered by; by default one more than the largest there.
            keep: older checkpoints that stay whatever `keep_last_n` says.

        Raises:
            ConfigurationError: the name has other characters than letters, digits, `_`, `.`, `+` and `-`.
            CheckpointError: the checkpoint holds what could not be loaded again; it says where. Nothing was written.
            OSError: it could not be written; earlier checkpoints are as they were.
        """
        check_name("save", name)
        try:
            content = _plain(dict(checkpoint), ())
        except RecursionError:
            raise CheckpointError("checkpoint: holds a container that is too deep, or that holds itself") from None
        present = find_checkpoints(self.checkpoint_dir)
        if step is None:
            step = max((_number(folder)[0] for folder in present), default=-1) + 1
        ordinal = 1 + max((_ordinal(folder) or 0 for folder in present), default=0)
        target = self.target(name, step)
        partial = self.checkpoint_dir / f"{_PARTIAL}{target.name}"
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that failed
        partial.mkdir()
        try:
            self._write(partial, content, {"step": step, "name": name, "ordinal": ordinal})
            os.rename(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync_folder(self.checkpoint_dir)
        if is_best:
            self._point_best(target)
        self._prune({target, *keep})
        return target

    def target(self, name: str, step: int) -> Path:
        """The folder that the next checkpoint of this name and step gets."""
        target, again = self.checkpoint_dir / f"{step:09d}-{name}", 1
        while target.exists():
            again += 1
            target = self.checkpoint_dir / f"{step:09d}-{name}~{again}"
        return target

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """`load_checkpoint`, which needs no manager."""
        return load_checkpoint(path)

    def valid(self) -> list[Path]:
        """The checkpoints that are complete and undamaged, oldest first."""
        return [folder for folder in find_checkpoints(self.checkpoint_dir) if _damage(folder) is None]

    def get_latest(self) -> Path | None:
        """The last written checkpoint that is complete and undamaged, or None; says which others it passed over.

        Those whose manifest cannot be read may be newer or older than it: they are named as well.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
        """
        folders = find_checkpoints(self.checkpoint_dir)
        unplaced = [folder for folder in folders if _ordinal(folder) is None]
        placed = folders[len(unplaced) :]
        for folder in (*reversed(unplaced), *reversed(placed)):
            damage = _damage(folder)
            if damage is None:
                return folder
            get_logger("engine").warning("checkpoint passed over", reason=damage)
        if folders:
            raise CheckpointError(
                f"{self.checkpoint_dir}: every checkpoint there is damaged ({len(folders)} of them, the newest "
                f"{folders[-1].name}); remove the folder to start from the beginning"
            )
        return None

    def get_best(self) -> Path | None:
        """The checkpoint last saved as the best, or None."""
        try:
            folder = self.checkpoint_dir / (self.checkpoint_dir / _BEST).read_text().strip()
        except FileNotFoundError:
            return None
        return folder if folder.is_dir() else None

    def _write(self, folder: Path, content: dict[str, Any], labels: dict[str, Any]) -> None:
        state = folder / _STATE
        with state.open("wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:
                # of a write that failed, torch says "unexpected pos"; the OSError that it stands for is its context
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())
        files = {_STATE: {"bytes": state.stat().st_size, "sha256": _digest(state)}}
        manifest = {"format": FORMAT, **labels, "files": files}
        _write_text(folder / _MANIFEST, json.dumps(manifest, indent=2))
        _sync_folder(folder)

    def _point_best(self, target: Path) -> None:
        pointer = self.checkpoint_dir / f"{_PARTIAL}{_BEST}.file"
        _write_text(pointer, target.name + "\n")
        os.replace(pointer, self.checkpoint_dir / _BEST)
        _sync_folder(self.checkpoint_dir)

    def _prune(self, keep: set[Path]) -> None:
        folders = find_checkpoints(self.checkpoint_dir)
        best = self.get_best()
        for folder in folders[: -self.keep_last_n]:
            if folder not in keep and folder != best:
                # renamed first: a deletion cut short leaves no folder that looks like a checkpoint
                doomed = folder.with_name(f"{_PARTIAL}{folder.name}.deleted")
                os.rename(folder, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def check_name(place: str, name: str) -> None:
    """Whether a checkpoint's folder can be called so.

    Raises:
        ConfigurationError: it cannot.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
        raise ConfigurationError(f"{place}({name=}): use letters, digits, '_', '.', '+' and '-' only")


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones too, in the order of their writing, the oldest first.

    Those whose manifest cannot be read stand before the others, by their step: nothing says when they were written.
    """
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))
    return sorted(found, key=_age)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a checkpoint after checking it against its manifest; tensors come to the CPU. Nothing is written.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, of a newer format or holds code; the message says which.
    """
    folder = Path(path)
    check_checkpoint(folder)
    file = folder / _STATE
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file holds that is no checkpoint of ours
        # without torch's advice, which is to load it with weights_only=False
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{named[1]}, which is" if named else "what is"
        why = f"it holds {what} no plain value, and was not run" if isinstance(error, UnpicklingError) else str(error)
        raise CheckpointError(f"{file}: cannot be loaded: {why}; load another checkpoint") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file}: holds a {type(loaded).__name__}, which is no checkpoint; load another one")
    return loaded


def check_checkpoint(folder: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    try:
        manifest = _read_manifest(folder)
    except FileNotFoundError:
        known = ", ".join(each.name for each in find_checkpoints(folder.parent)) or "none"
        raise CheckpointError(f"{folder}: no checkpoint there ({_MANIFEST} is missing); present: {known}") from None
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{folder}: format {manifest['format']}, this version reads {FORMAT}; update pulsetrain")
    for name, expected in manifest["files"].items():
        file = folder / name
        try:
            size, digest = file.stat().st_size, _digest(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
        if size != expected["bytes"]:
            raise CheckpointError(f"{file}: {size} bytes, the manifest says {expected['bytes']}: cut or damaged")
        if digest != expected["sha256"]:
            raise CheckpointError(f"{file}: its digest is not the manifest's: damaged; load an older checkpoint")


def _plain(value: Any, path: tuple[Any, ...]) -> Any:
    """The value as torch.load(weights_only=True) will read it: itself, or a copy where numpy's objects were in it."""
    kind = type(value)
    if kind in _WHOLE or (kind is int and value.bit_length() <= _INT_BITS) or (kind is bytes and value):
        return value
    if kind in _TENSORS:
        _plain(vars(value), (*path, "__dict__"))  # attributes are saved with a tensor
        return value
    if kind is dict or kind is OrderedDict:
        # an OrderedDict has attributes: a module's state_dict() keeps its versions there
        attributes = _plain(vars(value), (*path, "__dict__")) if kind is OrderedDict else None
        pairs = [(_plain_key(key, path), _plain(item, (*path, key))) for key, item in value.items()]
        same = all(new[0] is key and new[1] is item for new, (key, item) in zip(pairs, value.items(), strict=True))
        if same and (attributes is None or attributes is vars(value)):
            return value
        changed = kind(pairs)
        if attributes is not None:
            vars(changed).update(attributes)
        return changed
    if kind is list or kind is tuple:
        # numbers are passed over without a call: a history has a million of them
        items = [x if type(x) is float else _plain(x, (*path, index)) for index, x in enumerate(value)]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
    if isinstance(value, np.generic) and type(value.item()) in (*_KEYS, bytes):
        return _plain(value.item(), path)
    if kind in (np.ndarray, np.memmap) and value.dtype.kind in "biufc":
        try:
            # a copy: the array may be read-only, reversed, or of the other byte order
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        except TypeError:  # a number that torch does not know, such as longdouble
            pass
    raise _refusal(value, path)


def _plain_key(key: Any, path: tuple[Any, ...]) -> Any:
    if type(key) is tuple:
        parts = [_plain_key(part, path) for part in key]
        return key if all(a is b for a, b in zip(parts, key, strict=True)) else tuple(parts)
    if isinstance(key, np.generic):
        key = _plain(key, (*path, key))
    if type(key) not in _KEYS:
        raise _refusal(key, (*path, key), "key of type ")
    return _plain(key, (*path, key))


def _refusal(value: Any, path: tuple[Any, ...], what: str = "") -> CheckpointError:
    place = "checkpoint" + "".join(f"[{key!r}]" for key in path)
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, np.ndarray):
        name += f" of dtype {value.dtype}"
    elif kind is int:
        name += f" of more than {_INT_BITS} bits"
    elif kind is bytes and not value:
        name += " of length 0"
    return CheckpointError(
        f"{place}: {what}{name}: could not be loaded again; save tensors, strings, bytes, numbers and None, in dicts, "
        "lists and tuples, and make the object anew from them in load_state_dict()"
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise ValueError("it names no format")
        files, ordinal = manifest.get("files"), manifest.get("ordinal", 0)
        if not isinstance(files, dict) or (manifest["format"] == FORMAT and _STATE not in files):
            raise ValueError("it has no list of files")
        if not all(isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in files.values()):
            raise ValueError("its list of files has an entry without size or digest")
        if not isinstance(ordinal, int) or isinstance(ordinal, bool):
            raise ValueError(f"its ordinal is {ordinal!r}")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / _MANIFEST}: damaged: {error}") from None
    return manifest


def _ordinal(folder: Path) -> int | None:
    """The checkpoint's place in the order of writing; its step where it was written before there were ordinals."""
    try:
        ordinal: int = _read_manifest(folder).get("ordinal", _number(folder)[0])
    except (CheckpointError, FileNotFoundError):
        return None
    return ordinal


def _age(folder: Path) -> tuple[bool, int, int, int, str]:
    ordinal = _ordinal(folder)
    return (ordinal is not None, ordinal or 0, *_number(folder))


def _damage(folder: Path) -> str | None:
    try:
        check_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _number(folder: Path) -> tuple[int, int, str]:
    parts = _FOLDER.fullmatch(folder.name)
    assert parts is not None  # find_checkpoints lets no other through
    return int(parts["step"]), int(parts["again"] or 1), folder.name


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
