"""Recorded runs of every backend are verified, compared, reported, debugged and forked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import Trainer, verify
from pulsetrain.cli import main
from pulsetrain.debugger.recorded import Debugger
from pulsetrain.engine import Every
from pulsetrain.engine.recording import EventLog, diff
from pulsetrain.handlers import Fingerprints
from tests.faults.everything import logged
from tests.support.runs_backends import BACKENDS, On, make, programs_kept


@pytest.fixture(autouse=True, scope="module")
def _programs() -> Iterator[None]:
    with programs_kept():
        yield


def build(on: On, folder: Path) -> Trainer:
    return make(on, folder, Fingerprints(Every(updates=1), batches=True), max_epochs=2)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[On], Path]:
    """The folder of a backend's run."""

    @cache
    def run(on: On) -> Path:
        folder = tmp_path_factory.mktemp(on.name)
        build(on, folder).train()
        return folder

    return run


@pytest.mark.slow
@pytest.mark.parametrize("stretch", [{}, {"from_iteration": 12, "to_iteration": 17}])
@pytest.mark.parametrize("on", BACKENDS)
def test_a_run_is_reproducible(on: On, stretch: dict[str, int], recorded: Callable[[On], Path]):
    folder = recorded(on)
    found = verify(folder, lambda: build(on, folder), **stretch)
    assert found, str(found)
    assert (found.start, found.end) == ((10, 17) if stretch else (0, 20))
    assert found.agreed > 5 * (found.end - found.start)
    assert not found.changed


def nudged(on: On) -> On:
    """With the last bit of one weight flipped at the start."""

    def model() -> Any:
        made = on.model()
        if isinstance(made, nn.Module):
            with torch.no_grad():
                made[4].bias.view(torch.int32).add_(1)
        elif isinstance(made, tuple):
            made.weight.view("int32")[0, 0] += 1
        else:
            made.first.kernel[...] = made.first.kernel[...].at[0, 0].multiply(1 + 2**-22)
        return made

    return replace(on, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("on", BACKENDS)
def test_a_single_flipped_bit_is_found_where_it_first_shows(on: On, recorded: Callable[[On], Path], tmp_path: Path):
    folder = recorded(on)
    found = verify(folder, lambda: build(nudged(on), folder), to_iteration=4)
    assert not found
    assert found.divergence is not None
    assert found.divergence.a.iteration <= 2  # the first update's
    build(nudged(on), tmp_path / "nudged").train()
    compared = diff(folder, tmp_path / "nudged")
    assert (compared.divergence.a.event, compared.divergence.a.iteration) == (
        found.divergence.a.event,
        found.divergence.a.iteration,
    )


@pytest.mark.parametrize("on", BACKENDS)
def test_the_same_run_twice_has_no_difference(on: On, recorded: Callable[[On], Path], tmp_path: Path):
    build(on, tmp_path).train()
    assert not diff(recorded(on), tmp_path)
    assert dict(logged(recorded(on))) == dict(logged(tmp_path))


@pytest.mark.parametrize("on", BACKENDS)
def test_it_is_debugged_and_reported(on: On, recorded: Callable[[On], Path], tmp_path: Path):
    folder = recorded(on)
    debugger = Debugger(folder)
    debugger.goto(iteration=12)
    debugger.next_to("iteration_completed")
    (event,) = EventLog(folder).read(engine="trainer", event="iteration_completed", iteration=(12, 12))
    assert debugger.value("output.loss") == event.output["loss"] > 0
    assert debugger.state.update == 6
    pytest.importorskip("plotly", reason="plotly is not installed")
    assert main(["report", str(folder), "--into", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("val/loss", "grad_norm"))
