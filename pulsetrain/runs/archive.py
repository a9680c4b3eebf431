"""A run as one file, and the file as a run folder again.

An archive is a zip file: RUN/config.yaml and so on, and `pulsetrain-archive.json`, which names the run and lists the
files with their sizes and SHA-256. Other programs can read it. What is compressed already is stored as it is.
"""

from __future__ import annotations

import atexit
import errno
import fnmatch
import hashlib
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypeAlias

import msgspec

from pulsetrain.engine.errors import CheckpointError, PulsetrainError, RunFolderError
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.reader import EventLog, logged_ranks
from pulsetrain.engine.recording.log.run_file import id_of_run, newer_format, read_run_file
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.runs.credentials import is_private, without_credentials
from pulsetrain.runs.summary import RunSummary, Status, summarize
from pulsetrain.runs.tags import TAGS_FILE

__all__ = ["Archived", "Kept", "is_archive", "summarize_archive", "unpacked", "write_archive"]

_CONTENTS = "pulsetrain-archive.json"
_FORMAT = 1
_STORED = frozenset({".zst", ".png", ".gz", ".zip", ".pt", ".safetensors", ".mp4", ".jpg"})
_OF_THE_PROCESS = (".owner", "*.lock", ".lock")
_LONGEST = 1 << 28  # bytes of the list of files
_LISTED = 100_000_000  # bytes that a listed archive may always unpack to, if they are there
_MOST_RATIO = 100  # of those bytes to its own; logs are compressed already, and other texts shrink to a tenth
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, ValueError, RuntimeError, OverflowError)
"""What zipfile raises where bytes are not as they were written, or an archive is encrypted."""

Kept: TypeAlias = Literal["none", "best", "latest", "all"]


@dataclass
class Archived:
    """What an archive holds."""

    path: Path
    files: int = 0
    size: int = 0  # bytes of the archive
    left_out: list[str] = field(default_factory=list)  # files, each with the reason
    redacted: list[str] = field(default_factory=list)  # files without the credentials that were in them
    newer: str = ""  # why this version may have misread the run: a newer one has written it


class _File(msgspec.Struct):
    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


class _Contents(msgspec.Struct):
    format: int
    run: str  # the name of its folder
    id: str
    files: dict[str, _File]


def write_archive(folder: Path, into: Path, *, checkpoints: Kept = "best") -> Archived:
    """Write a run as one file; the run is only read. What is written is read back and compared.

    Credentials in texts of any kind are replaced, files that hold credentials by their names are left out,
    and so are links and the files of a process that trains.

    Args:
        folder: the run folder, of a run that has ended.
        into: the file, which is replaced if it is there; its folder is made.
        checkpoints: which of the run's checkpoints go in.

    Raises:
        RunFolderError: it is not a run folder, the run has not ended, its log has credentials, or the file
            cannot be written.
    """
    from pulsetrain.engine.checkpoint.disk import sync  # here, as torch is imported with it

    status = summarize(folder).status
    if status.is_going:
        raise RunFolderError(f"{folder}: the run is {status.value}; stop it, or archive it when it has ended")
    _check_events(folder)
    name = folder.resolve().name
    if "\\" in name:
        raise _backslash(folder)
    archived = Archived(into, newer=newer_format(read_run_file(folder)))
    contents = _Contents(_FORMAT, name, id_of_run(folder), {})
    try:
        files = list(_files(folder, checkpoints, archived))
        made = [each for each in (into.parent, *into.parent.parents) if not each.exists()]
        into.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".archive-", dir=into.parent) as beside:
            partial = Path(beside) / "archive"
            with zipfile.ZipFile(partial, "w", allowZip64=True) as file:
                logs = {path for rank in logged_ranks(folder) for path in log_files(folder / "events", rank)}
                for path in files:
                    within = path.relative_to(folder).as_posix()
                    changed = None if path in logs else without_credentials(path)
                    contents.files[within] = _add(file, path, f"{name}/{within}", within, changed, archived)
                file.writestr(_info(_CONTENTS, compress=True), msgspec.json.encode(contents))
            sync(partial)
            _check(partial)
            partial.replace(into)
            for each in (into.parent, *(each.parent for each in made)):  # the run may be deleted next
                sync(each)
    except PulsetrainError:
        raise
    except OSError as error:
        why = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        rule = "make room on its disk, fix the permissions, or choose another folder with --into"
        raise RunFolderError(f"{into}: the archive cannot be written: {why}; {rule}") from error
    except UnicodeEncodeError as error:
        raise RunFolderError(
            f"{folder}: the name of a file in it has bytes that are not text: {error.object!r}; rename it"
        ) from error
    archived.files, archived.size = len(contents.files), into.stat().st_size
    return archived


