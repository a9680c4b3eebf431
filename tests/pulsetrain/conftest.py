"""Fixtures of the tests of the command line."""

from __future__ import annotations

import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.support.programs_command_line import CONFIG, DATA, MODEL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a small configuration; modules it imports are removed afterwards."""
    for name, text in {"model.py": MODEL, "data.py": DATA, "config.yaml": CONFIG}.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    settings = structlog.get_config()
    yield tmp_path
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert structlog.get_config() == settings
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
