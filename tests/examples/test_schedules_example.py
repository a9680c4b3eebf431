"""examples/schedules.py, run as a user runs it: by its path, from another folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsetrain.engine import schedules
from tests.support.programs_examples import EXAMPLES, run

EXAMPLE = EXAMPLES / "schedules.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("schedules")
    return folder, run(folder, EXAMPLE).output


def test_it_prints_rates_that_can_be_worked_out_by_hand(drawn: tuple[Path, list[str]]) -> None:
    rates = {line[:24].strip(): line[24:].split() for line in drawn[1]}
    # at updates 0, 50, 100, 500 and 999, with a highest rate of 0.001
    assert rates["constant"] == ["0.001000"] * 5
    assert rates["linear"] == ["0.001000", "0.000950", "0.000900", "0.000500", "0.000001"]
    assert rates["step"] == ["0.001000", "0.001000", "0.001000", "0.000250", "0.000125"]
    assert rates["warm-up, inverse root"][:3] == ["0.000000", "0.000500", "0.001000"]
    assert rates["warm-up, stable, decay"][:4] == ["0.000000", "0.000500", "0.001000", "0.001000"]
    assert rates["one cycle"][0] == "0.000040"
    assert rates["half of warm-up, cosine"][:3] == ["0.000000", "0.000250", "0.000500"]
    assert rates["composed"] == ["0.000000", "0.000500", "0.001000", "0.000500", "0.000000"]


def test_it_writes_the_rates_of_two_groups_and_makes_a_torch_scheduler(drawn: tuple[Path, list[str]]) -> None:
    assert drawn[1][-3:] == [
        "two groups at update 50: 0.000500 0.000050",
        "a torch scheduler: True",
        "drawn: schedules.png",
    ]


def test_it_draws_into_the_current_or_given_folder(drawn: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = drawn
    target = tmp_path / "target"
    target.mkdir()
    assert run(tmp_path, EXAMPLE, target).output[-1] == f"drawn: {target / 'schedules.png'}"
    for place in (folder, target):
        assert [path.name for path in place.iterdir()] == ["schedules.png"]
        assert (place / "schedules.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_it_shows_every_schedule() -> None:
    text = EXAMPLE.read_text()
    public = [getattr(schedules, name) for name in schedules.__all__]
    shown = [item.__name__ for item in public if isinstance(item, type) and item is not schedules.Schedule]
    missing = [name for name in shown if f"{name}(" not in text and name != "Sequential"]  # which >> makes
    assert not missing, f"add to SCHEDULES in examples/schedules.py: {', '.join(missing)}"
