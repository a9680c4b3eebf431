"""Locations of checkpoints: a path on this machine, or a URL that fsspec opens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self, TypeAlias

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["CheckpointUrl", "Location", "location_of"]


class CheckpointUrl(str):
    """A URL such as "s3://bucket/runs/a": a string with a path's `name`, `parent` and `/`.

    >>> url = CheckpointUrl("s3://bucket/runs") / "a"
    >>> url, url.name, url.parent
    ('s3://bucket/runs/a', 'a', 's3://bucket/runs')
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The last component."""
        return self.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The URL without its last component."""
        return type(self)(self.rstrip("/").rpartition("/")[0])

    def __truediv__(self, part: str) -> Self:
        return type(self)(f"{self.rstrip('/')}/{part}")


Location: TypeAlias = Path | CheckpointUrl


def location_of(folder: str | os.PathLike[str]) -> Location:
    """A path if the folder is on this machine, "file://..." included, since files are faster and safer; else a URL.

    >>> location_of("file:///tmp/a")
    PosixPath('/tmp/a')
    >>> location_of("memory://a")
    'memory://a'

    Raises:
        ConfigurationError: fsspec does not know such URLs, or lacks a package for them.
    """
    if isinstance(folder, CheckpointUrl) or not (isinstance(folder, str) and "://" in folder):
        return folder if isinstance(folder, CheckpointUrl) else Path(folder)
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        files, path = url_to_fs(folder)
    except ImportError as error:
        raise ConfigurationError(
            f"folder {folder!r}: needs a package that is not installed ({error}); pip install 'pulsetrain[s3]' for "
            "s3://, or the package that fsspec names"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"folder {folder!r}: {error}; use a path, or a URL that fsspec knows") from error
    return Path(path) if isinstance(files, LocalFileSystem) else CheckpointUrl(folder)
