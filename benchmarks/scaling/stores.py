"""What the store that all ranks share can answer, and what they ask of it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # part of torch's documented interface
    HashStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from pulsetrain.engine.distributed.joining import _absent_after, join
from pulsetrain.engine.distributed.ranks import Ranks

__all__ = ["of_a_group", "requests_of_joining", "requests_per_second", "seconds_of_a_sum"]

PATIENCE = 60  # seconds beyond those of the measurement until a client of a store has to have answered


def requests_per_second(clients: int, seconds: float = 1.0) -> float:
    """How many requests a TCPStore answers; each client is a process, and all share the cores with the store."""
    context = multiprocessing.get_context("fork")
    (mine, theirs), ports = context.Pipe(), context.SimpleQueue()
    processes = [
        context.Process(target=_ask, args=(ports, clients, seconds, theirs), daemon=True) for _ in range(clients)
    ]
    for process in processes:
        process.start()
    # after the forks: in a child, a lock that the store's thread holds meanwhile would never be free again
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("there", "")
    for _ in processes:
        ports.put(store.port)
    found: list[tuple[int, float]] = []
    for _ in processes:
        if not mine.poll(seconds + PATIENCE):
            raise RuntimeError(f"{len(found)} of {clients} clients of a store have answered within {PATIENCE} s")
        found.append(mine.recv())
    for process in processes:
        process.join()
    return sum(count / taken for count, taken in found)


def _ask(ports: SimpleQueue[int], clients: int, seconds: float, connection: Connection) -> None:
    store = TCPStore("127.0.0.1", ports.get(), is_master=False)
    store.add("come", 1)
    while store.add("come", 0) < clients:
        time.sleep(0.01)
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        store.check(["there"])
        count += 1
    connection.send((count, taken))


class _Counting:
    """A store that counts what a rank asks."""

    def __init__(self, store: HashStore) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def requests_of_joining(ranks: int) -> int:
    """The most requests that a rank makes until it knows that all have come; each is a thread."""
    shared = HashStore()
    stores = [_Counting(shared) for _ in range(ranks)]
    threads = [
        threading.Thread(target=_absent_after, args=(store, Ranks(rank, ranks), 30.0))
        for rank, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(store.requests for store in stores)


class _Counted(Store):
    """A store that counts what torch asks for a rank."""

    def __init__(self, store: HashStore) -> None:
        super().__init__()
        self._store, self.requests = store, 0

    def set(self, key: str, value: str) -> None:
        """One request."""
        self.requests += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """One request."""
        self.requests += 1
        return self._store.get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """One request."""
        self.requests += 1
        self._store.wait(keys, *timeout)

    def has_extended_api(self) -> bool:
        """Whether several keys may be asked for at once; as in a store with a prefix."""
        return False


def of_a_group(ranks: int, *, lazy: bool) -> tuple[float, float]:
    """Requests of a rank, and files that it has open, for a gloo group and one sum in it; each rank is a thread."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_make_group, args=(ranks, lazy, theirs), daemon=True)
    process.start()
    found: tuple[float, float] = mine.recv()
    process.join()
    return found


def _make_group(ranks: int, lazy: bool, connection: Connection) -> None:
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))  # read once by torch
    shared = HashStore()
    stores, before = [_Counted(shared) for _ in range(ranks)], len(os.listdir("/proc/self/fd"))
    over = threading.Barrier(ranks + 1)

    def meet(rank: int) -> None:
        group: Any = ProcessGroupGloo(stores[rank], rank, ranks, timedelta(seconds=60))
        group.allreduce([torch.ones(64, dtype=torch.float64)]).wait()
        over.wait()  # the group is still there
        over.wait()

    threads = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    over.wait()
    opened = len(os.listdir("/proc/self/fd")) - before
    connection.send((sum(store.requests for store in stores) / ranks, opened / ranks))
    os._exit(0)


def seconds_of_a_sum(ranks: int, count: int = 200) -> float:
    """What a sum of the control group takes on this machine, whose cores the processes share."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    processes = [
        context.Process(target=_sum, args=(rank, ranks, port, count, theirs), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: float = mine.recv()
    for process in processes:
        process.join()
    return found


def _sum(rank: int, ranks: int, port: int, count: int, connection: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    control = join()
    for _ in range(20):
        control.barrier()
    start = time.perf_counter()
    for _ in range(count):
        control.sum([1.0])
    seconds = (time.perf_counter() - start) / count
    if rank == 0:
        connection.send(seconds)
    control.barrier()
