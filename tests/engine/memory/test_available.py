"""What is left of the machine's, the container's and the process's memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pulsetrain.engine.memory import available as module
from pulsetrain.engine.memory.available import available

CPU = torch.device("cpu")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:  8000 kB\nMemAvailable:  4000 kB\n")
    (tmp_path / "status").write_text("VmSize:  1000 kB\n")
    for name, file in {"_MEMINFO": "meminfo", "_STATUS": "status", "_CGROUP": "cgroup"}.items():
        monkeypatch.setattr(module, name, tmp_path / file)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def test_the_machine_says_what_is_left(system: Path) -> None:
    assert available(CPU) == 4000 * 1024


@pytest.mark.parametrize(("limit", "left"), [("max", 4000 * 1024), ("3000000", 2_000_000), ("100", 0)])
def test_a_container_may_have_less(system: Path, limit: str, left: int) -> None:
    (system / "cgroup").mkdir()
    (system / "cgroup" / "memory.max").write_text(f"{limit}\n")
    (system / "cgroup" / "memory.stat").write_text("anon 1000000\nfile 5000000\n")
    assert available(CPU) == left


def test_so_may_the_process(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3000 * 1024, resource.RLIM_INFINITY))
    assert available(CPU) == 2000 * 1024


def test_a_system_without_these_files_does_not_say(system: Path) -> None:
    (system / "meminfo").unlink()
    (system / "status").unlink()
    assert available(CPU) is None
    assert available(torch.device("meta")) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_says_it_and_a_limit_lowers_it() -> None:
    probe = (
        "import resource, torch; from pulsetrain.engine.memory.available import available; "
        "before = available(torch.device('cpu')); assert before > 1e7; "
        "resource.setrlimit(resource.RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0]) * 4096 + 10**8, -1)); "
        "assert available(torch.device('cpu')) <= 10**8"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=120)