def is_archive(path: Path) -> bool:
    """Whether it is a file that `write_archive` has made."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as file:
            return _CONTENTS in file.namelist()
    except (OSError, *_DAMAGE):
        return False


def unpacked(path: Path, into: Path | None = None) -> Path:
    """The run folder of an archive, unpacked into a temporary folder until the process ends; other paths as they are.

    Args:
        path: the archive.
        into: where the temporary folder is made, and this folder, too; by default, where those of the system are.

    Raises:
        RunFolderError: the file is a zip file of other content, or a damaged or a newer archive.
    """
    if not is_archive(path):
        if path.is_file() and path.suffix == ".zip":
            raise RunFolderError(f"{path}: {_no_archive(path)}; name a run folder, or another copy")
        return path
    with _unpacking(path, into) as file:
        contents = _contents(file, path)
        if into is not None:
            into.mkdir(parents=True, exist_ok=True)
        size = sum(each.size for each in contents.files.values())
        free = shutil.disk_usage(into or tempfile.gettempdir()).free
        if size > free:
            raise OSError(errno.ENOSPC, f"it needs {size / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free")
        target = Path(tempfile.mkdtemp(prefix=".pulsetrain-archive-", dir=into))
        atexit.register(shutil.rmtree, target, ignore_errors=True)
        folder = target / contents.run
        folder.mkdir()
        _extract(file, path, contents, contents.files, folder)
    return folder


def summarize_archive(path: Path) -> RunSummary:
    """What is known of an archived run: how it ended is the reason, and so is why the file cannot be read."""
    try:
        if not is_archive(path):
            raise RunFolderError(_no_archive(path))
        with _unpacking(path) as file, tempfile.TemporaryDirectory(prefix="pulsetrain-archive-") as beside:
            contents = _contents(file, path)
            names = [each for each in contents.files if _is_summarized(each)]
            _check_size(path, sum(contents.files[each].size for each in names), beside)
            folder = Path(beside, contents.run)
            (folder / "events").mkdir(parents=True)
            _extract(file, path, contents, names, folder)
            found = summarize(folder, named=path)
    except RunFolderError as error:
        return RunSummary.unreadable(path, Status.ARCHIVED, str(error))
    reason = f"{found.status.value}{f': {found.reason}' if found.reason else ''}"
    return replace(found, path_bytes=os.fsencode(path), status=Status.ARCHIVED, reason=reason)


def _no_archive(path: Path) -> str:
    return "is not a run's archive, or is damaged" if os.access(path, os.R_OK) else "cannot be read: permission denied"


@contextmanager
def _unpacking(path: Path, into: Path | None = None) -> Iterator[zipfile.ZipFile]:
    """An open archive.

    Raises:
        RunFolderError: it is damaged or cannot be read, or the disk has no room for its content.
    """
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except PulsetrainError:
        raise
    except OSError as error:
        why = f"cannot be unpacked into {into or tempfile.gettempdir()}: {error.strerror or error}"
        where = "set TMPDIR to" if into is None else "choose"
        raise RunFolderError(f"{path}: {why}; {where} another folder, or use another copy") from error
    except _DAMAGE as error:
        raise RunFolderError(f"{path}: is damaged: {error}; use another copy") from error


def _extract(file: zipfile.ZipFile, path: Path, contents: _Contents, names: Iterable[str], folder: Path) -> None:
    for within in names:
        written = folder / within
        written.parent.mkdir(parents=True, exist_ok=True)
        with written.open("wb") as out:
            _copy(file, path, contents, within, contents.files[within], out.write)


def _check_size(path: Path, size: int, folder: str) -> None:
    """Refuse what only a hostile archive unpacks to, and what would fill the disk: a list reads what it finds.

    Raises:
        RunFolderError: its log is too large.
    """
    free = shutil.disk_usage(folder).free
    if size > max(_LISTED, _MOST_RATIO * path.stat().st_size):
        raise RunFolderError(
            f"is not listed: its log would have {size / 1e6:,.0f} MB, more than {_MOST_RATIO} times the archive; "
            "delete it if you do not trust it, or unpack it with `pulsetrain archive --unpack`"
        )
    if size > free / 2:
        raise RunFolderError(
            f"is not listed: its log has {size / 1e6:,.0f} MB, more than half of the {free / 1e6:,.0f} MB that are "
            f"free in {tempfile.gettempdir()}; set TMPDIR to a folder with more space"
        )


def _is_summarized(within: str) -> bool:
    """Whether a summary is read from the file."""
    return within in ("run.json", "config.yaml", TAGS_FILE) or PurePosixPath(within).parts[0] == "events"


def _files(folder: Path, checkpoints: Kept, archived: Archived) -> Iterator[Path]:
    chosen = _checkpoints(folder, checkpoints)
    for path in sorted(_within(folder)):
        within = path.relative_to(folder)
        if path.is_symlink():
            archived.left_out.append(f"{within}: a link")
        elif not path.is_file() or any(fnmatch.fnmatch(path.name, each) for each in _OF_THE_PROCESS):
            continue
        elif is_private(path.name):
            archived.left_out.append(f"{within}: credentials, by its name")
        elif within.parts[0] == "checkpoints" and len(within.parts) > 2 and within.parts[1] not in chosen:
            continue
        elif "\\" in str(within):
            raise _backslash(path)
        else:
            yield path


def _backslash(path: Path) -> RunFolderError:
    return RunFolderError(f"{path}: an archive cannot hold a backslash in a name; rename it")


def _within(folder: Path) -> Iterator[Path]:
    """All that is in the folder; links are not followed.

    Raises:
        OSError: a folder in it cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for above, folders, files in os.walk(folder, onerror=refuse):
        yield from (Path(above, name) for name in (*folders, *files))


