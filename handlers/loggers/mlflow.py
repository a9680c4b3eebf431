"""Writes metrics, hyperparameters and media to MLflow."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pulsetrain.engine import Every, OnError
from pulsetrain.engine.optional import load_optional
from pulsetrain.handlers.loggers.base import Plain
from pulsetrain.handlers.loggers.service import Begin, Deliver, End, Entry, Media, Metrics, ServiceLogger, check_text
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder

__all__ = ["MLflowLogger"]

# MLflow's limits of one request
_METRICS, _PARAMETERS = 1000, 100
_KEY = "pulsetrain.run"  # the tag by which a resumed run is found
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflowLogger(ServiceLogger):
    """Logs to a run of MLflow: metrics by iteration, hyperparameters as parameters, texts and pictures as artifacts.

    Figures, histograms and matrices become images. A run that resumes from a checkpoint continues the same run of
    MLflow, which keeps the values logged after the checkpoint in addition to those that are logged again. If a service
    is down or slow, see `ServiceLogger`. By default, MLflow retries a request for minutes, and draws from Python's
    generator for that: unless they are set, the constructor sets MLFLOW_HTTP_REQUEST_MAX_RETRIES=0 and
    MLFLOW_HTTP_REQUEST_TIMEOUT=10 (seconds) for this process.

    Args:
        tracking_uri: such as "http://host:5000" or "sqlite:///mlflow.db"; by default MLFLOW_TRACKING_URI, otherwise
            FOLDER/mlflow.db with FOLDER/mlflow, and without a folder MLflow's own default.
        experiment: its name; created if missing. By default MLFLOW_EXPERIMENT_NAME, otherwise "pulsetrain".
        run_name: by default the run folder's name, otherwise "run-" and the start of the key.
        folder: the run folder.
        every, hyperparameters, room, flush_seconds, clock, on_error: see `ServiceLogger`.

    Raises:
        ConfigurationError: mlflow is not installed, or a number is out of range.

    >>> logger = MLflowLogger("sqlite:///mlflow.db", "first", every=Every(iterations=50))
    >>> logger.experiment, logger.run_id  # it connects when a run starts
    ('first', None)
    """

    folder: Path | None

    takes_histograms = False

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        folder: str | Path | None = None,
        every: Every | None = None,
        *,
        hyperparameters: Mapping[str, object] | None = None,
        room: int = 64 * 2**20,
        flush_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        on_error: OnError = "warn",
    ) -> None:
        super().__init__(every, hyperparameters, room, flush_seconds, clock, on_error)
        for name, value in (("tracking_uri", tracking_uri), ("experiment", experiment), ("run_name", run_name)):
            if value is not None:
                check_text("MLflowLogger", name, value, "a text, or None")
        self._address = tracking_uri  # not under the argument's name, which a checkpoint saves: it may have a password
        self.experiment = experiment
        self.run_name = run_name
        self.folder = None if folder is None else local_folder("MLflowLogger", folder)
        self.run_id: str | None = None  # MLflow's, once known
        self._mlflow = load_optional("MLflowLogger", "mlflow", "mlflow")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

    def prepare(self) -> None:
        if self.folder is not None:
            make_folder("MLflowLogger", self.folder)

    def is_refusal(self, error: Exception) -> bool:
        if isinstance(error, self._mlflow.MlflowException):
            return 400 <= error.get_http_status_code() < 500 and error.get_http_status_code() not in (408, 429)
        return super().is_refusal(error)

    def connect(self, key: str, values: Mapping[str, Plain]) -> Deliver:
        client, experiment_id = self._connect_client()
        found = client.search_runs([experiment_id], f"tags.`{_KEY}` = '{key}'", max_results=1)
        if found:
            run = found[0]
        else:
            # MLflow would draw a name from Python's generator
            name = self.run_name or (self.folder.resolve().name if self.folder is not None else f"run-{key[:8]}")
            run = client.create_run(experiment_id, run_name=name, tags={_KEY: key})
        self.run_id = run.info.run_id
        named = {_name(name): str(value) for name, value in values.items()}
        new = {name: value for name, value in named.items() if name not in run.data.params}  # MLflow cannot change one
        parameters = [self._mlflow.entities.Param(name, value) for name, value in new.items()]
        unsent = [parameters[start : start + _PARAMETERS] for start in range(0, len(parameters), _PARAMETERS)]
        return functools.partial(self._deliver, client, run.info.run_id, unsent)

    def _connect_client(self) -> tuple[Any, str]:
        """A client and the experiment's id."""
        uri, files = self._address, None
        if uri is None and self.folder is not None and not os.environ.get("MLFLOW_TRACKING_URI"):
            uri = f"sqlite:///{(self.folder / 'mlflow.db').resolve()}"
            files = (self.folder / "mlflow").resolve().as_uri()  # otherwise they go to the working directory
        client = self._mlflow.MlflowClient(tracking_uri=uri)
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "pulsetrain"
        found = client.get_experiment_by_name(name)
        if found is not None:
            return client, str(found.experiment_id)
        return client, str(client.create_experiment(name, artifact_location=files))

    def _deliver(self, client: Any, run: str, unsent: list[list[Any]], entries: Sequence[Entry]) -> int:
        self._log_parameters(client, run, unsent)
        first = entries[0]
        if isinstance(first, Begin):
            client.update_run(run, status="RUNNING")
        elif isinstance(first, End):
            client.set_terminated(run, _STATUS[first.status], end_time=first.time_ns // 1_000_000)
        elif isinstance(first, Media):
            self._log_media(client, run, first)
        else:
            return self._log_metrics(client, run, entries)
        return 1

    def _log_parameters(self, client: Any, run: str, unsent: list[list[Any]]) -> None:
        """Send those not sent yet. After a rejection each is sent separately, so that only the rejected one is lost."""
        while unsent:
            try:
                client.log_batch(run, params=unsent[0])
            except Exception as error:
                if not self.is_refusal(error):
                    raise
                if len(unsent[0]) == 1:
                    del unsent[0]
                    self.report_refusal(error)
                    continue
                unsent[:] = [[parameter] for batch in unsent for parameter in batch]
            else:
                del unsent[0]

    def _log_metrics(self, client: Any, run: str, entries: Sequence[Entry]) -> int:
        """Send as many of the first entries as fit into one request; a larger entry takes several requests."""
        found: list[object] = []
        count = 0
        for entry in entries:
            if not isinstance(entry, Metrics):
                break
            new = [
                self._mlflow.entities.Metric(_name(name), value, entry.time_ns // 1_000_000, entry.iteration)
                for name, value in {**entry.values, "epoch": float(entry.epoch)}.items()
            ]
            if found and len(found) + len(new) > _METRICS:
                break
            found += new
            count += 1
        for start in range(0, len(found), _METRICS):
            client.log_batch(run, metrics=found[start : start + _METRICS])
        return count

    def _log_media(self, client: Any, run: str, media: Media) -> None:
        name, step = _name(media.name), media.iteration
        if media.kind == "text":
            client.log_text(run, media.value, f"{name}/{step:09d}.txt")
        else:
            milliseconds = media.time_ns // 1_000_000
            client.log_image(run, media.value, key=name, step=step, timestamp=milliseconds, synchronous=True)


def _name(name: str) -> str:
    """The name with underscores for characters that MLflow does not allow."""
    return re.sub(r"[^\w\-. :/]", "_", name)
