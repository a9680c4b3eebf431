"""The commands of the tutorial and of other pages work in their order, and print what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
NEEDED = {"tutorial.md": ("sklearn", "plotly"), "slurm.md": ("submitit",)}
MARK = "=== command"


def steps(page: str) -> list[tuple[str, list[str]]]:
    """Each command, and the lines that the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line != "...":
                found[-1][1].append(line)
    return found


def without_figures(line: str) -> str:
    """The line with N for each number: times and last digits differ between machines."""
    line = re.sub(r" \(\d+:\d\d:\d\d\)|\d+ min (?=\d+ s)", "", line)  # as times of more than a minute are written
    return " ".join(re.sub(r"\d[\d.,]*(e-?\d+)?", "N", line).split())


def test_no_page_with_a_session_is_left_out():
    assert {path.name for path in DOCS.glob("*.md") if "```console" in path.read_text()} == {*NEEDED}
    assert len(steps("tutorial.md")) > 15


@pytest.mark.slow
@pytest.mark.parametrize("page", NEEDED)
def test_every_command_of_a_page_prints_what_the_page_shows(page: str, tmp_path: Path):
    for package in NEEDED[page]:
        pytest.importorskip(package, reason=f"{package} is not installed")
    commands = steps(page)
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
