"""A program forked from the warm Python behaves like one started from nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import Program, run

PROGRAMS = {
    "a status": "import sys; print(__name__, sys.argv); print('wrong', file=sys.stderr); sys.exit(3)",
    "an exit function": "import atexit; atexit.register(print, 'the end')",
    "what it is given": "import os, sys; print(sys.stdin.read(), os.getcwd(), os.environ['OF_THE_TEST'], sys.path[0])",
    "Ctrl-C": "raise KeyboardInterrupt",
    "a signal": "import os, signal; print('before', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
    "no numbers of another": "import random; random.seed(3); print(random.random())",
    "an argument": "import sys; print(sys.argv[1:]); print('ü')",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["code", "script", "module"])
@pytest.mark.parametrize("code", PROGRAMS.values(), ids=[*PROGRAMS])
def test_it_prints_and_exits_like_any_python(way: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OF_THE_TEST", "a value")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    (tmp_path / "program.py").write_text(code, encoding="utf-8")
    words = {"code": ["-c", code], "script": ["program.py"], "module": ["-m", "program"]}[way]
    found = run(*words, "one", "two", text="given", cwd=tmp_path)
    expected = subprocess.run(
        [sys.executable, *words, "one", "two"],
        input="given",
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]  # tracebacks begin elsewhere


@pytest.mark.slow
def test_two_programs_share_nothing():
    first = run("-c", "import numpy, sys; sys.mark = 1; print(numpy.random.rand())")
    second = run("-c", "import numpy, sys; assert not hasattr(sys, 'mark'); print(numpy.random.rand())")
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert first.stdout != second.stdout


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_killed_with_its_children():
    program = Program("-c", "import os, time; os.fork(); print(flush=True); time.sleep(600)")
    program.stdout.readline()
    with pytest.raises(TimeoutError):
        program.communicate(timeout=0.2)  # returns when all pipes are closed
    assert program.wait(60) == -signal.SIGKILL
    program.close()
