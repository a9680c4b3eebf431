"""How the functional optimizers are made: keyword-only options, subclasses, pickles."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from pulsetrain.engine.optimizers.functional import SGD, Adam, AdamW, RMSprop

FIELDS = {
    SGD: ["learning_rate", "momentum", "dampening", "nesterov", "weight_decay", "decay_mask"],
    Adam: ["learning_rate", "betas", "eps", "weight_decay", "decay_mask"],
    AdamW: ["learning_rate", "betas", "eps", "weight_decay", "decay_mask"],
    RMSprop: ["learning_rate", "alpha", "eps", "momentum", "centered", "weight_decay", "decay_mask"],
}


@pytest.mark.parametrize("kind", FIELDS)
def test_only_the_rate_is_positional_and_the_order_of_the_fields_is_that_of_pickles(kind: type[Any]) -> None:
    parameters = inspect.signature(kind).parameters
    assert [each.name for each in dataclasses.fields(kind)] == [*parameters] == FIELDS[kind]
    assert [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY] == ["learning_rate"]
    made = kind(0.1, weight_decay=0.25)
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_subclass_may_add_a_field() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Named(AdamW):
        label: str = ""

    assert (Named(0.1, label="a").label, Named(0.1, eps=1e-3).eps) == ("a", 1e-3)
