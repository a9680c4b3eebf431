"""What events carry: one frozen dataclass for each event that carries data.

Tensors in payloads stay on their device, detached: a logger pays for the copy to the host.

>>> MetricsLogged(metrics={"train/loss": 0.5})
MetricsLogged(metrics={'train/loss': 0.5})
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
    "RanksDiverged",
    "RewardsComputed",
    "RolloutCompleted",
    "Terminated",
    "ValidationCompleted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminated:
    """TERMINATE: the run was ended before its limit."""

    reason: str  # as given to `terminate(reason=...)`
    observed: bool = False  # as given to it: whether the moment depends on the clock, another thread or the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTerminated:
    """TERMINATE_SINGLE_EPOCH: the epoch was ended early, and the run continues."""

    iter_counter: int  # batches of this epoch that were fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionRaised:
    """EXCEPTION_RAISED: the step, the loader or a handler raised."""

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsReady:
    """GRADIENTS_READY: between backward and the optimizer's step."""

    grad_norm: Tensor  # total L2 norm before clipping, shape (), on the device
    optimizer: str = ""  # whose gradients, if the run has several optimizers


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepCompleted:
    """OPTIMIZER_STEP_COMPLETED: the weights have changed, unless fp16 overflowed, which the host learns later."""

    learning_rates: tuple[float, ...]  # of this step, one per parameter group
    optimizer: str = ""  # which one, if the run has several


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationCompleted:
    """VALIDATION_COMPLETED: one round over every validation loader."""

    metrics: Mapping[str, float]  # full names, such as "val/loss"
    seconds: float  # host wall time of the whole round


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """CHECKPOINT_SAVED: the checkpoint is durable on disk."""

    path: Path | str  # a string if it is a URL
    iteration: int
    bytes: int  # on disk
    seconds: float  # host wall time of writing it
    is_best: bool
    background: bool = False  # written in another thread: when it is announced depends on the clock


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoaded:
    """CHECKPOINT_LOADED: the run continues from this checkpoint."""

    path: Path | str
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLogged:
    """METRICS_LOGGED: values on the host."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLogged:
    """MEDIA_LOGGED: a text, a picture, a distribution or a table of counts.

    The type of `value` depends on the kind:
    text: a str;
    image: an array of uint8, shape (height, width, 3) or (height, width), or a tensor of those;
    figure: a matplotlib Figure;
    histogram: a pair (counts, edges) of sequences of numbers, with one more edge than counts;
    matrix: rows of numbers, such as a confusion matrix, as lists (which a recording keeps) or an array.
    """

    name: str  # in full, such as "val/confusion_matrix"
    kind: Literal["text", "image", "figure", "histogram", "matrix"]
    value: Any  # as the kind says


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsComputed:
    """REWARDS_COMPUTED: the rewards of a rollout, before the policy is trained on it."""

    mean: float  # reward per step of an environment, or per text
    std: float  # population standard deviation
    minimum: float
    maximum: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCompleted:
    """ROLLOUT_COMPLETED: the policy has acted, and the batches that train on it follow."""

    metrics: Mapping[str, float]  # full names, such as "rollout/return"
    seconds: float  # host wall time of the whole rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyUpdated:
    """POLICY_UPDATED: the policy was trained on the last batch of a rollout."""

    metrics: Mapping[str, float]  # full names, such as "policy/kl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyDetected:
    """ANOMALY_DETECTED: an abnormal value, and the rows of the data set that it came from."""

    kind: str  # "nan", "loss_spike" ...
    value: float
    batch_indices: tuple[int, ...]  # indices into the data set; empty if not known
    at_iteration: int | None = None  # of the value, if it was detected later


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """PREEMPTED: the process was asked to stop."""

    signal: str  # "SIGTERM", "SIGUSR1", "SIGINT"
    rank: int | None = None  # of the process that got it, if several train together and it was not this one


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksDiverged:
    """RANKS_DIVERGED: of processes that train together, a value that has to be the same in all of them is not."""

    field: str  # "learning_rates", "0.weight" ...
    ranks: tuple[int, ...]  # those that differ from most of the ranks; from rank 0 if there is no majority
    values: tuple[str, ...]  # of each rank, in their order; of a tensor, digests
    at_iteration: int  # when it was digested


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFailed:
    """HANDLER_FAILED: a handler with on_error="warn" raised, or saving in the background did; the run continues."""

    handler: str
    event: str
    error: BaseException


def payload_fields(payload: Any) -> dict[str, Any]:  # a dataclass, with fields of any type
    """The payload's fields by name, without copies (`dataclasses.asdict` would copy every tensor).

    >>> payload_fields(MetricsLogged(metrics={"train/loss": 0.5}))
    {'metrics': {'train/loss': 0.5}}
    """
    return {name: getattr(payload, name) for name in payload.__dataclass_fields__}