def _checkpoints(folder: Path, kept: Kept) -> set[str]:
    """The names of those that go in."""
    if kept == "none" or not (folder / "checkpoints").is_dir():
        return set()
    from pulsetrain.engine.checkpoint import CheckpointManager, find_checkpoints  # imports torch
    from pulsetrain.engine.checkpoint.manifest import BEST

    if kept == "all":
        return {each.name for each in find_checkpoints(folder / "checkpoints") if isinstance(each, Path)}
    manager = CheckpointManager(folder / "checkpoints")
    try:
        best = manager.get_best() if kept == "best" else None
    except CheckpointError as error:
        raise RunFolderError(
            f"{manager.checkpoint_dir / BEST}: is damaged, so the best checkpoint is not known; archive the run with "
            "--checkpoints latest, all or none"
        ) from error
    try:
        found = best or manager.get_latest()
    except CheckpointError as error:  # whose remedy is for a run that resumes
        raise RunFolderError(
            f"{manager.checkpoint_dir}: every checkpoint there is damaged; archive the run with --checkpoints none"
        ) from error
    return set() if found is None else {found.name}


def _add(file: zipfile.ZipFile, path: Path, name: str, within: str, changed: bytes | None, archived: Archived) -> _File:
    if changed is not None and within.startswith("checkpoints/"):
        raise RunFolderError(
            f"{path}: has a text that is a credential by its form, and a checkpoint is kept as it is; archive the run "
            "with --checkpoints none"
        )
    digest, size = hashlib.sha256(), 0
    with file.open(_info(name, compress=path.suffix not in _STORED), "w", force_zip64=True) as out:
        if changed is not None:
            archived.redacted.append(within)
            digest.update(changed)
            out.write(changed)
            return _File(len(changed), digest.hexdigest())
        with path.open("rb") as source:
            while part := source.read(1 << 20):
                digest.update(part)
                size += len(part)
                out.write(part)
    return _File(size, digest.hexdigest())


def _info(name: str, *, compress: bool) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)  # with the date of 1980: the same run gives the same file
    info.compress_type = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    info.external_attr = 0o644 << 16
    return info


def _check_events(folder: Path) -> None:
    """Refuse a log with texts that are credentials: without them it would not be the run's log any more."""
    for rank in logged_ranks(folder):
        if not any(path.exists() for path in log_files(folder / "events", rank)):  # nothing was recorded
            continue
        for event in EventLog(folder, rank).read(superseded=True):
            said = msgspec.structs.asdict(event)
            if redacted(said) != said:
                raise RunFolderError(
                    f"{folder}: event {event.seq} ({event.event}) of rank {rank} has a value that is a credential by "
                    "its name or form, and an archive keeps the log as it is; share `pulsetrain report` or `export` "
                    "instead"
                )


def _contents(file: zipfile.ZipFile, path: Path) -> _Contents:
    others = {each.compress_type for each in file.infolist()} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
    if others:
        raise RunFolderError(f"{path}: is compressed by method {min(others)} of zip files; an archive by 0 or 8 only")
    try:
        if file.getinfo(_CONTENTS).file_size > _LONGEST:
            raise ValueError(f"it would have more than {_LONGEST:,} bytes")
        found = msgspec.json.decode(file.read(_CONTENTS), type=_Contents)
    except _DAMAGE as error:  # msgspec's errors are ValueErrors
        raise RunFolderError(f"{path}: the archive's list of files is damaged: {error}; use another copy") from error
    if found.format > _FORMAT:
        raise RunFolderError(f"{path}: is an archive of format {found.format}; this version reads {_FORMAT}; update")
    for each in (found.run, *found.files):
        parts = PurePosixPath(each).parts
        if not parts or each.startswith("/") or ".." in parts or "\\" in each or "\0" in each:
            raise RunFolderError(f"{path}: {each!r} is not a name of a file in a run folder; the archive is not ours")
    if len(PurePosixPath(found.run).parts) != 1:
        raise RunFolderError(f"{path}: {found.run!r} is not the name of a folder; the archive is not ours")
    return found


def _copy(
    file: zipfile.ZipFile,
    path: Path,
    contents: _Contents,
    within: str,
    expected: _File,
    write: Callable[[bytes], object],
) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with file.open(f"{contents.run}/{within}") as source:
            while (part := source.read(1 << 20)) and size <= expected.size:
                digest.update(part)
                size += len(part)
                write(part)
    except _DAMAGE as error:
        raise RunFolderError(f"{path}: {within} is damaged: {error}; use another copy") from error
    if size != expected.size or digest.hexdigest() != expected.sha256:
        raise RunFolderError(f"{path}: {within} is damaged: its checksum differs; use another copy")


def _check(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        contents = _contents(file, path)
        for within, expected in contents.files.items():
            _copy(file, path, contents, within, expected, lambda _: None)
