"""Population-based training: who is forked from whom, and with which settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pulsetrain.sweep.population import lineage_of, parent_of, values_of
from pulsetrain.sweep.spec import Range, Spec

SPEC = Spec(
    "c", "f", {"rate": Range(1e-3, 1.0, log=True)}, ("val/loss",), ("min",), "population", population=4, interval=5
)


def ended(number: int, value: float | None) -> Any:
    state = SimpleNamespace(name="COMPLETE" if value is not None else "FAIL")
    return SimpleNamespace(
        number=number, state=state, values=None if value is None else [value], params={"rate": 0.1 + number}
    )


FIRST = [ended(0, 0.5), ended(1, 0.1), ended(2, 0.9), ended(3, 0.4)]


def test_the_worst_quarter_is_replaced_by_forks_of_the_best() -> None:
    assert [parent_of(SPEC, number, FIRST) for number in range(4, 8)] == [0, 1, 1, 3]


def test_larger_values_can_be_better() -> None:
    spec = Spec("c", "f", SPEC.space, ("val/loss",), ("max",), "population", population=4, interval=5)
    assert [parent_of(spec, number, FIRST) for number in range(4, 8)] == [0, 2, 2, 3]


def test_a_failed_member_is_replaced() -> None:
    trials = [ended(0, None), *FIRST[1:]]
    assert parent_of(SPEC, 4, trials) == 1


def test_a_member_that_failed_is_not_forked() -> None:
    spec = replace(SPEC, population=8)
    trials = [ended(number, 0.5 if number == 3 else None) for number in range(8)]
    assert [parent_of(spec, number, trials) for number in range(8, 16)] == [3] * 8


def test_the_lineage_is_read_from_the_run_folders(tmp_path: Path) -> None:
    for name, parent in (("0001", None), ("0006", "0001"), ("0011", "0006")):
        (tmp_path / name).mkdir()
        entry = {} if parent is None else {"parent": {"run": f"/where/it/was/trained/{parent}"}}
        (tmp_path / name / "run.json").write_text(json.dumps(entry))
    assert lineage_of(tmp_path / "0011") == [1, 6, 11]


def test_others_keep_their_settings_and_the_replaced_are_perturbed_within_the_range() -> None:
    assert values_of(SPEC, 4, FIRST) == {"rate": 0.1}
    assert values_of(SPEC, 6, FIRST)["rate"] in (0.8 * 1.1, 1.0)  # 1.25 * 1.1 is above the range


def test_the_first_generation_follows_from_the_seed() -> None:
    drawn = [values_of(SPEC, number, [])["rate"] for number in range(4)]
    assert drawn == [values_of(SPEC, number, [])["rate"] for number in range(4)]
    assert len(set(drawn)) == 4
    assert all(1e-3 <= rate <= 1 for rate in drawn)


def test_steps_that_do_not_fill_the_range_stay_within_it() -> None:
    space = {"rate": Range(0.0, 1.0, step=0.6), "share": Range(0.0, 0.3, step=0.1), "width": Range(8, 34, step=10)}
    spec = replace(SPEC, space=space, population=200)
    drawn = [values_of(spec, number, []) for number in range(200)]
    assert {each["rate"] for each in drawn} == {0.0, 0.6}
    assert {each["share"] for each in drawn} == {0.0, 0.1, 0.2, 0.3}
    assert {each["width"] for each in drawn} == {8, 18, 28}
