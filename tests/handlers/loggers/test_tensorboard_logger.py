"""The logs of TensorBoardLogger, read by TensorBoard's own reader."""

import io
import math
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from pulsetrain.engine import Events
from pulsetrain.engine.errors import ConfigurationError, RunFolderError
from pulsetrain.engine.events.payloads import CheckpointLoaded, MediaLogged
from pulsetrain.handlers import TensorBoardLogger
from tests.support.engines import log, log_each_iteration, make_engine, validate_each_epoch

EventAccumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator


def written(folder):
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "histograms": 0})
    found.Reload()
    return found


def scalars(folder, name):
    return [(event.step, event.value) for event in written(folder).Scalars(name)]


def show(engine, name, kind, value):
    engine.fire(Events.MEDIA_LOGGED, MediaLogged(name=name, kind=kind, value=value))


def test_scalars_have_their_iteration_and_time(tmp_path):
    engine, times = make_engine(), []
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i, "odd": math.nan})
    validate_each_epoch(engine, [{"val/loss": 0.25}, {"val/loss": 0.125}])

    @engine.on(Events.METRICS_LOGGED)
    def note(engine, event):
        times.append(event.time_ns / 1e9)

    TensorBoardLogger(tmp_path).attach(engine)
    engine.run([0, 1], max_epochs=2)
    assert scalars(tmp_path, "train/loss") == [(i, pytest.approx(1.0 / i)) for i in (1, 2, 3, 4)]
    assert scalars(tmp_path, "val/loss") == [(2, 0.25), (4, 0.125)]
    assert all(math.isnan(value) for _, value in scalars(tmp_path, "odd"))
    assert [event.wall_time for event in written(tmp_path).Scalars("train/loss")] == pytest.approx(times)
    assert scalars(tmp_path, "epoch")[-1] == (4, 2.0)


def test_hyperparameters_come_with_the_run(tmp_path):
    engine = make_engine()
    TensorBoardLogger(tmp_path, hyperparameters={"width": 64, "options": {"momentum": 0.9}, "name": None}).attach(
        engine
    )
    engine.run([0], max_epochs=1)
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = written(tmp_path).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["width"].number_value == 64
    assert found["options.momentum"].number_value == 0.9
    assert found["name"].string_value == "None"


def test_media_of_each_kind_are_shown(tmp_path):
    engine = make_engine()
    figure = Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    image = np.zeros((4, 6, 3), np.uint8)
    image[..., 0] = 255

    @engine.on(Events.ITERATION_COMPLETED)
    def fire():
        show(engine, "text", "text", "to be")
        show(engine, "image", "image", torch.from_numpy(image))
        show(engine, "grey", "image", image[..., 0])
        show(engine, "figure", "figure", figure)
        show(engine, "matrix", "matrix", torch.eye(3))
        show(engine, "histogram", "histogram", ([1, 0, 3], [0.0, 1.0, 2.0, 4.0]))

    TensorBoardLogger(tmp_path).attach(engine)
    engine.run([0], max_epochs=1)
    found = written(tmp_path)
    pictures = {
        name: np.asarray(Image.open(io.BytesIO(found.Images(name)[0].encoded_image_string)).convert("RGB"))
        for name in ("image", "grey", "figure", "matrix")
    }
    assert (pictures["image"] == image).all()
    assert (pictures["grey"] == 255).all()
    assert pictures["figure"].shape == (50, 100, 3)
    assert len(np.unique(pictures["matrix"])) > 10
    (histogram,) = found.Histograms("histogram")
    value = histogram.histogram_value
    assert (value.min, value.max, value.num, value.sum) == (0.0, 4.0, 4.0, 0.5 + 3 * 3.0)
    assert list(value.bucket_limit) == [0.0, 1.0, 2.0, 4.0]
    assert list(value.bucket) == [0.0, 1.0, 0.0, 3.0]
    (text,) = found.Tensors("text/text_summary")
    assert text.tensor_proto.string_val == [b"to be"]
    assert text.step == 1


def test_a_resumed_run_hides_what_was_written_after_its_checkpoint(tmp_path):
    def logging_engine(scale):
        engine = make_engine()
        log_each_iteration(engine, lambda i: {"a": scale * i})
        TensorBoardLogger(tmp_path).attach(engine)
        return engine

    logging_engine(1.0).run([0] * 5, max_epochs=1)
    engine = logging_engine(10.0)
    engine.state.iteration, engine.state.epoch = 2, 0
    engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path="000000002-checkpoint", iteration=2))
    engine.load_state_dict({"epoch_length": 5, "max_epochs": 1, "iteration": 2})
    engine.run([0] * 5)
    assert scalars(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_engines_of_one_bus_keep_their_names(tmp_path):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"a": 1.0})
    logger = TensorBoardLogger(tmp_path).attach(engine.bus)
    engine.run([0], max_epochs=1)
    assert scalars(tmp_path, "trainer/a") == [(1, 1.0)]
    assert logger.path == tmp_path / "tensorboard"


def test_constructing_and_attaching_write_nothing(tmp_path):
    TensorBoardLogger(tmp_path / "run").attach(make_engine())
    assert list((tmp_path / "run").iterdir()) == []


def test_detaching_in_mid_run_leaves_what_was_logged_readable(tmp_path):
    engine = make_engine()
    logger = TensorBoardLogger(tmp_path).attach(engine)
    log(engine, {"a": 1.0})
    logger.detach()
    assert scalars(tmp_path, "a") == [(0, 1.0)]


def test_two_loggers_in_one_folder_are_refused(tmp_path):
    engine = make_engine()
    TensorBoardLogger(tmp_path).attach(engine)
    with pytest.raises(RunFolderError, match=r"another TensorBoardLogger of this bus writes .*tensorboard"):
        TensorBoardLogger(tmp_path).attach(engine)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (
            "image",
            np.zeros((2, 2)),
            r"Logged\(name='m', kind='image'\): has shape \(2, 2\) of float64; needs",
        ),
        ("image", np.zeros((2, 2, 4), np.uint8), r"has shape \(2, 2, 4\) of uint8"),
        ("matrix", np.zeros(3), r"kind='matrix'\): has shape \(3,\); needs \(rows, columns\)"),
        ("histogram", ([1.0], [0.0]), r"counts have shape \(1,\) and edges \(1,\); needs one edge more"),
        ("video", None, r"MediaLogged\(kind='video'\): unknown; choose one of figure, histogram, image, matrix"),
    ],
)
def test_media_that_cannot_be_shown_are_reported(tmp_path, kind, value, message):
    engine = make_engine()
    TensorBoardLogger(tmp_path, on_error="raise").attach(engine)
    with pytest.raises(ConfigurationError, match=message):
        show(engine, "m", kind, value)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        ConfigurationError, match=r"TensorBoardLogger: cannot .* pip install 'pulsetrain\[tensorboard\]'"
    ):
        TensorBoardLogger(tmp_path)


def test_a_run_that_returns_to_a_checkpoint_hides_what_it_discards(tmp_path):
    engine, rewinds = make_engine(), []
    log_each_iteration(engine, lambda i: {"a": i + 10.0 * len(rewinds)})
    TensorBoardLogger(tmp_path).attach(engine)

    @engine.on(Events.ITERATION_COMPLETED(once=4))
    def rewind():
        if not rewinds:
            rewinds.append(engine.state.iteration)
            engine.state.iteration = 2
            engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path="somewhere", iteration=2))

    engine.run([0] * 6, max_iters=4)
    assert rewinds == [4]
    assert scalars(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]
