"""The documentation as a site: every page is in it, and no page loads anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_navigation_names_every_page():
    named = re.findall(r"^ +- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted([*PAGES, "index.md"])


def test_the_page_about_events_is_what_the_code_says():
    command = [sys.executable, str(ROOT / "docs" / "draw_events.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path):
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert not done.stderr.strip(), done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES) + 20  # with the reference
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"(https?:[^\"]*)\"", text)
        loaded += re.findall(r"<link[^>]* href=\"(https?:[^\"]*)\"", text)
        assert loaded == [], page.name
    trainer = (tmp_path / "reference" / "pulsetrain.html").read_text()
    assert 'id="pulsetrain.trainer.Trainer"' in trainer
    assert "&gt;&gt;&gt;" in trainer
