"""Errors know their argument and value, are the builtins that they refine, and can be pickled."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pulsetrain
from pulsetrain.engine import Events, Every, GRPOStrategy
from pulsetrain.engine.data.sequences import pack
from pulsetrain.engine.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    MetricNotFoundError,
    PulsetrainError,
    RecordingError,
    RunFolderError,
    did_you_mean,
    nearest,
    unknown_name,
)
from pulsetrain.engine.metrics import MetricTracker, RunningMean
from pulsetrain.engine.optimizers import NamedOptimizers, create_functional

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


def test_the_nearest_names_are_found_whatever_their_case_and_the_nearest_first() -> None:
    names = ["train/loss", "val/loss", "epoch"]
    assert nearest("Val/Loss", names, 3) == ["val/loss", "train/loss"]
    assert nearest("Val/Los", names) == ["val/loss"]
    assert nearest("xyz", names, 3) == []
    assert did_you_mean("EPOHC", names) == "; did you mean 'epoch'?"
    assert did_you_mean("xyz", names) == ""


def test_names_are_compared_in_one_place() -> None:
    folders = ("engine", "handlers", "pulsetrain")
    files = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    users = {path.name for path in files if "get_close_matches" in path.read_text(encoding="utf-8")}
    assert users == {"errors.py"}


def test_rewording_renames_every_argument_and_keeps_the_notes() -> None:
    error = ConfigurationError("leaves nothing of {steps}", "Part", warmup=5, steps=None)
    error.add_note("at iteration 3")
    found = error.reworded(
        lambda name, value: (f"training.{name}", value), lambda value: "null" if value is None else repr(value)
    )
    assert str(found) == "training.warmup=5: leaves nothing of training.steps=null"
    assert (found.argument, found.value, found.__notes__) == ("training.warmup", 5, ["at iteration 3"])


def test_an_error_can_be_reworded_with_a_place_and_again() -> None:
    error = ConfigurationError("is above {peak}; {floor} is lower", "part", floor=0.5, peak=0.1, size=3)
    options = {"floor": "low", "peak": "options", "size": "options"}

    def first(name: str, value: object) -> tuple[str, object]:
        return options[name], value if name == "floor" else {name: value}

    written = error.reworded(first, place="Whole")
    assert str(written) == "Whole(): is above options={'peak': 0.1, 'size': 3}; low=0.5 is lower"
    assert (written.place, written.argument, written.value) == ("Whole", "low", 0.5)
    assert written.arguments == {"low": 0.5, "options": {"peak": 0.1, "size": 3}}
    again = written.reworded(lambda name, value: (f"training.{name}", value))
    assert str(again) == "is above training.options={'peak': 0.1, 'size': 3}; training.low=0.5 is lower"
    assert pickle.loads(pickle.dumps(written)).arguments == written.arguments


ROOT = Path(pulsetrain.__file__).parent.parent
BY_HAND = {
    # about an array of a batch: no error of the configuration, so that a crash bundle is written
    "engine/arrays.py": "require_tensor",
    "engine/losses/checks.py": "reject",
    # still to be converted: Replay(checkpoints=...) and Replay(model=...)
    "engine/recording/replay/weights.py": "__init__, beside",
}


def literal(node: ast.expr) -> str:
    """The text of a message, with a * for each formatted value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(literal, node.values))
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    if isinstance(node, ast.FormattedValue):
        return "*"
    return str(node.value) if isinstance(node, ast.Constant) else "*"


def written_by_hand(source: str) -> Iterator[str]:
    """The messages of errors that write `Place(argument=value)` themselves."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args and re.search(r"Error$", ast.unparse(node.func)):
            message = literal(node.args[0])
            if re.match(r"[\w.*']*\([\w*\[\] ]+=", message) and "RuntimeError" not in ast.unparse(node.func):
                yield message


def test_an_error_that_writes_its_argument_by_hand_is_found() -> None:
    assert list(written_by_hand('raise ValueError(f"Part(size={size!r}): " "needs more")')) == [
        "Part(size=*): needs more"
    ]
    assert list(written_by_hand('raise TypeError(f"{place}({name}{at}={size})")')) == ["*(**=*)"]
    assert not list(written_by_hand('raise ConfigurationError("needs more; pass size=3", "Part", size=size)'))


@pytest.mark.parametrize("package", ["engine", "handlers", "pulsetrain"])
def test_no_error_writes_its_argument_by_hand(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {message}"
        for path in sorted((ROOT / package).rglob("*.py"))  # does not follow the links in pulsetrain/
        if str(path.relative_to(ROOT)) not in BY_HAND
        for message in written_by_hand(path.read_text())
    }
    assert not found, "pass the argument by keyword, as ConfigurationError('needs more', 'Part', size=size)"


@pytest.mark.parametrize(
    ("call", "kind", "argument", "value"),
    [
        (lambda: RunningMean().update(1.0, weight=-1), ConfigurationError, "weight", -1),
        (lambda: MetricTracker().update({"loss": "low"}), ArgumentTypeError, "loss", "low"),
        (lambda: GRPOStrategy(kl_coef=0.1, reference=None), ConfigurationError, "kl_coef", 0.1),
        (lambda: create_functional("sgd", 0.1, momentum=-1), ConfigurationError, "momentum", -1),
        (lambda: create_functional("sgd", -0.1), ConfigurationError, "learning_rate", -0.1),
        (lambda: pack([], 4, truncation="left", split=True), ConfigurationError, "truncation", "left"),
        (lambda: Events.STARTED(every=0), ConfigurationError, "every", 0),
        (lambda: NamedOptimizers({}), ConfigurationError, "optimizers", {}),
        (lambda: Every(epochs=1) | Every(epochs=2), ConfigurationError, "epochs", 1),
    ],
)
def test_an_error_gives_the_rejected_argument(
    call: Callable[[], object], kind: type[PulsetrainError], argument: str, value: object
) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert (raised.value.argument, raised.value.value) == (argument, value)
    assert f"{argument}={value!r}" in str(raised.value)
    assert raised.value.place
