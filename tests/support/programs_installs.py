"""Copies of the source tree, and environments in which one is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EDITABLE = ("--config-settings", "editable_mode=strict", "-e")
BUILD = ("-m", "pip", "--disable-pip-version-check", "-q")


def run(*command: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program's result; it does not inherit the caller's PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GIT_"))}
    return subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env={**env, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def checked(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """The program's output; it must succeed."""
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_files() -> list[str]:
    """The project's files in the working tree, including links."""
    listed = checked("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    return sorted(name for name in listed if name and os.path.lexists(ROOT / name))


def copy_tree(to: Path, *, links: bool = True) -> Path:
    """The working tree's own files.

    Args:
        to: a folder to make.
        links: False writes a link as a text file with its target, as git does under core.symlinks=false.
    """
    for name in source_files():
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / name
        if not source.is_symlink():
            target.write_bytes(source.read_bytes())
        elif links:
            target.symlink_to(source.readlink())
        else:
            target.write_text(str(source.readlink()))
    return to


INSTALLED = {"examples": "_examples"}  # the name of a folder in the package, where it differs


def modules() -> set[str]:
    """Every module of the three packages and of the examples, as the path at which a wheel holds it."""
    found = set()
    for name in source_files():
        top, _, rest = name.partition("/")
        if name.endswith(".py") and top in ("pulsetrain", "engine", "handlers", "examples"):
            found.add(name if top == "pulsetrain" else f"pulsetrain/{INSTALLED.get(top, top)}/{rest}")
    return found


def make_environment(
    folder: Path, requirement: object, *, editable: bool = False, packages: Path | None = None
) -> Path:
    """The Python of a new virtual environment with these packages, and with ours installed from `requirement`.

    Args:
        packages: a folder; by default this environment's.
    """
    checked(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = Path(checked(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # plain paths: files of type .pth in these folders, such as this environment's own editable install, are not read
    shared = [each for each in sys.path if Path(each).name == "site-packages"] if packages is None else [packages]
    (site / "shared.pth").write_text("".join(f"{each}\n" for each in shared))
    command = [sys.executable, *BUILD, "--python", python, "install", "--no-deps", "--no-build-isolation"]
    # strict: a folder of links to the modules, which type checkers can read; README.md recommends it
    checked(*command, "--ignore-installed", *(EDITABLE if editable else ()), requirement)
    return python
