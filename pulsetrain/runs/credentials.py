"""Files without the credentials in them, whatever kind of file they are."""

from __future__ import annotations

import codecs
import fnmatch
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec
import yaml

from pulsetrain.configuration.yaml_text import dump_yaml, load_yaml
from pulsetrain.handlers.run_files.redaction import REDACTED, TOKEN, redacted

__all__ = ["LONGEST_PARSED", "STRUCTURED", "encoding_of", "is_private", "redacted_text", "without_credentials"]

_PRIVATE = (".env*", "*.env", ".netrc*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "credentials*", ".git-credentials")
_HEAD = 65_536  # bytes, which show whether it is a text
LONGEST_PARSED = 10_000_000  # characters; of a longer text, so many are read at a time, up to the end of a line
STRUCTURED = (".yaml", ".yml", ".json")  # endings of files whose values are judged by their names
_LONGEST_KEY = 1_000  # lines of a private key

_BOMS = (  # UTF-16's is the beginning of UTF-32's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_DOCUMENT = re.compile(r"^(?=---(?:\s|$))", re.MULTILINE)  # where one begins in a YAML file of several
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)
_PLOTLY = re.compile(r"(<script[^>]*>/\*\*\n\* plotly\.js v.*?</script>)", re.DOTALL)  # in a report
_KEY = r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]{1,20000}?-----END"
_SUSPECT = re.compile(f"{TOKEN}|{_KEY}".encode())  # without a word's start, which makes the search slow
_IN_BINARY = re.compile(rf"\b{TOKEN}|{_KEY}".encode())


def is_private(name: str) -> bool:
    """Whether a file with this name holds credentials.

    >>> is_private(".env"), is_private("credentials.json"), is_private("config.yaml")
    (True, True, False)
    """
    return any(fnmatch.fnmatch(name.lower(), each) for each in _PRIVATE)


def without_credentials(path: Path) -> bytes | None:
    r"""The content of a file in which credentials were replaced; None if it has none.

    YAML and JSON are read as such, so that a value is judged by its name. In what is not a text, the tokens of known
    services and private keys are replaced by as many bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     script = Path(folder, "start.sh")
    ...     _ = script.write_text("export API_KEY=x7y\npython train.py\n")
    ...     without_credentials(script)
    b'export API_KEY=[redacted]\npython train.py\n'
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not _is_text(head):
        return _in_binary(path)
    encoding = encoding_of(head)
    errors = "surrogateescape" if encoding == "utf-8" else "replace"  # so that any bytes are a text
    suffix = path.suffix if path.stat().st_size <= LONGEST_PARSED else ""
    with path.open(encoding=encoding, errors=errors, newline="") as text:
        parts = [(part, redacted_text(part, suffix)) for part in _parts(text)]
    if all(part == changed for part, changed in parts):
        return None
    return "".join(changed for _, changed in parts).encode(encoding, errors)


def redacted_text(text: str, suffix: str) -> str:
    r"""The text of a file without credentials; one without any stays as it is.

    >>> redacted_text("password:\n- x7\n", ".yaml")
    "password:\n- '[redacted]'\n"

    Args:
        text: the whole file, or a part of one that is not structured.
        suffix: the ending of its name.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(mark)
    if suffix.lower() == ".json":
        return mark + _redacted_json(text)
    if suffix.lower() in STRUCTURED:
        return mark + "".join(map(_redacted_yaml, _DOCUMENT.split(text)))
    return mark + "".join(part if number % 2 else redacted(part) for number, part in enumerate(_PLOTLY.split(text)))


def _redacted_json(text: str) -> str:
    try:
        value = msgspec.json.decode(text)
        changed = redacted(value)
        return text if changed == value else msgspec.json.encode(changed).decode()
    except (ValueError, RecursionError):  # another format, or nested too deep
        return redacted(text)


def _redacted_yaml(document: str) -> str:
    try:
        value = load_yaml(document, fast=True)
        if (changed := redacted(value)) == value:  # names in the text are those of the value, but for comments
            return _COMMENT.sub(lambda comment: redacted(comment[0]), document)
        start = "---\n" if document.startswith("---") else ""
        return start + dump_yaml(changed)
    except (ValueError, RecursionError, yaml.YAMLError):  # another format, or nested too deep
        return redacted(document)


def encoding_of(head: bytes) -> str:
    """The encoding of a text that begins with these bytes: as its byte order mark says, else UTF-8."""
    return next((name for mark, name in _BOMS if head.startswith(mark)), "utf-8")


def _is_text(head: bytes) -> bool:
    if b"\0" not in head or encoding_of(head) != "utf-8":
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its end may be within a character
    except UnicodeDecodeError:
        return False
    return True


def _in_binary(path: Path) -> bytes | None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not _SUSPECT.search(content) or not _IN_BINARY.search(content):
            return None
        return _IN_BINARY.sub(lambda found: REDACTED.encode().ljust(len(found[0]), b"*"), content)


def _parts(file: TextIO) -> Iterator[str]:
    """The text in parts that end with a line, and not within a private key."""
    while part := file.read(LONGEST_PARSED):
        part += file.readline()
        if part.rfind("-----BEGIN ") > part.rfind("-----END "):
            for _ in range(_LONGEST_KEY):
                part += (line := file.readline())
                if not line or "-----END " in line:
                    break
        yield part
