"""`verify` runs a recorded run again: it confirms equal events, and finds differences with their causes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch.utils.data import DataLoader

from pulsetrain import EventLog, Trainer, verify
from pulsetrain.engine import Events, Every
from pulsetrain.engine.checkpoint import CheckpointManager, find_checkpoints, load_checkpoint
from pulsetrain.engine.errors import CheckpointError, ConfigurationError, RecordingError
from pulsetrain.handlers import EventRecorder, Fingerprints, NaNGuard, RunSummary
from tests.support import runs_honest
from tests.support.models import loader, pairs, trainer
from tests.support.runs_verified import build
from tests.support.stateful_parts import CountingRows


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("stretch", [{}, {"from_iteration": 12}, {"from_iteration": 12, "to_iteration": 20}])
def test_the_same_run_is_reproduced_and_its_folder_stays_unchanged(run: Path, stretch: dict[str, int]):
    before = contents(run)
    found = verify(run, lambda: build(run), **stretch)
    assert found, str(found)
    assert (found.start, found.end) == (8 if stretch else 0, stretch.get("to_iteration", 30))
    assert found.agreed > 5 * (found.end - found.start)  # two of the iteration, two of the update, two fingerprints
    assert "reproduced" in str(found)
    assert contents(run) == before


def test_a_function_that_takes_a_folder_gets_a_temporary_one(run: Path):
    given: list[Path] = []

    def make(folder: Path) -> Trainer:
        given.append(folder)
        return build(folder)

    assert verify(run, make, from_iteration=20)
    assert len(given) == 1
    assert run not in given[0].parents
    assert not given[0].exists()


@pytest.mark.parametrize(("before", "now"), [([], [NaNGuard]), ([NaNGuard], [])], ids=["added", "removed"])
def test_a_guard_that_is_added_or_removed_differs_in_gradient_norms_alone(
    tmp_path: Path, before: list[Any], now: list[Any]
):
    def make(guards: list[Any]) -> Trainer:
        run = build(tmp_path, grad_norm=False)
        for guard in guards:
            guard().attach(run)
        return run

    make(before).train()
    found = verify(tmp_path, lambda: make(now), from_iteration=12)
    assert found, str(found)
    assert "not compared, since only one of the two runs has them: gradients_ready" in str(found)


def test_an_event_in_place_of_another_is_blamed_on_the_handlers(run: Path):
    def make() -> Trainer:
        trainer = build(run)
        trainer.register_events("spike_seen")
        trainer.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED(once=14), lambda e: e.fire("spike_seen"))
        return trainer

    found = verify(run, make, from_iteration=12)
    assert found.divergence is not None
    assert "event" in found.divergence.fields
    assert [cause.kind for cause in found.causes] == ["handlers"]


def test_verifying_reports_only_its_own_result(run: Path, capsys: pytest.CaptureFixture[str]):
    def build_with_summary() -> Trainer:
        trainer = build(run)
        trainer.handlers.append(RunSummary().attach(trainer))
        return trainer

    with structlog.testing.capture_logs() as logs:
        found = verify(run, build_with_summary, from_iteration=12)
    assert capsys.readouterr() == ("", "")
    assert found, str(found)
    assert [entry["event"] for entry in logs if "resumed" in entry["event"]] == []


class Swapped(torch.utils.data.Dataset):
    """Two rows have been swapped."""

    def __init__(self) -> None:
        self.rows = pairs()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[{7: 8, 8: 7}.get(index, index)]


def swap_rows(folder: Path) -> Trainer:
    return build(folder, data=DataLoader(Swapped(), batch_size=4, shuffle=True))


def change_the_seed(folder: Path) -> Trainer:
    return build(folder, {"seed": 4})


def change_a_bit_of_the_rate(folder: Path) -> Trainer:
    return build(folder, {"learning_rate": math.nextafter(0.01, 1)})


def draw(folder: Path) -> Trainer:
    made = build(folder)
    made.add_event_handler(Events.ITERATION_STARTED(once=14), lambda: torch.rand(1))
    return made


def draw_from_python(folder: Path) -> Trainer:
    made = build(folder)
    made.add_event_handler(Events.ITERATION_COMPLETED(once=14), lambda: random.random())
    return made


def draw_lots(folder: Path) -> Trainer:
    made = build(folder)
    source = random.SystemRandom()

    @made.on(Events.GRADIENTS_READY(once=14))
    def disturb() -> None:
        next(made.model.parameters()).grad[0] += source.random()

    return made


def fire_more(folder: Path) -> Trainer:
    made = build(folder)
    made.register_events("seen")
    made.add_event_handler(Events.ITERATION_COMPLETED(once=14), lambda engine: engine.fire("seen"))
    return made


def another_model(folder: Path) -> Trainer:
    return build(folder, dropout=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "kind", "where"),
    [
        (swap_rows, "data", ("batch_fingerprinted", None)),
        (change_the_seed, "settings", ("batch_fingerprinted", 0)),
        (change_a_bit_of_the_rate, "settings", ("optimizer_step_completed", 1)),
        (draw, "random numbers", ("gradients_ready", 14)),
        (draw_from_python, "random numbers", ("state_fingerprinted", 15)),
        (draw_lots, "non-deterministic", ("state_fingerprinted", 14)),
        (fire_more, "handlers", (None, None)),
        (another_model, "code", ("gradients_ready", 1)),
    ],
)
def test_each_cause_is_found_at_its_event(
    run: Path, tmp_path: Path, change: Callable[[Path], Trainer], kind: str, where: tuple[str | None, int | None]
):
    found = verify(run, lambda: change(tmp_path / "again"))
    assert not found
    assert found.divergence is not None
    event, iteration = where
    assert event in (None, found.divergence.a.event)
    assert iteration in (None, found.divergence.a.iteration)
    assert found.causes[0].kind == kind, str(found)
    assert str(found.causes[0]) in str(found)
    if change is draw_from_python:
        assert found.fingerprints == {"weights": True, "buffers": True, "optimizer": True, "rng": False}
        assert "fingerprints after it: weights same, buffers same, optimizer same, rng differs" in str(found)


@pytest.mark.slow
def test_without_gradient_norms_a_cause_is_found_at_the_fingerprint_of_its_iteration(tmp_path: Path):
    build(tmp_path / "run", grad_norm=False).train()

    def again() -> Trainer:
        made = build(tmp_path / "again", grad_norm=False)
        made.add_event_handler(Events.ITERATION_STARTED(once=14), lambda: torch.rand(1))
        return made

    found = verify(tmp_path / "run", again)
    assert not found
    assert found.divergence is not None
    assert (found.divergence.a.event, found.divergence.a.iteration) == ("state_fingerprinted", 14)
    assert found.causes[0].kind == "random numbers", str(found)


@pytest.mark.parametrize("from_iteration", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_a_rerun_measures_the_gradient_norms_that_the_run_has_recorded(run: Path, from_iteration: int, tmp_path: Path):
    found = verify(run, lambda: build(tmp_path / "again", grad_norm=None), from_iteration=from_iteration)
    assert found, str(found)
    assert "gradients_ready" in {event.event for event in EventLog(run).read()}


@pytest.mark.parametrize("fingerprints", [False, True])
def test_weights_of_another_type_are_the_likeliest_cause(fingerprints: bool, tmp_path: Path):
    def of_type(dtype: torch.dtype, folder: Path) -> Trainer:
        again = build(folder, {"max_epochs": 1}, fingerprints, [tuple(x.to(dtype) for x in pair) for pair in loader()])
        again.model.to(dtype)
        return again

    of_type(torch.float32, tmp_path).train()
    found = verify(tmp_path, partial(of_type, torch.float64))
    assert not found
    assert found.causes[0].kind == "weights", str(found)
    assert "values of float32" in found.causes[0].text
    assert "values of float64" in found.causes[0].text


def test_the_batch_is_named_by_its_rows(run: Path, tmp_path: Path):
    found = verify(run, lambda: swap_rows(tmp_path / "again"), from_iteration=12)
    assert found.rows is not None
    assert len(found.rows) == 4
    assert {7, 8} & set(found.rows)
    assert f"batch: rows {', '.join(map(str, found.rows))}" in str(found)


def test_a_rate_that_is_one_bit_off_shows_in_both_causes(run: Path, tmp_path: Path):
    found = verify(run, lambda: change_a_bit_of_the_rate(tmp_path / "again"))
    assert [cause.kind for cause in found.causes[:2]] == ["settings", "learning rate"]
    assert "learning_rate" in found.causes[0].text


def test_a_flipped_bit_in_weights_with_recomputed_digests_is_found(run: Path):
    (place,) = [each for each in find_checkpoints(run / "checkpoints") if each.name.startswith("000000016")]
    state = load_checkpoint(place)
    weight = state["model"]["0.weight"].view(torch.int32)
    weight[0, 0] ^= 1
    forged = CheckpointManager(run / "forged")
    made = forged.save(state, step=16)
    for file in place.iterdir():
        file.unlink()
    for file in made.iterdir():
        file.rename(place / file.name)
    found = verify(run, lambda: build(run), from_iteration=20)
    assert not found
    assert found.causes[0].kind == "weights", str(found)
    assert "the checkpoint's weights differ from those that the run had there" in str(found)
    before = verify(run, lambda: build(run), from_iteration=10)
    assert not before
    assert (before.divergence, before.missing) == (None, None)  # the run itself is reproduced
    assert "checkpoint 000000016-checkpoint: model.0.weight: 1 of 32 values differ" in str(before)


class Dot(torch.nn.Module):
    """A long sum that is split among threads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0, 1, LONG))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([row @ self.weight for row in rows]).unsqueeze(1)


