"""The content of a run's file of Weights & Biases, written without any network."""

import json
import struct
import sys
import time
import warnings

import numpy as np
import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import Events
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.payloads import MediaLogged
from pulsetrain.handlers import WandbLogger
from tests.support.engines import log_each_iteration, make_engine, validate_each_epoch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # wandb and what it imports warn of their own affairs
]

BLOCK = 32768  # bytes; a record is cut into parts that stay within one (LevelDB's log format)
HEADER = struct.Struct("<IHB")  # checksum, length, part


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Nothing leaves this machine, and no key of the user is read."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def records(file):
    content, at, parts = file.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while at + HEADER.size <= len(content):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, part = HEADER.unpack_from(content, at)
        if at + HEADER.size + length > len(content):
            return  # it is being written
        parts += content[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if part in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def written(folder):
    """The run's settings, its rows, and its exit code; wandb's process closes the file shortly after the run."""
    end = time.monotonic() + 60
    while (found := read(folder))[2] is None and time.monotonic() < end:
        time.sleep(0.02)
    return found


def read(folder):
    config, rows, code = {}, [], None
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    for record in (record for file in files for record in records(file)):
        if record.HasField("run"):
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            rows.append({name: value for name, value in row.items() if not name.startswith("_")})
        if record.HasField("exit"):
            code = record.exit.exit_code
    return config, rows, code


def test_a_run_without_network_is_a_file_with_everything_in_it(tmp_path):
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"train/loss": 1.0 / i})
    validate_each_epoch(engine, [{"val/loss": 0.25}])

    @engine.on(Events.COMPLETED)
    def show():
        image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
        media = {"text": "a < b", "image": image, "histogram": ([1, 2], [0, 1, 2]), "matrix": np.eye(2)}
        for kind, value in media.items():
            engine.fire(Events.MEDIA_LOGGED, MediaLogged(name=f"a/{kind}", kind=kind, value=value))

    settings = {"options": {"momentum": 0.9}, "width": 3}
    WandbLogger("digits", tmp_path, hyperparameters=settings, flush_seconds=60).attach(engine)
    with capture_logs() as logs:
        engine.run([0] * 2, max_epochs=1)
    assert [entry["event"] for entry in logs] == ["logging to Weights & Biases"]
    config, rows, code = written(tmp_path)
    assert (config["options.momentum"], config["width"], code) == (0.9, 3, 0)
    assert [(row["iteration"], row["train/loss"]) for row in rows if "train/loss" in row] == [(1, 1.0), (2, 0.5)]
    assert [(row["iteration"], row["epoch"], row["val/loss"]) for row in rows if "val/loss" in row] == [(2, 1, 0.25)]
    media = {name: row[name] for row in rows for name in row if name.startswith("a/")}
    assert [media[f"a/histogram/{name}"] for name in ("_type", "values", "bins")] == ["histogram", [1, 2], [0, 1, 2]]
    assert (media["a/image/width"], media["a/image/height"]) == (4, 2)
    assert media["a/matrix/_type"] == "image-file"
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/a/*.html")
    assert "a &lt; b" in page.read_text()
    assert len([*tmp_path.glob("wandb/offline-run-*/files/media/images/a/*.png")]) == 2


def test_a_resumed_run_continues_under_the_same_id_and_says_that_it_failed(tmp_path):
    def fail(iteration):
        raise ArithmeticError("too large")

    engine = make_engine(fail)
    first = WandbLogger("digits", tmp_path, "offline", flush_seconds=60).attach(engine)
    with pytest.raises(ArithmeticError):
        engine.run([0], max_epochs=1)
    assert written(tmp_path)[2] == 1
    engine = make_engine()
    log_each_iteration(engine, lambda i: {"a": float(i)})
    again = WandbLogger("digits", tmp_path, "offline", flush_seconds=60)
    again.load_state_dict(first.state_dict())
    again.attach(engine)
    engine.run([0], max_epochs=1)
    names = {path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert names == {f"run-{first.state_dict()['key']}.wandb"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"project": ""}, r"WandbLogger\(project=''\): needs the project's name"),
        ({"mode": "of"}, r"WandbLogger\(mode='of'\): unknown; choose one of offline, online"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(tmp_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        WandbLogger(**{"project": "digits", "folder": tmp_path, **arguments})


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"WandbLogger: cannot import .* pip install 'pulsetrain\[wandb\]'"):
        WandbLogger("digits", tmp_path)
