"""A disk that may crash: the calls of a save in order, and every state that a crash between them may leave.

The rules are those of POSIX, without the kindness of any one file system: what was written is there for certain once
its file was synced, a name once its folder was synced after the call; before, each of them may be there or not,
whatever became of those before it, and a file may be cut. A rename is there or is not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from pulsetrain.engine.checkpoint import disk

Content: TypeAlias = "bytes | tuple[tuple[str, Content], ...]"  # of a file, or of a folder by name


class Call(NamedTuple):
    name: str
    path: tuple[str, ...] = ()  # below the folder that was there before
    target: tuple[str, ...] = ()
    data: bytes = b""


class RecordingOs:
    """The module `os`, with a list of the calls that change something below a folder."""

    def __init__(self, base: Path) -> None:
        self.base, self.calls = base, []
        self._open: dict[int, tuple[str, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _below(self, path: Path) -> tuple[str, ...]:
        return Path(path).relative_to(self.base).parts

    def _add(self, name: str, *paths: Path) -> None:
        self.calls.append(Call(name, *(self._below(path) for path in paths)))

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags, mode)
        self._open[descriptor] = self._below(path)
        if flags & os.O_CREAT:
            self._add("create", path)
        return descriptor

    def write(self, descriptor: int, data: Any) -> int:
        count = os.write(descriptor, data)
        self.calls.append(Call("write", self._open[descriptor], data=bytes(data[:count])))
        return count

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self.calls.append(Call("fsync", self._open[descriptor]))

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self._add("mkdir", path)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)
        self._add("rename", source, target)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)
        self._add("rename", source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        self._add("unlink", path)

    def rmtree(self, path: Path, ignore_errors: bool = False) -> None:
        there = path.exists()
        shutil.rmtree(path, ignore_errors=ignore_errors)
        if there:
            self._add("rmtree", path)


def record(base: Path, work: Callable[[Callable[[], None]], object]) -> list[Call]:
    """The calls that `work` makes; it gets a function that adds the call "announce"."""
    recording = RecordingOs(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "os", recording)
        patch.setattr(disk, "shutil", recording)
        work(lambda: recording.calls.append(Call("announce")))
    return recording.calls


@dataclass(eq=False)
class File:
    content: bytes = b""
    synced: bytes = b""

    def sync(self) -> None:
        self.synced = self.content

    def outcomes(self) -> set[Content]:
        if self.synced == self.content:
            return {self.content}
        return {b"", self.synced, self.content[: len(self.content) // 2], self.content}


@dataclass(eq=False)
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    edits: list[dict[str, File | Folder | None]] = field(default_factory=list)  # since; None takes a name away

    def change(self, changes: dict[str, File | Folder | None]) -> None:
        self.edits.append(changes)
        self.names = _edited(self.names, changes)

    def sync(self) -> None:
        self.synced, self.edits = dict(self.names), []

    def outcomes(self) -> set[Content]:
        found: set[Content] = set()
        for count in range(len(self.edits) + 1):
            for kept in combinations(self.edits, count):
                names = self.synced
                for changes in kept:
                    names = _edited(names, changes)
                inside = [[(name, content) for content in node.outcomes()] for name, node in sorted(names.items())]
                found.update(product(*inside))
        return found


def _edited(names: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: node for name, node in {**names, **changes}.items() if node is not None}


class Disk:
    """A folder that existed, durably, before the first call."""

    def __init__(self, content: Content) -> None:
        self.root = _durable(content)

    def _at(self, path: Sequence[str]) -> Any:
        node: Any = self.root
        for name in path:
            node = node.names[name]
        return node

    def make(self, call: Call) -> None:
        if call.name == "announce":
            return
        if call.name == "fsync":
            self._at(call.path).sync()
            return
        if call.name == "write":
            self._at(call.path).content += call.data
            return
        *above, name = call.path
        folder = self._at(above)
        if call.name in ("create", "mkdir"):
            folder.change({name: File() if call.name == "create" else Folder()})
        elif call.name == "rename":
            assert list(call.target[:-1]) == above, "a rename between folders has rules of its own"
            folder.change({call.target[-1]: folder.names[name], name: None})
        elif call.name == "unlink":
            folder.change({name: None})
        elif call.name == "rmtree":
            for inner in list(folder.names[name].names):
                folder.names[name].change({inner: None})
            folder.change({name: None})
        else:
            raise AssertionError(call)


def crashes(before: Content, calls: Sequence[Call]) -> Iterator[tuple[int, Content]]:
    """After how many calls the crash came, and a state that it may leave."""
    machine = Disk(before)
    for count in range(len(calls) + 1):
        for outcome in machine.root.outcomes():
            yield count, outcome
        if count < len(calls):
            machine.make(calls[count])


def content_of(path: Path) -> Content:
    """The content of the real disk."""
    if path.is_file():
        return path.read_bytes()
    return tuple((inner.name, content_of(inner)) for inner in sorted(path.iterdir()))


def put(content: Content, path: Path) -> None:
    """Make it so on the real disk."""
    if isinstance(content, bytes):
        path.write_bytes(content)
        return
    path.mkdir()
    for name, inner in content:
        put(inner, path / name)


def _durable(content: Content) -> File | Folder:
    if isinstance(content, bytes):
        return File(content, content)
    names = {name: _durable(inner) for name, inner in content}
    return Folder(names, dict(names))
