"""The storage of a sweep: where its file is, and what is said about one that cannot be used."""

from __future__ import annotations

import datetime
import math
import socket
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="pip install 'pulsetrain[sweep]'")

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.sweep.spec import Spec, read_spec
from pulsetrain.sweep.study import _check_sweep, open_study, storage_errors

SPEC = Spec("c", "f", {"rate": (1, 2)}, ("val/loss",), ("min",), "grid")


@pytest.mark.parametrize("name", ["a b", "a?b", "a#b", "100%", "a%20b", "é"])
def test_the_file_is_in_the_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    spec = replace(SPEC, folder=str(tmp_path / name))
    (tmp_path / name).mkdir()
    open_study(spec).ask()
    assert [each.relative_to(tmp_path) for each in tmp_path.rglob("*") if each.is_file()] == [
        Path(name) / "sweep.sqlite"
    ]
    assert len(open_study(spec, create=False, read_only=True).get_trials()) == 1


def damaged(file: Path) -> None:
    file.write_text("damaged")


def of_another_version(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE version_info SET schema_version = 99, library_version = '99.0.0'")
        connection.execute("UPDATE alembic_version SET version_num = 'v99.0.0.a'")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            damaged,
            "file is not a database; restore it, or delete the folder to begin again",
        ),
        (of_another_version, "does not fit the installed Optuna: .*set up by optuna 99.0.0"),
        (Path.unlink, "has no sweep.sqlite"),
    ],
)
def test_a_storage_that_cannot_be_used_says_why(harm, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    spec = replace(SPEC, folder=str(tmp_path))
    open_study(spec)
    (tmp_path / "trials").mkdir()
    harm(tmp_path / "sweep.sqlite")
    with pytest.raises(ConfigurationError, match=message):
        open_study(spec)


def test_a_failure_of_the_storage_is_reported_without_the_statement(tmp_path: Path) -> None:
    spec = replace(SPEC, folder=str(tmp_path))
    study = open_study(spec)
    with closing(sqlite3.connect(tmp_path / "sweep.sqlite")) as connection, connection:
        connection.execute("DROP TABLE trials")
    with pytest.raises(ConfigurationError) as caught, storage_errors(spec):
        study.ask()
    assert "sweep.sqlite cannot be read or written: no such table: trials;" in str(caught.value)


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("hunter2@127.0.0.1:{port}/127", "failed: Connection refused; put that right"),
        ("hun@ter2@no.invalid/a", "'[redacted]@no.invalid'"),
        ("h%75nter2@127.0.0.1:{port}/a?sslmode=hunter2", 'sslmode value: "[redacted]"'),
    ],
)
def test_a_server_that_cannot_be_used_says_why_without_the_password(tmp_path: Path, location: str, reason: str) -> None:
    pytest.importorskip("psycopg", reason="pip install 'pulsetrain[postgresql]'")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"postgresql://me:{location.format(port=unused.getsockname()[1])}"
        with pytest.raises(ConfigurationError, match="the PostgreSQL server cannot be read or written: ") as caught:
            open_study(replace(SPEC, folder=str(tmp_path), storage=url))
    assert reason in str(caught.value)
    assert "ter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            {"sampler_options": {"n_startup_trials": "two"}},
            "sampler TPESampler: n_startup_trials='two': .* as 10$",
        ),
        ({"sampler_options": {"group": "yes"}}, "sampler TPESampler: group='yes': needs a value such as False$"),
        ({"sampler_options": {"startup": 2}}, "sampler TPESampler: .*unexpected keyword argument 'startup'"),
        ({"pruner": "asha", "pruner_options": {"reduction_factor": 2.5}}, "reduction_factor=2.5: .* such as 4$"),
    ],
)
def test_options_that_optuna_cannot_use_are_named_at_the_start(
    tmp_path: Path, options: dict[str, object], rule: str
) -> None:
    pytest.importorskip("optuna", reason="pip install 'pulsetrain[sweep]'")
    with pytest.raises(ConfigurationError, match=rule):
        open_study(replace(SPEC, folder=str(tmp_path), sampler="tpe", **options))  # type: ignore[arg-type]
    right = {"sampler_options": {"n_startup_trials": 2, "n_ei_candidates": 8.0}}  # as 8e0 in YAML
    study = open_study(replace(SPEC, folder=str(tmp_path), sampler="tpe", **right))  # type: ignore[arg-type]
    assert study.sampler._n_ei_candidates == 8
    assert type(study.sampler._n_ei_candidates) is int
    wrong = replace(SPEC, folder=str(tmp_path), sampler="tpe", **options)  # type: ignore[arg-type]
    assert open_study(wrong, create=False, read_only=True).get_trials() == []  # an earlier sweep can be looked at


def test_other_errors_are_not_the_storage_s(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), storage_errors(replace(SPEC, folder=str(tmp_path))):
        raise ZeroDivisionError


def test_the_folder_of_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is a folder; give the sweep's YAML file, or --status"):
        read_spec(tmp_path)


def test_a_study_on_a_server_is_that_of_the_sweep_that_made_it(tmp_path: Path) -> None:
    data = {"since": datetime.date(2026, 1, 1), "limit": math.inf, "rates": {0: 0.1}}
    spec = replace(SPEC, base={"data": data})
    study = open_study(replace(SPEC, folder=str(tmp_path)))
    _check_sweep(study, spec)
    _check_sweep(study, spec)
    with pytest.raises(ConfigurationError, match=r"values of the configuration \(data.limit: inf -> 1.0\); choose"):
        _check_sweep(study, replace(spec, base={"data": {**data, "limit": 1.0}}))
