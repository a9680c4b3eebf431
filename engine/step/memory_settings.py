"""Settings of a run's memory: what is computed again, and what is kept outside the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from pulsetrain.engine.argument_checks import check_choice, check_whole_number
from pulsetrain.engine.errors import refused

__all__ = ["ActivationCheckpointing", "ActivationOffload", "OffloadPolicy", "OptimizerOffload"]


@dataclass(frozen=True, repr=False)
class ActivationCheckpointing:
    """Which modules compute their activations again in the backward pass, and what they keep nevertheless.

    An operator that draws random numbers, or that changes its arguments, is always computed again. So outputs and
    gradients are those of a run that keeps everything, bit for bit.

    Args:
        modules: their names, in which `*` matches anything between two dots: "blocks.*".
        every: only every n-th of these modules, beginning with the first: 2 for every second block.
        keep: the operators whose results are kept, as "aten.mm"; "matmul" means all of matrix products, and "sdpa" all
            of scaled dot-product attention.
        policy: a function that decides what is kept, as torch defines it: `policy(context, operator, *arguments,
            **named)` returns a `torch.utils.checkpoint.CheckpointPolicy`, or whether to keep what the operator
            returns. In a configuration, its import path.

    Raises:
        ConfigurationError: `every` is not a whole number of at least 1, or both `keep` and `policy` are given. A name
            that no operator or module has is refused when the model is prepared.

    >>> ActivationCheckpointing("blocks.*", every=2, keep=["mm", "sdpa"])
    ActivationCheckpointing('blocks.*', every=2, keep=('mm', 'sdpa'))
    """

    modules: str
    _: KW_ONLY
    every: int = 1
    keep: Sequence[str] = ()
    policy: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.modules, str) or not self.modules:
            raise refused(self, "needs the names of modules, such as 'blocks.*'", "modules")
        check_whole_number("ActivationCheckpointing", "every", self.every)
        if isinstance(self.keep, str) or not all(isinstance(each, str) for each in self.keep):
            raise refused(self, "needs a list of operators, such as ['mm', 'sdpa']", "keep")
        object.__setattr__(self, "keep", tuple(self.keep))
        if self.policy is not None and not callable(self.policy):
            raise refused(self, "needs a function policy(context, operator, *arguments, **named)", "policy")
        if self.keep and self.policy is not None:
            raise refused(self, "the policy decides what is kept; leave one of the two out", "keep", "policy")

    def __repr__(self) -> str:
        every = f", every={self.every}" if self.every > 1 else ""
        keep = f", keep={self.keep!r}" if self.keep else ""
        policy = "" if self.policy is None else f", policy={_name_of(self.policy)}"
        return f"ActivationCheckpointing({self.modules!r}{every}{keep}{policy})"


@runtime_checkable
class OffloadPolicy(Protocol):
    """Where activations are kept between the forward and the backward pass.

    A handle is released when the graph is: what it refers to may be deleted then, by its `__del__` or by
    `weakref.finalize`.
    """

    def pack(self, tensor: Tensor) -> Any:
        """Keep a copy of the tensor's values; returns a handle of it."""

    def unpack(self, handle: Any) -> Tensor:
        """The same values, shape and dtype, on any device; may be called more than once for a handle."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ActivationOffload:
    """Which activations are kept elsewhere between the forward and the backward pass, and where.

    Weights, and views of them, stay where they are. Gradients are those of a run without it, bit for bit.

    Args:
        min_bytes: the size of the smallest tensor that is moved; below, the copy costs more than it saves.
        policy: where they are kept; by default in the host's memory.

    Raises:
        ConfigurationError: `min_bytes` is not a whole number, or the policy lacks a method.

    >>> ActivationOffload(min_bytes=4096)
    ActivationOffload(min_bytes=4096)
    """

    min_bytes: int = 1 << 20
    policy: object | None = None  # an OffloadPolicy; jsonargparse compares the signatures of a protocol's methods

    def __post_init__(self) -> None:
        check_whole_number("ActivationOffload", "min_bytes", self.min_bytes, 0)
        if self.policy is not None and (isinstance(self.policy, type) or not isinstance(self.policy, OffloadPolicy)):
            raise refused(self, "needs an object with pack(tensor) and unpack(handle)", "policy")

    def __repr__(self) -> str:
        policy = "" if self.policy is None else f", policy={_name_of(self.policy)}"
        return f"ActivationOffload(min_bytes={self.min_bytes}{policy})"


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload:
    """Where an optimizer's state is kept between its updates.

    An update brings in the state of some parameters at a time, updates these, and moves their state out. Weights are
    those of a run without it, bit for bit.

    Args:
        to: "disk": in a file that is mapped into memory and vanishes with the process; "host": in the host's memory.
        folder: for the file; by default the run folder, else the system's folder for temporary files.
        part_bytes: how much state is brought in at a time, at least that of 1,024 elements; by default a thirty-second
            of the state, at most 64 MiB.

    Raises:
        ConfigurationError: `to` is neither, `part_bytes` is not a whole number of at least 1, or a folder is given for
            the host's memory.

    >>> OptimizerOffload(to="disk", folder="/scratch")
    OptimizerOffload(to='disk', folder='/scratch', part_bytes=None)
    """

    to: Literal["host", "disk"] = "disk"
    folder: str | None = None
    part_bytes: int | None = None

    def __post_init__(self) -> None:
        check_choice("OptimizerOffload", "to", self.to, ("host", "disk"))
        if self.folder is not None and not isinstance(self.folder, str):
            raise refused(self, "needs a path, or None", "folder")
        if self.to == "host" and self.folder is not None:
            raise refused(self, "has no use with {to}; leave it out, or choose 'disk'", "folder", "to")
        check_whole_number("OptimizerOffload", "part_bytes", self.part_bytes, or_none=True)


def _name_of(value: object) -> str:
    """A name that is the same in all processes, which compare their settings."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