LONG = 300_000


def test_another_thread_count_is_named_as_the_cause(tmp_path: Path):
    def make() -> Trainer:
        rows = [(torch.linspace(0, 1, LONG), torch.zeros(1)) for _ in range(4)]
        return trainer(
            {"max_epochs": 1, "seed": 3, "learning_rate": 1e-6},
            model=Dot(),
            train_loader=DataLoader(rows, batch_size=2),
            handlers=[EventRecorder(tmp_path / "run"), Fingerprints(Every(updates=1))],
        )

    before, row = torch.get_num_threads(), torch.linspace(0, 1, LONG)
    try:
        torch.set_num_threads(1)
        alone = (row @ row).item()
        torch.set_num_threads(2)
        if alone == (row @ row).item():
            pytest.skip("a sum is the same for any number of threads here")
        make().train()
        torch.set_num_threads(1)
        found = verify(tmp_path / "run", make)
    finally:
        torch.set_num_threads(before)
    assert not found
    assert found.divergence.a.iteration == 1
    assert found.causes[0].kind == "environment", str(found)
    assert "threads: 2 -> 1" in found.causes[0].text


def test_without_fingerprints_the_report_recommends_them(tmp_path: Path):
    build(tmp_path / "run", fingerprints=False).train()
    found = verify(tmp_path / "run", lambda: build(tmp_path / "again", fingerprints=False, dropout=0.3))
    assert "Fingerprints(Every(updates=1), batches=True)" in str(found)


