"""Metrics that accumulate on the device and wait for it only when they are read; their names and histories."""

from pulsetrain.engine.metrics.accuracy import Accuracy, TokenAccuracy, TopKAccuracy
from pulsetrain.engine.metrics.direction import Mode, infer_mode, names_of, required_mode
from pulsetrain.engine.metrics.means import RunningMean, bits_per_byte, perplexity
from pulsetrain.engine.metrics.reading import canonical, to_host
from pulsetrain.engine.metrics.tracker import MetricTracker

__all__ = [
    "Accuracy",
    "MetricTracker",
    "Mode",
    "RunningMean",
    "TokenAccuracy",
    "TopKAccuracy",
    "bits_per_byte",
    "canonical",
    "infer_mode",
    "names_of",
    "perplexity",
    "required_mode",
    "to_host",
]
