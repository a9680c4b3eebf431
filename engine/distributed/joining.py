"""Joining the processes that train together: torch's default group, and a group of our own for agreement."""

from __future__ import annotations

import atexit
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import islice

import torch.distributed
from torch.distributed import (  # type: ignore[attr-defined]  # part of torch's documented interface
    HashStore,
    TCPStore,
)
from torch.distributed.distributed_c10d import PrefixStore, Store

from pulsetrain.engine.distributed.collectives import PATIENCE, ControlGroup
from pulsetrain.engine.distributed.launcher import started
from pulsetrain.engine.distributed.ranks import Ranks, ranks
from pulsetrain.engine.distributed.replicas import differ, digest
from pulsetrain.engine.errors import ConfigurationError, PeerFailed

__all__ = ["busy", "check_alike", "check_apart", "join", "join_alone", "leave"]

TIMEOUT = 60.0  # seconds
_EAGER = 256  # processes up to which each connects to each other one: in two groups, that takes 520 open files
_ALONE = "; tasks of srun that train a model each need RANK=0 and WORLD_SIZE=1"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of a function, differs between processes
_joined: tuple[object, ControlGroup] | None = None  # torch's default group, and ours beside it
_made_default = False  # whether that group was made here


def join(timeout: float = TIMEOUT) -> ControlGroup:
    """The group by which the processes agree; if torchrun or srun has started them, torch's default one is made first.

    A default group that exists is kept, and its settings hold for the gradients. All ranks have to call this.

    Args:
        timeout: seconds until a missing rank is named, here and in later collectives of this group.

    Raises:
        PeerFailed: a rank is missing; the message names it.
        ConfigurationError: the environment does not say where to meet, or the address is in use.

    >>> join().is_shared
    False
    """
    global _joined, _made_default
    found = ranks()
    if found.world_size == 1:
        return ControlGroup(found)
    if found.world_size > _EAGER:
        # else each process connects to each other one before the first collective, and asks the store where each is
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store: Store | None = None
    if not torch.distributed.is_initialized():
        store = _meet(found, timeout)
        if torch.cuda.is_available():  # else every process of a host would use its first one
            torch.cuda.set_device(started().local_rank % torch.cuda.device_count())
        torch.distributed.init_process_group(store=store, rank=found.rank, world_size=found.world_size)
        _made_default = True
    group = torch.distributed.group.WORLD
    if _joined is None or _joined[0] is not group:
        gloo = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))
        # a launcher's store outlives a start: what the processes of the last one have posted is not read again
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        shared = PrefixStore(f"pulsetrain-{start}", _store_beside(found, timeout) if store is None else store)
        _joined = group, ControlGroup(found, gloo, shared, timeout, host=None if _has_launcher() else 0)
        atexit.register(leave)
    return _joined[1]


def join_alone() -> None:
    """Make torch's default group of this process, if there is none: for libraries that ask it for groups of one."""
    global _made_default
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        _made_default = True
        atexit.register(leave)


@contextmanager
def busy() -> Iterator[None]:
    """A block of work, such as saving, that one of several processes does alone: the others wait until it is done."""
    with nullcontext() if _joined is None else _joined[1].busy():
        yield


def leave() -> None:
    """Leave the group of `join`, and torch's default one, if `join` has made it."""
    global _joined, _made_default
    if _joined is not None:
        _joined[1].close()
    _joined = None
    if _made_default and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _made_default = False


def check_apart(control: ControlGroup, device: torch.device) -> None:
    """Refuse processes that share a GPU, which NCCL does not support; they all have to call this.

    Raises:
        ConfigurationError: two of them do; the message names them.
    """
    if not control.is_shared or device.type != "cuda":
        return
    places = control.gather(_gpu(device))
    for rank, place in enumerate(places):
        if (first := places.index(place)) != rank:
            raise ConfigurationError(
                f"ranks {first} and {rank} would both train on {place}, and a GPU cannot be shared by processes that "
                "train together; start one process for each GPU, or pass device='cpu'"
            )


def _gpu(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} {found.uuid} of {socket.gethostname()}"


def check_alike(control: ControlGroup, facts: Mapping[str, object]) -> None:
    """Compare what has to be equal on all ranks; they all have to call this.

    They compare digests first. The facts themselves, which name every tensor of the model, are sent only if those
    differ, and to the main process alone.

    Args:
        control: joins them.
        facts: name -> value, compared by its `repr` without addresses.

    Raises:
        ConfigurationError: a rank differs from rank 0; the message names the rank, what differs, and both values.
    """
    texts = {name: _ADDRESS.sub("", repr(value)) for name, value in facts.items()}
    if not differ(control.sum(digest(texts), "the checks at the start"), control.ranks.world_size):
        return
    different = control.broadcast(_differences(control.collect(texts)))
    if different:
        raise ConfigurationError(f"the processes have to be started alike, and differ: {'; '.join(different)}")


