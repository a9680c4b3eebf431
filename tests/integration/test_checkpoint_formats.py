"""A run's backend chooses the checkpoint format: other tools read the arrays, and a run resumes from either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pulsetrain import Trainer
from pulsetrain.configuration import dry_run
from pulsetrain.debugger.handlers import recorded_handlers
from pulsetrain.engine import CheckpointError, Events
from pulsetrain.engine.checkpoint import CheckpointManager, Form, check_checkpoint, load_checkpoint
from pulsetrain.handlers import Checkpointer
from tests.faults.everything import leaves
from tests.support.runs import cut_after
from tests.support.runs_backends import (
    BACKENDS,
    FUNCTIONAL,
    JAX,
    TORCH,
    On,
    comparable,
    make,
    needs_jax,
    programs_kept,
    saved,
    whole_state,
)

CUT = 5  # inside an update
ALL = {"torch": "state.pt", "safetensors": "state.safetensors"}
ON_VALUES = [pytest.param(FUNCTIONAL, id="torch-functional"), pytest.param(JAX, id="jax", marks=needs_jax)]


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    with programs_kept():
        yield


def saver_of(trainer: Trainer) -> Checkpointer:
    (saver,) = (handler for handler in trainer.handlers if isinstance(handler, Checkpointer))
    return saver


def files(folder: Path) -> list[str]:
    """Those of every checkpoint of a run."""
    return sorted({file.name for file in folder.glob("checkpoints/0*/*")})


def begun(on: On, folder: Path, form: Form | None = None) -> None:
    """A run that is interrupted after its first checkpoint, which has this format."""
    trainer = make(on, folder)
    saver_of(trainer).form = form
    cut_after(trainer, CUT + 1)


# ------------------------------------------------------------------------------------------- which form it is


@pytest.mark.parametrize("on", BACKENDS)
@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_by_value_backends_write_safetensors(on: On, background: bool, tmp_path: Path):
    trainer = make(on, tmp_path, background=background)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=CUT), lambda: trainer.terminate())
    trainer.train()
    assert files(tmp_path) == ["manifest.json", "state.pt" if on is TORCH else "state.safetensors"]


@pytest.mark.parametrize("on", [TORCH, FUNCTIONAL], ids=["torch", "torch-functional"])
@pytest.mark.parametrize("form", ALL)
def test_the_form_that_is_asked_for_is_the_one_that_is_written(on: On, form: Form, tmp_path: Path):
    begun(on, tmp_path, form)
    assert files(tmp_path) == ["manifest.json", ALL[form]]


@pytest.mark.parametrize("on", [TORCH, FUNCTIONAL], ids=["torch", "torch-functional"])
def test_what_is_saved_by_hand_and_by_a_dry_run_has_the_same_form(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Form] = []

    class Spy(CheckpointManager):
        def save(self, *args: Any, **kwargs: Any) -> Any:
            asked.append(kwargs["form"])
            return super().save(*args, **kwargs)

    monkeypatch.setattr("pulsetrain.configuration.dry_run.CheckpointManager", Spy)
    trainer = make(on, tmp_path / "run")
    list(dry_run._save(trainer, tmp_path / "dry", lambda: 0.0))
    expected = "torch" if on is TORCH else "safetensors"
    assert asked == [expected]
    assert (trainer.save_checkpoint("mine") / ALL[expected]).exists()


def test_both_forms_hold_the_same(tmp_path: Path):
    trainer = make(FUNCTIONAL, tmp_path / "run")
    trainer.train()
    manager, state = CheckpointManager(tmp_path / "forms"), trainer.checkpoint_state()
    loaded = [load_checkpoint(manager.save(state, form=form)) for form in ALL]
    assert repr(loaded[0]) == repr(loaded[1])
    assert comparable(loaded[0]) == comparable(loaded[1]) == comparable(state)


# ----------------------------------------------------------------------------------------------- other programs


@needs_jax
def test_other_tools_read_every_array_of_a_run_on_jax(tmp_path: Path):
    flax_form = pytest.importorskip("safetensors.flax", reason="safetensors is not installed")
    numpy_form = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    begun(JAX, tmp_path)
    checkpoint = saved(tmp_path, CUT)
    expected = {path: value for path, value in leaves(load_checkpoint(checkpoint)) if isinstance(value, Tensor)}
    assert {"model/first/kernel", "optimizer/state/inner_state/0/mu/first/kernel", "rng/torch"} <= expected.keys()
    file = checkpoint / ALL["safetensors"]
    for found in (numpy_form.load_file(file), flax_form.load_file(file)):
        assert expected.keys() <= found.keys()
        for path, value in expected.items():
            assert found[path].shape == value.shape
            if value.dtype is not torch.int64 or isinstance(found[path], np.ndarray):  # JAX has 32 bits by default
                np.testing.assert_array_equal(np.asarray(found[path]), value.numpy())


@pytest.mark.slow
@needs_jax
def test_the_weights_of_a_checkpoint_are_a_modules_variables_by_their_paths(tmp_path: Path):
    flax_form = pytest.importorskip("safetensors.flax", reason="safetensors is not installed")
    from flax import nnx

    trained, other = JAX.model(), JAX.model()
    make(On("jax", JAX.backend, lambda: trained), tmp_path).train()
    found = flax_form.load_file(max(tmp_path.glob("checkpoints/0*")) / ALL["safetensors"])
    for path, variable in nnx.to_flat_state(nnx.state(other, (nnx.Param, nnx.BatchStat))):
        variable[...] = found["model/" + "/".join(map(str, path))]
    inputs = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    for module in (trained, other):
        module.eval()
    np.testing.assert_array_equal(other(inputs), trained(inputs))
    assert not np.array_equal(JAX.model().first.kernel[...], other.first.kernel[...])


# ------------------------------------------------------------------------------------------------- resuming from it


@pytest.mark.slow
@pytest.mark.parametrize("on", ON_VALUES)
@pytest.mark.parametrize("form", ALL)
def test_a_run_resumes_from_either_format_bit_for_bit(on: On, form: Form, tmp_path: Path):
    """Also from a checkpoint of an earlier version, which knew only torch's format."""
    whole = make(on, tmp_path / "whole")
    whole.train()
    begun(on, tmp_path / "cut", form)
    again = make(on, tmp_path / "cut")
    again.train(resume="latest")
    assert whole_state(again) == whole_state(whole)
    assert (saved(tmp_path / "cut", CUT) / ALL[form]).exists()
    assert (saved(tmp_path / "cut", 2 * CUT) / ALL["safetensors"]).exists()


