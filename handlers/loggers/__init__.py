"""Loggers: each writes what is measured in a run to one kind of place, and any number of them serve one run."""

from handlers.loggers.base import MetricLogger
from handlers.loggers.console import ConsoleLogger
from handlers.loggers.csv_table import CSVLogger
from handlers.loggers.json_lines import JSONLinesLogger
from handlers.loggers.mlflow import MLflowLogger
from handlers.loggers.tensorboard import TensorBoardLogger
from handlers.loggers.trackio import TrackioLogger
from handlers.loggers.wandb import WandbLogger

__all__ = [
    "CSVLogger",
    "ConsoleLogger",
    "JSONLinesLogger",
    "MLflowLogger",
    "MetricLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
]