def _differences(everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """The first ones between rank 0 and the others, as text."""
    found = (
        f"rank {rank} has {name}={_short(theirs.get(name, 'nothing'))}, rank 0 has {_short(text)}"
        for rank, theirs in enumerate(everyone)
        for name in {**everyone[0], **theirs}
        if theirs.get(name) != (text := everyone[0].get(name, "nothing"))
    )
    return list(islice(found, 8))


def _listed(ranks: list[str]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(ranks)} have"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _meet(found: Ranks, timeout: float) -> Store:
    """The store of all ranks, once each of them has come."""
    here = started()
    host, port = here.address, here.port
    if not host or not port:
        if here.by == "Slurm":
            raise ConfigurationError(
                f"srun has started {found.world_size} tasks, and neither SLURM_STEP_NODELIST nor MASTER_ADDR says "
                "where they meet; set MASTER_ADDR to the host of rank 0"
            )
        raise ConfigurationError(
            f"WORLD_SIZE={found.world_size} says that several processes train together, and MASTER_ADDR and "
            "MASTER_PORT do not say where they meet; start them with torchrun, or unset RANK and WORLD_SIZE"
        )
    hosts = found.rank == 0 and not _has_launcher()
    keeper = "the launcher" if _has_launcher() else "rank 0"
    try:
        store = _connect(host, port, timeout, hosts=hosts)
    except RuntimeError as error:
        if hosts:
            raise ConfigurationError(
                f"{host}:{port}, where the processes are to meet, cannot be used: {str(error).splitlines()[0]}; "
                "choose another MASTER_PORT"
            ) from None
        raise PeerFailed(f"{keeper} has not come to {host}:{port} within {timeout:g} s") from None
    # after a restart, ranks would otherwise find the addresses of processes that have ended
    attempt = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        missing = [str(rank) for rank in _absent_after(attempt, found, timeout)]
    except RuntimeError as error:  # of the connection
        raise PeerFailed(
            f"{keeper} has ended while the processes were to meet at {host}:{port}; see its output "
            f"({str(error).splitlines()[0]})"
        ) from None
    if missing:
        raise PeerFailed(
            f"of {found.world_size} processes, {_listed(missing)} not come to {host}:{port} within "
            f"{timeout:g} s; see its output, and whether it was started"
            f"{_ALONE if here.by == 'Slurm' else ''}"
        )
    return attempt


def _absent_after(store: Store, found: Ranks, timeout: float) -> list[int]:
    """The ranks that have not come within so many seconds.

    Each rank makes a few requests: if each waited for each other one, 10,000 of them would make 100 million.
    """
    here = f"here/{found.rank}"
    if not store.check([here]):
        store.set(here, "")
        if store.add("come", 1) == found.world_size:
            store.set("all", "")
    try:
        store.wait(["all"], timedelta(seconds=timeout))
    except RuntimeError:
        return _absent(store, range(found.world_size))
    return []


def _absent(store: Store, among: range) -> list[int]:
    """Those of these ranks that have not come: of each half, as long as one is missing in it."""
    if store.check([f"here/{rank}" for rank in among]):
        return []
    if len(among) == 1:
        return list(among)
    middle = len(among) // 2
    return [*_absent(store, among[:middle]), *_absent(store, among[middle:])]


def _store_beside(found: Ranks, timeout: float) -> Store:
    """A store for ranks whose default group the user has made: the launcher's, else one of rank 0."""
    if _has_launcher():
        launcher = started()
        return _connect(launcher.address, launcher.port, timeout, hosts=False)
    address: list[str | int] = [socket.gethostname(), 0]
    hosted = _connect("localhost", 0, timeout, hosts=True) if found.is_main else None
    if hosted is not None:
        address[1] = hosted.port  # type: ignore[attr-defined]  # of a TCPStore
    torch.distributed.broadcast_object_list(address)
    host, port = str(address[0]), int(address[1])
    if hosted is not None:
        return hosted
    try:
        return _connect(host, port, min(timeout, 5.0), hosts=False)
    except RuntimeError:  # a host that does not know its own name
        return _connect("localhost", port, timeout, hosts=False)


def _has_launcher() -> bool:
    """Whether torchrun has started this process, and holds a store that outlives it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(host: str, port: int, timeout: float, *, hosts: bool) -> Store:
    store: Store = TCPStore(host, port, is_master=hosts, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    return store
