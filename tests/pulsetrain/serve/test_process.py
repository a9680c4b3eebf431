"""The server as a process: it takes long requests, ends soon, whatever is open, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import pytest

pytest.importorskip("uvicorn")

from tests.support.run_folders import write_run

CHILDREN = "/proc/{0}/task/{0}/children"


@pytest.mark.slow
@pytest.mark.skipif(not Path(CHILDREN.format(os.getpid())).exists(), reason="the system does not list children")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_ends_with_open_pages(number: signal.Signals, status: int, host: str, tmp_path: Path):
    write_run(tmp_path / "a", [1.0, 0.5])
    words = [sys.executable, "-m", "pulsetrain", "serve", str(tmp_path), "--host", host, "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        address = server.stdout.readline().rpartition(": ")[2].strip()
        with urlopen(f"{address}api/live") as stream, urlopen(f"{address}api/live") as other:
            assert stream.readline().startswith(b"data: ")
            assert other.readline().startswith(b"data: ")
            urlopen(f"{address}api/names?run=a").close()  # starts a process that reads its curves
            children = [int(each) for each in Path(CHILDREN.format(server.pid)).read_text().split()]
            assert children
            server.send_signal(number)
            assert server.wait(timeout=60) == status
            if status != -9:  # which leaves no time to end it well
                assert stream.read().count(b"data: ") < 5
        said = server.stderr.read()
        assert status == -9 or said == ""  # Python warns of what a killed process leaves
    end = time.monotonic() + 120
    while any(Path(f"/proc/{child}/stat").exists() for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [child for child in children if Path(f"/proc/{child}/stat").exists()]
    found = urlsplit(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, found.port))


@pytest.mark.slow
def test_500_runs_with_long_names_fit_into_a_request(tmp_path: Path):
    write_run(tmp_path / "a", [1.0])
    words = [sys.executable, "-m", "pulsetrain", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().rpartition(": ")[2].strip()
            names = [f"{'ü' * 120}{number}" for number in range(500)]
            with urlopen(f"{address}api/names?{urlencode({'run': names}, doseq=True)}") as answer:
                assert json.load(answer)["gone"] == names
        finally:
            server.terminate()
