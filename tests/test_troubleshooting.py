"""Each mistake of the page about troubleshooting ends with the message that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import programs

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()
BEGINNING = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
MISTAKES = re.findall(r"## ([^\n]*)\n\n```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_the_ten_likeliest_mistakes():
    assert len(MISTAKES) == 10


@pytest.mark.slow
@pytest.mark.parametrize(("title", "code", "message"), MISTAKES, ids=[title for title, _, _ in MISTAKES])
def test_a_mistake_ends_with_the_message_of_the_page(title: str, code: str, message: str, tmp_path: Path):
    done = programs.run("-c", f"{BEGINNING}\n{code}", cwd=tmp_path)
    assert done.returncode == 1
    assert message.strip() in "\n".join(done.stderr.splitlines()[-4:])  # a note may follow
