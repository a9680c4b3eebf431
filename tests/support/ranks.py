"""Several processes that train together, forked from this one: they need not import torch again."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports for a second: else each process does so by itself
import torch.distributed

from tests.support.ports import free_port

__all__ = ["Ended", "in_processes"]


class Ended:
    """How a process ended: its status, what its body returned or raised, and what it wrote to stderr."""

    def __init__(self, status: int, value: Any, error: str, stderr: str) -> None:
        self.status, self.value, self.error, self.stderr = status, value, error, stderr


def in_processes(
    body: Callable[[int], Any],
    world: int = 2,
    *,
    own_group: bool = False,
    started: int | None = None,
    limit: float = 180.0,
) -> list[Ended]:
    """Run a function of the rank in each of several processes; fails the test if one is still there after the limit.

    Args:
        body: its result has to be picklable.
        world: processes.
        own_group: make torch's default group first, as a user may; otherwise only the environment says where to meet.
        started: how many of them to start; all by default.
        limit: seconds.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(body, rank, world, port, own_group, Path(folder)) for rank in range(started or world)]
        until, waiting = time.monotonic() + limit, dict(enumerate(children))
        statuses: dict[int, int] = {}
        while waiting and time.monotonic() < until:
            for rank, pid in list(waiting.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                    del waiting[rank]
            time.sleep(0.01)
        for pid in waiting.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found = [_read(Path(folder), rank, statuses.get(rank, -9)) for rank in range(len(children))]
    assert not waiting, f"ranks {list(waiting)} hang; others: {[(each.value, each.error) for each in found]}"
    return found


def _fork(body: Callable[[int], Any], rank: int, world: int, port: int, own_group: bool, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status, value, error = 1, None, ""
    try:
        stderr = os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT)
        os.dup2(stderr, 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.set_num_threads(1)
        if own_group:
            torch.distributed.init_process_group("gloo")
        value, status = body(rank), 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        error = traceback.format_exc()
    finally:
        try:
            (folder / str(rank)).write_bytes(pickle.dumps((value, error)))
        finally:
            os._exit(status)


def _read(folder: Path, rank: int, status: int) -> Ended:
    path, stderr = folder / str(rank), folder / f"{rank}.stderr"
    value, error = pickle.loads(path.read_bytes()) if path.exists() else (None, "it left nothing")
    return Ended(status, value, error, stderr.read_text() if stderr.exists() else "")
