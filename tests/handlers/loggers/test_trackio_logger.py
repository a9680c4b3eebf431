"""The runs of TrackioLogger, read by Trackio on this machine, without any network."""

import sys
import warnings

import numpy as np
import pytest
from PIL import Image
from structlog.testing import capture_logs

from pulsetrain.engine import Events
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.handlers import TrackioLogger
from tests.support.engines import log_each_iteration, make_engine, validate_each_epoch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage
pytestmark = pytest.mark.filterwarnings("ignore")  # trackio and its dependencies emit warnings


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    """Trackio reads TRACKIO_DIR when it is imported."""
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "trackio"]:
        for name, value in (("TRACKIO_DIR", tmp_path), ("MEDIA_DIR", tmp_path / "media")):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    return tmp_path


def rows(project):
    (run,) = SQLiteStorage.get_run_records(project)
    return SQLiteStorage.get_logs(project, run["name"], run_id=run["id"])


def test_a_run_on_this_machine_has_its_metrics_hyperparameters_and_media(workdir):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i, "odd": float("nan")})
    validate_each_epoch(engine, [{"val/loss": 0.25}])
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)

    @engine.on(Events.COMPLETED)
    def show():
        media = {"text": "to be", "image": image, "grey": image[..., 0], "histogram": ([1, 2], [0, 1, 2])}
        for name, value in media.items():
            kind = "image" if name == "grey" else name
            engine.fire(Events.MEDIA_LOGGED, MediaLogged(name=f"a/{name}", kind=kind, value=value))

    logger = TrackioLogger("digits", "first", hyperparameters={"_width": 3, "options": {"momentum": 0.9}})
    logger.flush_seconds = 60
    logger.attach(engine)
    with capture_logs() as logs:
        engine.run([0] * 2, max_epochs=1)
    assert logs == []
    (run,) = SQLiteStorage.get_run_records("digits")
    assert run["name"].startswith("first-")
    config = SQLiteStorage.get_run_config("digits", run["name"])
    assert (config["width"], config["options.momentum"]) == (3, 0.9)
    found = rows("digits")
    assert [(row["step"], row["train/loss"]) for row in found if "train/loss" in row] == [(1, 1.0), (2, 0.5)]
    assert [(row["step"], row["epoch"], row["val/loss"]) for row in found if "val/loss" in row] == [(2, 1, 0.25)]
    media = {name: row[name] for row in found for name in row if name.startswith("a/")}
    assert media["a/text"]["_value"] == "to be"
    assert media["a/histogram"]["values"] == [1, 2]
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in workdir.rglob("*.png")]
    assert len(pictures) == 2
    assert sum((picture == image).all() for picture in pictures) == 1


def test_a_resumed_run_continues_in_the_same_run():
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    first = TrackioLogger("digits", flush_seconds=60).attach(engine)
    engine.run([0] * 2, max_epochs=1)
    again = TrackioLogger("digits", flush_seconds=60)
    again.load_state_dict(first.state_dict())
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    again.attach(engine)
    engine.load_state_dict({"epoch_length": 4, "max_epochs": 1, "iteration": 2})
    engine.run([0] * 4)
    assert [(row["step"], row["a"]) for row in rows("digits")] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


@pytest.mark.parametrize("argument", ["project", "run_name"])
def test_wrong_arguments_are_refused_when_constructing(argument):
    with pytest.raises(ConfigurationError, match=rf"TrackioLogger\({argument}=''\): needs a name"):
        TrackioLogger(**{"project": "digits", argument: ""})


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigurationError, match=r"TrackioLogger: cannot .* pip install 'pulsetrain\[trackio\]'"):
        TrackioLogger("digits")
