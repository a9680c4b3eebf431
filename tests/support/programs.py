"""Programs that tests start, forked from a Python process that has imported torch and pulsetrain.

Importing them takes four seconds of a core, several times what most of these programs do. Each program is a process of
its own all the same, the leader of its process group, with the pipes, signals, exit functions and status of any other.
Claims about importing, or about a start from nothing, are tested with `subprocess`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "numpy",
    "torch",
    "ignite.metrics",
    "pulsetrain.engine",
    "pulsetrain.handlers",
    "pulsetrain.cli",
    "pulsetrain.trainer",
)


class Program:
    """Replaces `subprocess.Popen` with text pipes.

    Args:
        arguments: Python's: a script, "-m" and a module, or "-c" and code; then the program's own.
        env: all of its environment; this process's if None.
    """

    def __init__(self, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self.args = [str(each) for each in arguments]
        self.returncode: int | None = None
        given = {"arguments": self.args, "cwd": str(cwd or Path.cwd()), "env": {**(env or os.environ)}}
        request = json.dumps(given).encode()
        (read_in, write_in), (read_out, write_out), (read_err, write_err) = (os.pipe() for _ in range(3))
        self._status, teller = socket.socketpair()
        socket.send_fds(_warm(), [b"%8d" % len(request)], [read_in, write_out, write_err, teller.fileno()])
        _warm().sendall(request)
        for descriptor in (read_in, write_out, write_err):
            os.close(descriptor)
        teller.close()
        self.stdin = os.fdopen(write_in, "w", encoding="utf-8")
        self.stdout, self.stderr = (os.fdopen(read, encoding="utf-8") for read in (read_out, read_err))
        self.pid = int(self._status.recv(8))

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with all its child processes."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(8))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout) from None
        return self.returncode

    def communicate(self, text: str = "", *, timeout: float = 120) -> tuple[str, str]:
        """Write its input, and read its output until all its pipes are closed."""
        with ThreadPoolExecutor(3) as readers:
            texts = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            readers.submit(self._write, text)
            try:
                out, err = (each.result(timeout) for each in texts)
                self.wait(timeout)
            except TimeoutError:
                self.kill()
                raise
        return out, err

    def _write(self, text: str) -> None:
        try:
            with self.stdin:
                self.stdin.write(text)
        except (BrokenPipeError, ValueError):  # it has ended or stopped reading
            pass

    def close(self) -> None:
        """Kill its remaining processes."""
        self.kill()
        self.wait(60)
        for stream in (self.stdout, self.stderr, self._status):
            stream.close()
        self._write("")


def run(*arguments: object, text: str = "", timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """The program's status and output after it has ended; takes the arguments of `Program`."""
    program = Program(*arguments, **options)
    try:
        out, err = program.communicate(text, timeout=timeout)
        return subprocess.CompletedProcess(program.args, program.wait(timeout), out, err)
    finally:
        program.close()


@functools.cache
def _warm() -> socket.socket:
    """The socket of the warm process, which serves requests until this process ends."""
    mine, its = socket.socketpair()
    with its:
        warm = subprocess.Popen(
            [sys.executable, "-m", "tests.support.programs", str(its.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            start_new_session=True,  # Ctrl-C ends the tests, and they end it
        )

    def end() -> None:
        mine.close()
        warm.terminate()
        warm.wait()

    atexit.register(end)
    return mine


# ------------------------------------------------------------------------------------------- in the warm process


def _serve(requests: socket.socket) -> list[str]:
    """Fork a process for each request; returns only in the forked processes, with the program's arguments."""
    running: dict[int, socket.socket] = {}
    wakeup, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno())
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(wakeup, selectors.EVENT_READ)
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if wakeup in ready:
            wakeup.recv(1000)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with running.pop(pid) as teller:
                        _tell(teller, os.waitstatus_to_exitcode(status))
        if requests not in ready:
            continue
        size, descriptors, _, _ = socket.recv_fds(requests, 8, 4)
        if not size:
            os._exit(0)
        request = json.loads(requests.recv(int(size), socket.MSG_WAITALL))
        *pipes, number = descriptors
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            with socket.socket(fileno=number) as teller:
                _tell(teller, os.getpid())  # sent by the child: its group exists and can be killed
            selector.close()
            for opened in (requests, wakeup, woken, *running.values()):
                opened.close()
            return _become(request, pipes)
        for descriptor in pipes:
            os.close(descriptor)
        running[pid] = socket.socket(fileno=number)


def _tell(teller: socket.socket, number: int) -> None:
    try:
        teller.send(b"%8d" % number)
    except BrokenPipeError:  # the requesting process has ended
        pass


def _become(request: dict[str, Any], pipes: list[int]) -> list[str]:
    for target, pipe in enumerate(pipes):
        os.dup2(pipe, target)
        os.close(pipe)
    for number, name, errors in ((0, "stdin", "strict"), (1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        # new streams: those of the warm process belong to its files
        stream = os.fdopen(number, "w" if number else "r", encoding="utf-8", errors=errors, closefd=False)
        stream.reconfigure(line_buffering=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.modules["numpy"].random.seed()  # as in a Python that has just started
    arguments: list[str] = request["arguments"]
    return arguments


def _be_python(first: str, *rest: str) -> None:
    if first == "-m":
        sys.argv, sys.path[0] = [first, *rest[1:]], str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    if first == "-c":
        code, file = rest[0].encode(), "<string>"
        sys.argv, sys.path[0] = [first, *rest[1:]], ""
    else:
        script = Path(first).resolve()
        code, file = script.read_bytes(), str(script)
        sys.argv, sys.path[0] = [first, *rest], str(script.parent)
        main.__file__ = file
    sys.modules["__main__"] = main
    exec(compile(code, file, "exec"), main.__dict__)


if __name__ == "__main__":
    for each in IMPORTED:
        importlib.import_module(each)
    gc.freeze()  # otherwise each program's last collection copies the pages of all imports: a second of CPU
    # at module level: the program exits as Python does, with the status that Python sets
    _be_python(*_serve(socket.socket(fileno=int(sys.argv[1]))))
