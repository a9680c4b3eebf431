"""The commands of the tutorial work in their order, and print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text()
MARK = "=== command"


def steps() -> list[tuple[str, list[str]]]:
    """Each command, and the lines that the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line != "...":
                found[-1][1].append(line)
    return found


def without_figures(line: str) -> str:
    """The line with N for each number: times and last digits differ between machines."""
    return " ".join(re.sub(r"\d[\d.,]*(e-?\d+)?", "N", line).split())


@pytest.mark.slow
def test_every_command_of_the_tutorial_prints_what_the_page_shows(tmp_path: Path):
    for package in ("sklearn", "plotly"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    commands = steps()
    assert len(commands) > 15
    script = "\n".join(f"echo '{MARK}'\n{command}" for command, _ in commands)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    printed = done.stdout.split(f"{MARK}\n")[1:]
    assert len(printed) == len(commands), done.stdout[-4000:]
    for (command, shown), output in zip(commands, printed, strict=True):
        lines = {without_figures(line) for line in output.splitlines()}
        missing = [line for line in shown if without_figures(line) not in lines]
        assert not missing, f"$ {command}\nprinted\n{output}\nwithout\n{missing}"
