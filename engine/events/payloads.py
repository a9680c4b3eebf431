"""What events carry: one frozen dataclass for each event that carries data.

Tensors in payloads stay detached on their device: whoever logs pays for the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AnomalyDetected",
    "CheckpointLoaded",
    "CheckpointSaved",
    "EpochTerminated",
    "ExceptionRaised",
    "GradientsReady",
    "HandlerFailed",
    "MediaLogged",
    "MetricsLogged",
    "OptimizerStepCompleted",
    "PolicyUpdated",
    "Preempted",
    "RewardsComputed",
    "RolloutCompleted",
    "Terminated",
    "ValidationCompleted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """TERMINATE: the run was ended before its bound."""

    reason: str  # what `terminate(reason=...)` was given


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTerminated:
    """TERMINATE_SINGLE_EPOCH: the epoch was ended early, the run goes on."""

    iter_counter: int  # batches of this epoch that were fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionRaised:
    """EXCEPTION_RAISED: the step, the loader or a handler raised."""

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsReady:
    """GRADIENTS_READY: between backward and the optimizer's step."""

    grad_norm: Tensor  # total L2 norm before clipping, shape (), on the device
    optimizer: str = ""  # whose gradients, where a run has several optimizers


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepCompleted:
    """OPTIMIZER_STEP_COMPLETED: the weights have changed, unless fp16 overflowed, which the host learns later."""

    learning_rates: tuple[float, ...]  # one a parameter group, those of the step just made
    optimizer: str = ""  # which has made it, where a run has several


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationCompleted:
    """VALIDATION_COMPLETED: one round over every validation loader."""

    metrics: Mapping[str, float]  # full names, such as "val/loss"
    seconds: float  # host wall time of the whole round


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """CHECKPOINT_SAVED: the checkpoint is durable on disk."""

    path: Path | str  # a string where it is a URL
    iteration: int
    bytes: int  # on disk
    seconds: float  # host wall time of writing it
    is_best: bool
    background: bool = False  # written in another thread: behind which iteration it is announced depends on the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoaded:
    """CHECKPOINT_LOADED: the run goes on from this checkpoint."""

    path: Path | str
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLogged:
    """METRICS_LOGGED: values brought to the host."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLogged:
    """MEDIA_LOGGED: what is no number: a text, a picture, a distribution, a table of counts.

    `value` is, for each kind:
    text: a str;
    image: an array of uint8, shape (height, width, 3) or (height, width), or a tensor of those;
    figure: a matplotlib Figure;
    histogram: a pair (counts, edges) of sequences of numbers, one edge more than counts;
    matrix: rows of numbers, such as a confusion matrix: lists, which a recording keeps, or an array.
    """

    name: str  # in full, such as "val/confusion_matrix"
    kind: Literal["text", "image", "figure", "histogram", "matrix"]
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsComputed:
    """REWARDS_COMPUTED: what a rollout was worth, before anything is learnt from it."""

    mean: float  # reward a step of an environment; reward a text
    std: float  # over all of them, not Bessel's
    minimum: float
    maximum: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCompleted:
    """ROLLOUT_COMPLETED: the policy has acted, and batches follow that learn from it."""

    metrics: Mapping[str, float]  # full names, such as "rollout/return"
    seconds: float  # host wall time of the whole rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdated:
    """POLICY_UPDATED: the last batch of a rollout has been learnt from."""

    metrics: Mapping[str, float]  # full names, such as "policy/kl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyDetected:
    """ANOMALY_DETECTED: a value that should not be, and the rows it came from."""

    kind: str  # "nan", "loss_spike" ...
    value: float
    batch_indices: tuple[int, ...]  # indices into the dataset; empty where they are not known
    at_iteration: int | None = None  # whose value it was, where it is found out later


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """PREEMPTED: the process was asked to stop."""

    signal: str  # "SIGTERM", "SIGUSR1", "SIGINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFailed:
    """HANDLER_FAILED: a handler with on_error="warn" raised, or a save in the background did; the run goes on."""

    handler: str
    event: str
    error: BaseException


def payload_fields(payload: Any) -> dict[str, Any]:
    """The payload's fields by name, values untouched (`dataclasses.asdict` would copy every tensor)."""
    return {name: getattr(payload, name) for name in payload.__dataclass_fields__}
