"""How this process was started: what torchrun, or Slurm's srun, says about its rank and where all ranks meet."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["Started", "hosts", "slurm_job", "started"]

_SPECIAL_STEPS = 1 << 31  # from here on, Slurm's numbers of steps mean batch scripts, shells of salloc, and the like
_PORTS = range(20_000, 30_000)  # below those that Linux gives to outgoing connections
_LAST_PORT = 65_535
_TAKE_ALL = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process, which then count alone, or none of them"


class Started(NamedTuple):
    """The rank of this process, and where the ranks meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of its host
    address: str = ""  # of the host of rank 0; empty if the environment does not say
    port: int = 0  # 0 if the environment does not say
    by: str = ""  # "torchrun" or "Slurm"; empty if this process was started alone


def started(environment: Mapping[str, str] = os.environ) -> Started:
    """What the environment says: torchrun's variables if they are set, else Slurm's, in a step of several tasks.

    A batch script or an interactive shell of Slurm is one process, whatever the number of tasks of its job.

    >>> started({})
    Started(rank=0, world_size=1, local_rank=0, address='', port=0, by='')
    >>> slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    >>> started(slurm | {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "gpu[08-09]"})
    Started(rank=3, world_size=4, local_rank=1, address='gpu08', port=23719, by='Slurm')

    Raises:
        ConfigurationError: variables contradict each other, or cannot be read; the message names them.
    """
    if environment.get("RANK") and environment.get("WORLD_SIZE"):
        return _by_torchrun(environment)
    return _by_slurm(environment) if _is_task(environment) else Started()


def slurm_job(environment: Mapping[str, str] = os.environ) -> str:
    """The number of the Slurm job that this process belongs to; empty if there is none."""
    return environment.get("SLURM_JOB_ID", "")


def hosts(nodes: str) -> Iterator[str]:
    """The hosts in Slurm's notation, one after the other, however many there are.

    >>> list(hosts("gpu[08-10,12],login1,rack[1-2]n[1,3]-ib"))
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1', 'rack1n1-ib', 'rack1n3-ib', 'rack2n1-ib', 'rack2n3-ib']

    Raises:
        ValueError: the text is not in that notation.
    """
    depth = begin = 0
    for at, letter in enumerate(f"{nodes},"):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"unmatched brackets in {nodes!r}")
        if letter == "," and depth == 0:
            yield from _expanded(nodes[begin:at], nodes)
            begin = at + 1
    if depth:
        raise ValueError(f"unmatched brackets in {nodes!r}")


def _expanded(part: str, nodes: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        if not part:
            raise ValueError(f"an empty name in {nodes!r}")
        yield part
        return
    inside, _, after = rest.partition("]")
    for each in inside.split(","):
        first, dash, last = each.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(f"{each!r} is not a range of numbers in {nodes!r}")
        for number in range(int(first), int(last) + 1):
            name = f"{before}{number:0{len(first)}}"
            if after:
                yield from (name + end for end in _expanded(after, nodes))
            else:
                yield name


def _by_torchrun(environment: Mapping[str, str]) -> Started:
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank >= world_size:
        raise ConfigurationError(
            f"RANK={rank} and WORLD_SIZE={world_size} contradict each other: ranks are counted from 0; start the "
            "processes with torchrun or srun, or unset both"
        )
    return Started(
        rank,
        world_size,
        _number(environment, "LOCAL_RANK") if environment.get("LOCAL_RANK") else rank,
        environment.get("MASTER_ADDR", ""),
        _port_of_user(environment) if environment.get("MASTER_PORT") else 0,
        "torchrun",
    )


def _is_task(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks that srun has started together."""
    step = environment.get("SLURM_STEP_ID", "")  # not there in a batch script
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS or "SLURM_PROCID" not in environment:
        return False
    return _number(environment, _tasks(environment)) > 1


def _tasks(environment: Mapping[str, str]) -> str:
    """The variable with the number of tasks: that of the step, for the other one may be the job's."""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"


def _by_slurm(environment: Mapping[str, str]) -> Started:
    tasks = _tasks(environment)
    rank, world_size = _number(environment, "SLURM_PROCID"), _number(environment, tasks)
    if rank >= world_size:
        raise ConfigurationError(
            f"SLURM_PROCID={rank} and {tasks}={world_size} contradict each other: tasks are counted from 0; {_TAKE_ALL}"
        )
    for name, own, of_slurm in (("RANK", rank, "SLURM_PROCID"), ("WORLD_SIZE", world_size, tasks)):
        if environment.get(name) and _number(environment, name) != own:
            raise ConfigurationError(
                f"{name}={environment[name]} and {of_slurm}={own} contradict each other; {_TAKE_ALL}"
            )
    return Started(
        rank,
        world_size,
        _number(environment, "SLURM_LOCALID") if "SLURM_LOCALID" in environment else rank,
        environment.get("MASTER_ADDR") or _first_host(environment, rank),
        _port_of_user(environment) if environment.get("MASTER_PORT") else _port(environment),
        "Slurm",
    )


def _first_host(environment: Mapping[str, str], rank: int) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        nodes = environment.get(name)
        if not nodes:
            continue
        try:
            first = next(hosts(nodes))
        except ValueError as error:
            raise ConfigurationError(f"{name}: {error}; set MASTER_ADDR to the host of rank 0") from None
        here = environment.get("SLURMD_NODENAME", first)
        if rank == 0 and here != first:  # --distribution=arbitrary
            raise ConfigurationError(
                f"{name}={nodes} begins with {first}, and SLURMD_NODENAME={here} is the host of rank 0, where the "
                "processes have to meet; set MASTER_ADDR to it in each of them"
            )
        return first
    return ""


def _port(environment: Mapping[str, str]) -> int:
    """The same in all tasks of a step, and probably another one in other steps on the host, or after a requeue."""
    step = f"{slurm_job(environment)}.{environment['SLURM_STEP_ID']}"
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    step += "" if restarts == "0" else f".{restarts}"
    return _PORTS[zlib.crc32(step.encode()) % len(_PORTS)]


def _port_of_user(environment: Mapping[str, str]) -> int:
    port = _number(environment, "MASTER_PORT")
    if port > _LAST_PORT:
        raise ConfigurationError(f"MASTER_PORT={port}: ports end at {_LAST_PORT}; set it to one that is free")
    return port


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal() or len(text) > 10:
        raise ConfigurationError(f"{name}={text}: is not a number; start the processes with torchrun or srun")
    return int(text)