def test_if_the_newest_is_damaged_an_older_one_of_the_other_format_is_used(tmp_path: Path):
    begun(FUNCTIONAL, tmp_path, "torch")
    manager = CheckpointManager(tmp_path / "checkpoints", keep_last_n=9)
    older = manager.get_latest()
    newer = manager.save(load_checkpoint(older), step=CUT + 1, form="safetensors")
    assert manager.get_latest() == newer
    content = (newer / ALL["safetensors"]).read_bytes()
    (newer / ALL["safetensors"]).write_bytes(content[:-1])
    assert manager.get_latest() == older


@pytest.mark.parametrize("on", ON_VALUES)
def test_the_debugger_finds_the_handlers_in_either_form(on: On, tmp_path: Path):
    for form in ALL:
        begun(on, tmp_path / form, form)
        found = recorded_handlers(tmp_path / form, CUT + 1)
        assert (found.problem, found.iteration) == (None, CUT)
        assert "EarlyStopping(val/loss)" in found.states
        assert "reads them from" in str(recorded_handlers(tmp_path / form, CUT + 1, max_bytes=1000).problem)


def test_an_older_version_reports_that_it_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun(FUNCTIONAL, tmp_path)
    checkpoint = saved(tmp_path, CUT)
    assert json.loads((checkpoint / "manifest.json").read_text())["format"] == 3
    for module in ("manifest", "reader"):
        monkeypatch.setattr(f"pulsetrain.engine.checkpoint.{module}.FORMATS", (1, 2))
    with pytest.raises(CheckpointError, match="format 3, and this version reads up to 2; update pulsetrain"):
        check_checkpoint(checkpoint)
