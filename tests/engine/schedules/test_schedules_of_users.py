"""A schedule of the user's, whose annotations are types: its parameters are checked as those of ours."""

from dataclasses import dataclass

import pytest

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.schedules import build_schedule, named
from pulsetrain.engine.schedules.formula import Formula


@dataclass(frozen=True)
class Halving(Formula):
    initial_lr: float
    hold_steps: int

    def get_lr(self, step: int) -> float:
        return self.initial_lr * 0.5 ** (step // self.hold_steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0), "Halving(hold_steps=0): needs at least 1"),
        ((1.0, 1.5), "Halving(hold_steps=1.5): needs a whole number"),
        (("x", 1), "Halving(initial_lr='x'): needs a finite number that is not negative"),
        ((-1.0, 1), "Halving(initial_lr=-1.0): needs a finite number that is not negative"),
    ],
)
def test_wrong_parameters_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Halving(*arguments)
    assert str(caught.value) == message


def test_by_a_name_it_says_which_parameter_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(named._NAMED, "halving", Halving)
    with pytest.raises(ConfigurationError, match=r"hold_steps"):
        build_schedule("halving", 1.0, total_steps=10)
    assert build_schedule("halving", 1.0, total_steps=10, hold_steps=2).get_lr(2) == 0.5


def test_an_annotation_that_cannot_be_resolved_leaves_the_others_checked() -> None:
    @dataclass(frozen=True)
    class Odd(Formula):
        initial_lr: "float"
        thing: "Unknown" = None  # type: ignore[name-defined]  # noqa: F821

        def get_lr(self, step: int) -> float:
            return self.initial_lr

    assert Odd(1).get_lr(0) == 1.0
    with pytest.raises(ConfigurationError, match="needs a finite number"):
        Odd("x")  # type: ignore[arg-type]
