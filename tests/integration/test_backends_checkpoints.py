"""A checkpoint of a run on JAX: every piece is needed, and later steps do not change it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pulsetrain import Trainer
from pulsetrain.engine import CheckpointError, Events, Every, Phase
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint, load_safetensors, save_safetensors
from tests.faults.everything import bits, leaves
from tests.support.runs_backends import (
    BACKENDS,
    JAX,
    On,
    comparable,
    make,
    needs_jax,
    programs_kept,
    saved,
    whole_state,
)

CUT = 5  # inside an update


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    with programs_kept():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """The uninterrupted run on JAX, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make(JAX, folder)
    trainer.train()
    return trainer, folder


# ------------------------------------------------------------------------------------------------- in the background


@pytest.mark.slow
@pytest.mark.parametrize("on", BACKENDS)
def test_later_steps_change_nothing_in_a_checkpoint_that_is_still_being_written(
    on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next step is made in the memory of the state that was saved."""
    make(on, tmp_path / "at once").train()
    may_write: defaultdict[int, threading.Event] = defaultdict(threading.Event)  # of each step
    begun_at = []

    class Late(CheckpointManager):
        def save(self, *args: Any, **kwargs: Any) -> Any:
            assert may_write[kwargs["step"]].wait(60)
            begun_at.append((kwargs["step"], trainer.state.iteration))
            return super().save(*args, **kwargs)

    monkeypatch.setattr("pulsetrain.handlers.checkpointing.checkpointer.CheckpointManager", Late)
    trainer = make(on, tmp_path / "late", background=True)

    @trainer.on(Events.ITERATION_COMPLETED, phase=Phase.COMPUTE)
    def three_later(engine: Trainer) -> None:
        may_write[engine.state.iteration - 3].set()

    @trainer.on(Events.EPOCH_COMPLETED, phase=Phase.COMPUTE)
    def at_the_end(engine: Trainer) -> None:
        may_write[engine.state.iteration].set()

    trainer.train()
    assert {5, 15, 25} <= {step for step, now in begun_at if now >= step + 3}, "else nothing came in between"
    for iteration in (5, 10, 15, 20, 25):
        early, late = (comparable(load_checkpoint(saved(tmp_path / name, iteration))) for name in ("at once", "late"))
        assert {path for path in early if late.get(path) != early[path]} <= {
            "counters/save",  # counted when it has been written
            "handlers/Checkpointer(val/loss)/settings",  # in the background, or not
            "unsaved/changed",  # what the handlers of this test note
        }


# ------------------------------------------------------------------------------------------------------- ablation

# the parts that depend on the backend; tests/faults has the others
PARTS = ("model/", "optimizer/", "stepper/accumulation/", "stepper/gradients/", "backend/")
# the schedule writes the rates; tokens count for an accumulation by tokens; a new trainer has the others
RESTATED = {"optimizer/state/hyperparams/learning_rate", "optimizer/param_groups/0/lr", "stepper/accumulation/tokens"}
ARRAYS = ("model/", "optimizer/state/", "stepper/gradients/")


class Spare:
    """One trainer that continues from any state to the next checkpoint; its programs are compiled once."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.state = dict(load_checkpoint(source))
        self.trainer = make(JAX, folder, every=Every(epochs=9))
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2 * CUT), lambda: self.trainer.terminate())
        self.at_first = dict(leaves(self.trainer.checkpoint_state()))
        self._manager, self._count = CheckpointManager(folder / "others", keep_last_n=1), 0

    def pieces(self, *parts: str) -> dict[str, Any]:
        return {path: value for path, value in leaves(self.state) if path.startswith(parts)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._count += 1
        self.trainer.load_checkpoint(self._manager.save(state, "other", step=self._count))

    def resume(self, state: Mapping[str, Any]) -> dict[str, Any]:
        self.load(state)
        self.trainer.train()
        assert self.trainer.state.iteration == 2 * CUT
        return {path: value for path, value in whole_state(self.trainer).items() if path.startswith(PARTS)}


@pytest.fixture(scope="module")
def spare(whole: tuple[Trainer, Path], tmp_path_factory: pytest.TempPathFactory) -> Spare:
    return Spare(saved(whole[1], CUT), tmp_path_factory.mktemp("spare"))


def changed(state: Any, path: str, *put: Any) -> Any:
    """The state with another value at this path; without it where none is given."""
    copies = dict(state) if isinstance(state, dict) else list(state)
    for key in list(copies if isinstance(copies, dict) else range(len(copies))):
        if str(key) == path:
            if put:
                copies[key] = put[0]
            else:
                del copies[key]
            return copies
        if path.startswith(f"{key}/") and isinstance(copies[key], (dict, list, tuple)):
            copies[key] = changed(copies[key], path.removeprefix(f"{key}/"), *put)
            return copies
    raise KeyError(path)


@pytest.mark.slow
@needs_jax
def test_a_checkpoint_has_its_arrays_as_tensors_by_their_paths(spare: Spare):
    assert {path: tuple(value.shape) for path, value in spare.state["model"].items()} == {
        "first/kernel": (4, 8), "first/bias": (8,), "norm/scale": (8,), "norm/bias": (8,), "norm/mean": (8,),
        "norm/var": (8,), "last/kernel": (8, 1), "last/bias": (1,), "dropout/rngs/key": (2,), "dropout/rngs/count": (),
    }  # fmt: skip
    arrays = spare.pieces(*ARRAYS).values()
    assert len(arrays) > 25
    assert {type(value) for value in arrays} == {Tensor}


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("part", ARRAYS)
def test_an_array_that_is_missing_is_named_and_nothing_is_loaded(spare: Spare, part: str):
    before = whole_state(spare.trainer)
    for path in spare.pieces(part):
        with pytest.raises(CheckpointError) as caught:
            spare.load(changed(spare.state, path))
        assert path.removeprefix(part) in str(caught.value)
        assert whole_state(spare.trainer) == before


@pytest.mark.slow
@needs_jax
def test_no_piece_can_be_lost_unnoticed(spare: Spare, whole: tuple[Trainer, Path]):
    """With a new trainer's value in its place, the run differs at the next checkpoint or is rejected."""
    expected = spare.resume(spare.state)
    theirs = comparable(load_checkpoint(saved(whole[1], 2 * CUT)))
    assert expected == {path: value for path, value in theirs.items() if path.startswith(PARTS)}
    unnoticed, tried = set(), 0
    for path, value in spare.pieces(*PARTS).items():
        fresh = [spare.at_first[path]] if path in spare.at_first else []
        if fresh and bits(fresh[0]) == bits(value):
            continue
        tried += 1
        try:
            if spare.resume(changed(spare.state, path, *fresh)) == expected:
                unnoticed.add(path)
        except Exception:  # refused, or came to nothing
            continue
    assert unnoticed <= RESTATED
    assert tried > 25


# --------------------------------------------------------------------------------------------------- safetensors


@pytest.mark.slow
@needs_jax
def test_weights_are_exchanged_by_safetensors(whole: tuple[Trainer, Path], tmp_path: Path):
    flax_form = pytest.importorskip("safetensors.flax", reason="safetensors is not installed")
    numpy_form = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    file = save_safetensors(whole[0].model, tmp_path / "weights.safetensors")
    weights = whole[0].model_state.weights
    arrays = whole[0].backend.paths({**weights["parameters"]}) | whole[0].backend.paths(weights["buffers"])
    expected = {path: value.numpy() for path, value in whole[0].model.state_dict().items()}
    assert expected.keys() == arrays.keys()
    for found in (numpy_form.load_file(file), flax_form.load_file(file)):
        assert found.keys() == expected.keys()
        for path, array in expected.items():
            assert found[path].dtype == array.dtype
            np.testing.assert_array_equal(found[path], array)
    np.testing.assert_array_equal(expected["first/kernel"], arrays["first/kernel"])


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("trained", [0, 2])
def test_the_next_step_is_made_of_weights_that_were_loaded(whole: tuple[Trainer, Path], tmp_path: Path, trained: int):
    """Also in a trainer that has made some steps."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    file = save_safetensors(whole[0].model, tmp_path / "weights.safetensors")
    losses: dict[str, list[float]] = {}
    for name in ("loaded", "written", "neither"):
        trainer = make(JAX, tmp_path / name, accumulate=1)
        found = losses.setdefault(name, [])

        @trainer.on(Events.ITERATION_STARTED(once=trained + 1))
        def load(engine: Trainer, name: str = name) -> None:
            if name == "loaded":
                assert not load_safetensors(engine.model, file)
            elif name == "written":
                engine.model.load_state_dict(whole[0].model.state_dict())

        @trainer.on(Events.ITERATION_COMPLETED)
        def keep(engine: Trainer, found: list[float] = found) -> None:
            found.append(float(engine.state.output["loss"]))
            if len(found) == trained + 3:
                engine.terminate()

        trainer.train()
    assert losses["loaded"] == losses["written"]
    assert losses["loaded"][:trained] == losses["neither"][:trained]
    assert losses["loaded"][trained] < losses["neither"][trained]
