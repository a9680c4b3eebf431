"""The ports that tests give to servers."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]


def taken(count: int) -> list[int]:
    return [free_port() for _ in range(count)]


def test_no_two_processes_are_given_the_same_port():
    program = "from tests.support.ports import free_port; print(*[free_port() for _ in range(50)])"
    started = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT) for _ in range(4)]
    found = [port for each in started for port in each.communicate()[0].split()]
    assert len(found) == len(set(found)) == 200


def test_the_kernel_gives_these_ports_to_nobody():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 32_768:
        pytest.skip(f"this machine gives the ports from {first} on, where another one begins at 32768")
    assert all(1024 < port < first for port in taken(20))


def test_a_port_that_is_in_use_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (port,) = taken(1)
    for place in tmp_path.iterdir():
        place.unlink()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        assert taken(1)[0] > port
