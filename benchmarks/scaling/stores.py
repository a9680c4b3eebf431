"""What the store that all ranks share can answer, and what they ask of it."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # part of torch's documented interface

from pulsetrain.engine.distributed.joining import _absent_after, join
from pulsetrain.engine.distributed.ranks import Ranks

__all__ = ["requests_of_joining", "requests_per_second", "seconds_of_a_sum"]


def requests_per_second(clients: int, seconds: float = 1.0) -> float:
    """How many requests a TCPStore answers; each client is a process, and all share the cores with the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("there", "")
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    processes = [context.Process(target=_ask, args=(store.port, clients, seconds, theirs)) for _ in range(clients)]
    for process in processes:
        process.start()
    found: list[tuple[int, float]] = [mine.recv() for _ in processes]
    for process in processes:
        process.join()
    return sum(count / taken for count, taken in found)


def _ask(port: int, clients: int, seconds: float, connection: Connection) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
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
