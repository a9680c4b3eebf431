"""Loggers: each writes what is measured in a run to one kind of destination. A run may have any number of them."""

from pulsetrain.handlers.loggers.base import MetricLogger
from pulsetrain.handlers.loggers.console import ConsoleLogger
from pulsetrain.handlers.loggers.csv_table import CSVLogger
from pulsetrain.handlers.loggers.json_lines import JSONLinesLogger
from pulsetrain.handlers.loggers.mlflow import MLflowLogger
from pulsetrain.handlers.loggers.service import ServiceLogger
from pulsetrain.handlers.loggers.tensorboard import TensorBoardLogger
from pulsetrain.handlers.loggers.text_file import TextFileLogger
from pulsetrain.handlers.loggers.trackio import TrackioLogger
from pulsetrain.handlers.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "ConsoleLogger",
    "JSONLinesLogger",
    "MLflowLogger",
    "MetricLogger",
    "ServiceLogger",
    "TensorBoardLogger",
    "TextFileLogger",
    "TrackioLogger",
    "WandbLogger",
]
