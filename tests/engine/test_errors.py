"""Errors know their argument and value, are the builtins that they refine, and can be pickled."""

from __future__ import annotations

import pickle

import pytest

from pulsetrain.engine.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    MetricNotFoundError,
    PulsetrainError,
    RecordingError,
    RunFolderError,
    unknown_name,
)

KINDS = {
    ConfigurationError: ValueError,
    ArgumentTypeError: TypeError,
    MetricNotFoundError: ValueError,
    RunFolderError: OSError,
    RecordingError: RuntimeError,
    CheckpointError: RuntimeError,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_the_builtin_that_it_refines(kind: type[PulsetrainError]) -> None:
    error = kind("needs more", "Part", size=3)
    assert isinstance(error, KINDS[kind])
    assert str(error) == "Part(size=3): needs more"
    assert (error.place, error.argument, error.value, error.rule) == ("Part", "size", 3, "needs more")


@pytest.mark.parametrize("kind", KINDS)
def test_each_keeps_its_text_attributes_and_notes_when_pickled(kind: type[PulsetrainError]) -> None:
    error = kind("is above {peak}", "Part", floor=0.5, peak=0.1)
    error.add_note("at iteration 3")
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), found.__notes__) == (kind, "Part(floor=0.5): is above peak=0.1", error.__notes__)
    assert (found.argument, found.value, found.arguments) == ("floor", 0.5, {"floor": 0.5, "peak": 0.1})


def test_a_value_that_cannot_be_pickled_is_replaced_by_its_text() -> None:
    def rule() -> None: ...

    found = pickle.loads(pickle.dumps(ConfigurationError("needs a number", "Part", size=rule)))
    assert str(found) == f"Part(size={rule!r}): needs a number"
    assert repr(rule) in repr(found.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigurationError("a plain text"), "a plain text"),
        (ConfigurationError("needs one of a, b", "Part"), "Part(): needs one of a, b"),
        (ConfigurationError("is empty", "Part", data=...), "Part(data): is empty"),
        (ConfigurationError("only one", "Part", a=1, b=None), "Part(a=1, b=None): only one"),
        (ConfigurationError("not a mapping {'a': 1}", size=1), "size=1: not a mapping {'a': 1}"),
        (ConfigurationError("needs objects", "Part", of=[int, str]), "Part(of=[int, str]): needs objects"),
        (ConfigurationError("taken", "Part", of={"loss": ...}), "Part(of={'loss': ...}): taken"),
        (
            unknown_name("Part", "name", "bd", ["ab", "b"]),
            "Part(name='bd'): unknown; choose one of ab, b; did you mean 'b'?",
        ),
    ],
)
def test_the_text_has_place_argument_value_and_rule(error: PulsetrainError, text: str) -> None:
    assert str(error) == text
    assert error.argument == next(iter(error.arguments), None)


def test_rewording_renames_every_argument_and_keeps_the_notes() -> None:
    error = ConfigurationError("leaves nothing of {steps}", "Part", warmup=5, steps=None)
    error.add_note("at iteration 3")
    found = error.reworded(
        lambda name, value: (f"training.{name}", value), lambda value: "null" if value is None else repr(value)
    )
    assert str(found) == "training.warmup=5: leaves nothing of training.steps=null"
    assert (found.argument, found.value, found.__notes__) == ("training.warmup", 5, ["at iteration 3"])
