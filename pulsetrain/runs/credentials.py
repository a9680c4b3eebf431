"""Texts without the credentials in them, whatever kind of file they are."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from pulsetrain.configuration.yaml_text import load_yaml
from pulsetrain.handlers.run_files.redaction import redacted

__all__ = ["is_private", "without_credentials"]

_PRIVATE = (".env*", "*.env", ".netrc*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "credentials*", ".git-credentials")
_HEAD = 65_536  # bytes, in which a file that is not a text has a zero byte
_WHOLE = 10_000_000  # bytes; of a longer text, so many are read at a time, up to the end of a line


def is_private(name: str) -> bool:
    """Whether a file with this name holds credentials.

    >>> is_private(".env"), is_private("credentials.json"), is_private("config.yaml")
    (True, True, False)
    """
    return any(fnmatch.fnmatch(name.lower(), each) for each in _PRIVATE)


def without_credentials(path: Path) -> bytes | None:
    r"""The content of a text file in which credentials were replaced; None if it has none, or is not a text.

    YAML and JSON are read as such, so that a value is judged by its name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     script = Path(folder, "start.sh")
    ...     _ = script.write_text("export API_KEY=x7y\npython train.py\n")
    ...     without_credentials(script)
    b'export API_KEY=[redacted]\npython train.py\n'
    """
    with path.open("rb") as file:
        if b"\0" in file.read(_HEAD):
            return None
    if path.stat().st_size > _WHOLE:
        parts = [(part, _in_text(part)) for part in _parts(path)]
        has_none = all(changed is None for _, changed in parts)
        return None if has_none else b"".join(part if changed is None else changed for part, changed in parts)
    content = path.read_bytes()
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        try:
            is_yaml = path.suffix.lower() != ".json"
            value = load_yaml(content.decode()) if is_yaml else msgspec.json.decode(content)
            if (changed := redacted(value)) == value:
                return None
            return yaml.safe_dump(changed, sort_keys=False).encode() if is_yaml else msgspec.json.encode(changed)
        except (ValueError, RecursionError, yaml.YAMLError):  # another format, several documents, or nested too deep
            pass
    return _in_text(content)


def _in_text(content: bytes) -> bytes | None:
    try:
        text, encoding = content.decode(), "utf-8"
    except UnicodeDecodeError:
        text, encoding = content.decode("latin-1"), "latin-1"  # in which any bytes are a text
    changed = redacted(text)
    return None if changed == text else changed.encode(encoding)


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_WHOLE):
            yield part + file.readline()