def test_a_resumed_run_is_verified_across_the_resume(tmp_path: Path):
    folder = tmp_path / "run"
    first = build(folder)

    @first.on(Events.ITERATION_COMPLETED(once=19))
    def crash() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        first.train()
    build(folder).train(resume="latest")
    found = verify(folder, lambda: build(folder))
    assert found, str(found)
    assert found.end == 30


def test_a_damaged_log_proves_nothing(run: Path):
    sealed = run / "events" / "events.jsonl.zst"
    content = bytearray(sealed.read_bytes())
    content[len(content) // 3] ^= 1
    sealed.write_bytes(content)
    found = verify(run, lambda: build(run), from_iteration=20)
    assert not found
    assert "damaged: events.jsonl.zst" in str(found)


def test_wrong_input_is_refused_with_the_remedy(run: Path, tmp_path: Path):
    with pytest.raises(RecordingError, match="no event log"):
        verify(tmp_path, lambda: build(tmp_path))
    with pytest.raises(CheckpointError, match="no checkpoint before iteration 8; the first was saved after"):
        verify(run, lambda: build(run), from_iteration=8)
    with pytest.raises(ConfigurationError, match="at least 1"):
        verify(run, lambda: build(run), from_iteration=0)
    with pytest.raises(ConfigurationError, match="is before from_iteration=30"):
        verify(run, lambda: build(run), from_iteration=30, to_iteration=3)
    with pytest.raises(ConfigurationError, match="the log ends at iteration 30"):
        verify(run, lambda: build(run), from_iteration=20, to_iteration=300)
    with pytest.raises(ConfigurationError, match="made a int; it has to return a Trainer"):
        verify(run, lambda: 3)
    with pytest.raises(ConfigurationError, match="with no EventRecorder"):
        verify(run, lambda: trainer({"max_epochs": 1}))


def test_run_json_may_be_missing(run: Path):
    (run / "run.json").unlink()
    assert verify(run, lambda: build(run), from_iteration=20)
    (run / "run.json").write_text(json.dumps([]))
    assert verify(run, lambda: build(run), from_iteration=20)


@pytest.mark.slow
def test_state_that_no_checkpoint_holds_is_named_as_a_possible_cause(tmp_path: Path):
    def make(folder: Path) -> Trainer:
        return runs_honest.run(lambda: {"val_loader": DataLoader(CountingRows(), 4)}, folder)

    make(tmp_path).train()
    result = verify(tmp_path, make, from_iteration=10)
    assert not result
    assert "state that no checkpoint holds" in str(result)
