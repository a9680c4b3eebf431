"""Starts the processes of a run on this machine, and starts them again if one is killed; or one node's of several."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pulsetrain.cli.reports import FAILED, PROGRAM, program
from pulsetrain.engine.distributed.failures import Warden
from pulsetrain.engine.distributed.launcher import started
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["Launch", "launch", "launch_once", "started_with"]

_RESTARTS = 3  # without a new checkpoint in between
_NAMES = ("nproc", "min_nproc")
_OF_NODES = ("nnodes", "node_rank", "master_addr", "master_port")
_MEETING = 3600  # seconds in which all nodes of a run have to start
_FORWARDED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"  # the last two are Slurm's warnings, by --signal
_OPTIONS = "PULSETRAIN_LAUNCH"  # the environment variable in which the processes find how they were started


@dataclass(frozen=True)
class Launch:
    """How many processes to start.

    Args:
        nproc: processes on this machine, which divide each batch.
        min_nproc: the least to restart with if processes keep failing before the next checkpoint; by default `nproc`.
        nnodes: machines of the run; a run on several needs, on each, this setting and the next three.
        node_rank: which of the machines this is, counted from 0.
        master_addr: the host of machine 0.
        master_port: a free port of machine 0.

    >>> Launch.of({"training.seed": "1"}) is None, Launch.of({"launch.nproc": "2"})
    (True, Launch(nproc=2, min_nproc=2, nnodes=1, node_rank=0, master_addr='127.0.0.1', master_port=0))
    """

    nproc: int
    min_nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def options(self) -> list[str]:
        """The words of a command line that say this; none of a run on several machines, where each has its own."""
        return [f"--launch.nproc={self.nproc}", f"--launch.min_nproc={self.min_nproc}"] if self.nnodes == 1 else []

    @classmethod
    def of(cls, settings: Mapping[str, str], *, several_nodes: bool = False) -> Launch | None:
        """What the options `--launch.*` say; None without them.

        Args:
            settings: those of the command line.
            several_nodes: whether the command can run on several machines.

        Raises:
            ConfigurationError: another name, or not a number of processes.
        """
        given = {name.removeprefix("launch."): text for name, text in settings.items() if name.startswith("launch.")}
        if not given:
            return None
        names = (*_NAMES, *_OF_NODES) if several_nodes else _NAMES
        for name in given:
            if name not in names:
                raise ConfigurationError(f"--launch.{name}: no such option; there are {', '.join(names)}")
        nodes = _nodes(given)
        for name, text in given.items():
            if not text.isdecimal() or not int(text):
                raise ConfigurationError(f"--launch.{name}={text}: needs a number of processes, at least 1")
        if "nproc" not in given:
            name = "min_nproc" if "min_nproc" in given else "nnodes"
            raise ConfigurationError(f"--launch.{name}: needs --launch.nproc, the number of processes to start with")
        found = cls(int(given["nproc"]), int(given.get("min_nproc", given["nproc"])), **nodes)
        if nodes and found.min_nproc < found.nproc:
            raise ConfigurationError(
                f"--launch.min_nproc={found.min_nproc}: is for one machine, not for {found.nnodes} nodes; leave it out"
            )
        if found.min_nproc > found.nproc:
            raise ConfigurationError(f"--launch.min_nproc={found.min_nproc}: is more than --launch.nproc={found.nproc}")
        return found


def _nodes(given: dict[str, str]) -> dict[str, Any]:
    """The fields about nodes; what was given about them is taken out."""
    taken = {name: given.pop(name) for name in _OF_NODES if name in given}
    if not taken:
        return {}
    for name in _OF_NODES:
        if name not in taken:
            raise ConfigurationError(
                f"--launch.{name}: is missing; a run on several nodes needs, on each of them, {', '.join(_OF_NODES)}"
            )
        least = {"node_rank": 0, "nnodes": 2}.get(name, 1)
        if name != "master_addr" and (not taken[name].isdecimal() or int(taken[name]) < least):
            raise ConfigurationError(f"--launch.{name}={taken[name]}: needs a whole number of at least {least}")
    count, rank = int(taken["nnodes"]), int(taken["node_rank"])
    if rank >= count:
        raise ConfigurationError(f"--launch.node_rank={rank}: nodes are counted from 0, and there are {count}")
    address, port = taken["master_addr"], int(taken["master_port"])
    return {"nnodes": count, "node_rank": rank, "master_addr": address, "master_port": port}


def launch(how: Launch, words: Sequence[str], progress: Callable[[], object]) -> int:
    """Run `pulsetrain train` with these words in several processes; returns their exit status.

    If a process is killed, or ends since it waited for one that hangs, all are started again from the newest
    checkpoint: first as many as before; if they fail again before the next checkpoint, one fewer, down to the least
    number. An error of the run is not tried again, nor is one of several nodes, whose others would not follow.

    Args:
        how: how many.
        words: of the command line, without those about launching.
        progress: gives something that differs once the run has saved another checkpoint.

    Raises:
        ConfigurationError: this process is one of several already.
    """
    count, failed, before = how.nproc, 0, progress()
    while True:
        resumed = list(words)
        if failed and "--resume" in resumed:
            resumed[resumed.index("--resume") + 1] = "latest"
        elif failed:
            resumed += ["--resume", "latest"]
        ended = _start(count, ["train", *resumed], how)
        if how.nnodes > 1 and ended.status < 0:
            print(f"pulsetrain: rank {ended.rank} was ended by signal {-ended.status}", file=sys.stderr)
            return 128 - ended.status
        if how.nnodes > 1 or ended.rank is None or (ended.status > 0 and ended.status != Warden.STATUS):
            return ended.status
        now = progress()
        failed, before = (1 if now != before else failed + 1), now
        count = max(how.min_nproc, count - (failed > 1))
        how_ended = "waited for another one in vain" if ended.status > 0 else f"was ended by signal {-ended.status}"
        why = f"rank {ended.rank} {how_ended}"
        if failed > _RESTARTS:
            print(f"pulsetrain: {why}, again without a new checkpoint; not started again", file=sys.stderr)
            return FAILED
        print(f"pulsetrain: {why}; starting {count} again from the newest checkpoint", file=sys.stderr, flush=True)


def launch_once(count: int, words: Sequence[str], threads: int | None = None) -> int:
    """Run `pulsetrain` with these words in several processes; returns the exit status of the first that fails.

    Args:
        count: how many.
        words: of the command line, without those about launching.
        threads: of each process; by default an even share of the processors.
    """
    if threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a status other than 0 is not a failure
    ended = _start(count, words, Launch(count, count))
    if ended.status >= 0:
        return ended.status
    print(f"pulsetrain: rank {ended.rank} was ended by signal {-ended.status}", file=sys.stderr)
    return FAILED


class _Ended(NamedTuple):
    """How the processes have ended."""

    rank: int | None  # the first that failed, if one did
    status: int  # its exit status, or less than 0 if a signal ended it


def _start(count: int, words: Sequence[str], how: Launch) -> _Ended:
    """Start so many processes, which were asked for like this, and wait for their end."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the processes report their errors
    already = started()
    if already.world_size > 1:
        raise ConfigurationError(
            f"--launch.nproc={count}: {already.by} has started {already.world_size} processes already, and each of "
            "them would start a run; leave it out, or start this command once"
        )
    # earlier versions of torch forward the first four alone
    forwarded: Any = {"signals_to_handle": _FORWARDED} if hasattr(LaunchConfig, "signals_to_handle") else {}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "run_id": uuid.uuid4().hex}
    if how.nnodes > 1:
        place = {"rank": how.node_rank, "timeout": _MEETING}
        meeting = {"rdzv_backend": "static", "rdzv_configs": place, "run_id": "pulsetrain"}
    config = LaunchConfig(
        min_nodes=how.nnodes, max_nodes=how.nnodes, nproc_per_node=count, max_restarts=0, monitor_interval=0.1,
        rdzv_endpoint=f"{how.master_addr}:{how.master_port}", start_method="spawn", **meeting, **forwarded,
    )  # fmt: skip
    passed = {_OPTIONS: " ".join(how.options), PROGRAM: shlex.join(program())}
    before = {name: os.environ[name] for name in passed if name in os.environ}
    os.environ.update(passed)
    try:
        elastic_launch(config, sys.executable)("-m", "pulsetrain", *words)
    except SignalException as stopped:
        return _Ended(None, 128 + int(stopped.sigval))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _Ended(rank, int(failure.exitcode))
    finally:
        for name in passed:
            os.environ.pop(name)
        os.environ.update(before)
    return _Ended(None, 0)


def started_with() -> list[str]:
    """The options of `pulsetrain train` that start as many processes as this one is of; none by another launcher."""
    return os.environ.get(_OPTIONS, "").split()
