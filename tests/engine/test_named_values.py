"""Values by name: an unknown name is answered with those that exist, and everything else is as with a dict."""

from __future__ import annotations

import copy
import io
import json
import pickle
from typing import Any

import msgspec
import pytest
import torch

from pulsetrain.engine import MetricNotFoundError
from pulsetrain.engine.checkpoint.plain import plain
from pulsetrain.engine.checkpoint.snapshot import Snapshot
from pulsetrain.engine.named_values import NamedValues

VALUES = {"train/loss": 2.0, "val/accuracy": 0.5}


def test_an_unknown_name_is_a_key_error_that_suggests_the_nearest():
    with pytest.raises(KeyError) as caught:
        NamedValues(VALUES)["val/accurcy"]
    assert isinstance(caught.value, MetricNotFoundError)
    assert str(caught.value) == (
        "metric='val/accurcy': this metric does not exist; there are: train/loss, val/accuracy; "
        "did you mean 'val/accuracy'?"
    )


def test_the_error_of_an_empty_mapping_says_so():
    with pytest.raises(KeyError, match=r"there are: none at all$"):
        NamedValues()["val/loss"]


@pytest.mark.parametrize("name", [3, None, ("val", "loss")])
def test_a_name_of_another_type_is_a_key_error(name: Any):
    with pytest.raises(KeyError, match="does not exist"):
        NamedValues({1: 2.0})[name]


def test_it_is_otherwise_a_dict():
    values = NamedValues(VALUES)
    assert values == VALUES
    assert (repr(values), json.dumps(values)) == (repr(VALUES), json.dumps(VALUES))
    assert msgspec.json.encode(values) == msgspec.json.encode(VALUES)
    assert (values.get("val/acc"), values.get("val/acc", 1.0), "val/acc" in values) == (None, 1.0, False)
    assert values.pop("val/accuracy") == 0.5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda values: pickle.loads(pickle.dumps(values))])
def test_copies_are_equal(copied: Any):
    assert copied(NamedValues(VALUES)) == VALUES


def test_torch_reads_it_without_running_code():
    file = io.BytesIO()
    torch.save({"history": NamedValues(VALUES)}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"history": VALUES}


def test_a_checkpoint_holds_it_as_a_plain_dict():
    for held in (plain({"best": NamedValues(VALUES)}), Snapshot().copy({"best": NamedValues(VALUES)})):
        assert held == {"best": VALUES}
        assert type(held["best"]) is dict
