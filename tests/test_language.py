"""The sources and the documentation avoid phrases that read as if translated."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
AVOIDED = re.compile(r"\b(anew|whoever|goes\W+on|hangs\W+on|to\W+the\W+bit|told\W+of)\b", re.IGNORECASE)


@pytest.mark.parametrize("folder", ["engine", "handlers", "pulsetrain", "examples", "benchmarks", "docs", "."])
def test_no_phrase_to_avoid_is_in_use(folder: str) -> None:
    files = sorted((ROOT / folder).glob("*.md" if folder == "." else "**/*"))
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in {".py", ".md", ".yaml"}}
    assert texts
    found = []
    for path, text in texts.items():
        text = text.partition("\n## [0.1.0]")[0]  # released notes stay as they were
        for match in AVOIDED.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {' '.join(match[0].split())}")
    assert not found, "\n".join(found)
