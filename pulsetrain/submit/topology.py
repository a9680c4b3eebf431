"""How many processes a configuration needs, and on how many nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import ConfigurationError, did_you_mean

__all__ = ["Layout", "layout_of"]

_NAMES = ("nproc", "nnodes", "min_nproc")


@dataclass(frozen=True)
class Layout:
    """The processes of one run."""

    nproc: int  # on each node
    nnodes: int = 1
    min_nproc: int | None = None  # on one machine: with how many the run may continue where processes fail


def layout_of(config: Mapping[str, Any], settings: Mapping[str, str]) -> Layout:
    """The processes that `--launch.nproc` and `--launch.nnodes` ask for, or else the least that `parallel` needs.

    >>> layout_of({"parallel": {"shard": 2, "tensor": 2}}, {})
    Layout(nproc=4, nnodes=1, min_nproc=None)
    >>> layout_of({"parallel": {"shard": 2, "tensor": 2}}, {"launch.nproc": "4", "launch.nnodes": "2"})
    Layout(nproc=4, nnodes=2, min_nproc=None)

    Args:
        config: the configuration.
        settings: those of the command line, with the names `launch.*`.

    Raises:
        ConfigurationError: an option that does not exist, no number, or a number that does not fit `parallel`.
    """
    given = {name.removeprefix("launch."): text for name, text in settings.items() if name.startswith("launch.")}
    for name, text in given.items():
        if name not in _NAMES:
            raise ConfigurationError(
                f"--launch.{name}: no such option; there are {', '.join(_NAMES)}{did_you_mean(name, _NAMES)}"
            )
        if not text.isdecimal() or not int(text):
            raise ConfigurationError(f"--launch.{name}={text}: needs a whole number of at least 1")
    topology = Topology(**(config.get("parallel") or {}))
    counts = (topology.replicate, topology.shard, topology.tensor, topology.pipeline)
    least = 1
    for count in counts:
        least *= max(1, count)
    nnodes = int(given.get("nnodes", 1))
    if "nproc" not in given and least % nnodes and nnodes % least:
        raise ConfigurationError(
            f"--launch.nnodes={nnodes}: the section parallel needs {least} processes, which {nnodes} nodes cannot "
            "share evenly; give --launch.nproc, the number of processes on each node"
        )
    found = Layout(int(given.get("nproc", max(1, least // nnodes))), nnodes)
    if "min_nproc" in given:
        found = replace(found, min_nproc=int(given["min_nproc"]))
        if nnodes > 1:
            raise ConfigurationError(
                f"--launch.min_nproc={found.min_nproc}: is for one machine, not for {nnodes} nodes; leave it out"
            )
        if int(given["min_nproc"]) > found.nproc:
            raise ConfigurationError(f"--launch.min_nproc={found.min_nproc}: is more than --launch.nproc={found.nproc}")
    total = found.nproc * found.nnodes
    if total % least:
        raise ConfigurationError(
            f"--launch.nproc={found.nproc} on {nnodes} node(s): the section parallel needs {least} processes or a "
            f"multiple of them, and this makes {total}"
        )
    return found
