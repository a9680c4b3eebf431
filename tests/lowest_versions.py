"""Print the lowest versions of packages that pyproject.toml accepts: `make lowest` installs these."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def lowest() -> list[str]:
    """Such as "torch==2.9", for each package that a run needs.

    Raises:
        ValueError: a package has no lowest version.
    """
    found = []
    for line in tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]:
        match = re.fullmatch(r"([\w.-]+(?:\[[\w,-]+\])?)>=([\d.]+)(?:,<[\d.]+)?", line)
        if match is None:
            raise ValueError(f"{PROJECT.name}: dependency {line!r}: needs a lowest version, as in 'torch>=2.9'")
        found.append("==".join(match.groups()))
    return found


if __name__ == "__main__":
    print(*lowest())
