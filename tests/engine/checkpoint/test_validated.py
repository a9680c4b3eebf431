"""Averages in checkpoints that do not say which weights they are of, or that are of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pulsetrain.engine import CheckpointError
from pulsetrain.engine.checkpoint.validated import validated_weights


def checkpoint(settings: str | None = "EMA: validate=True", number: int = 1, **averages: float) -> dict[str, Any]:
    weights = {name: torch.tensor([value]) for name, value in averages.items()}
    average = {"number_averaged": number, "buffers_kept": False, "weights": weights}
    state: dict[str, Any] = {"averaged_at": [1, 1], "average": average}
    entry = state if settings is None else {"settings": settings, "state": state}
    return {"model": {"a": torch.zeros(1), "b": torch.ones(1)}, "handlers": {"EMA": entry}}


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (checkpoint(a=2.0, b=3.0), [2.0, 3.0]),
        (checkpoint("EMA: decay=0.9, validate=False", a=2.0, b=3.0), [0.0, 1.0]),
        (checkpoint(None, a=2.0, b=3.0), [2.0, 3.0]),  # formats 3 and 4
        (checkpoint(number=0), [0.0, 1.0]),
        ({"model": {"a": torch.zeros(1)}}, [0.0]),
        ({"model": {"a": torch.zeros(1)}, "handlers": {"Mine": {"settings": "", "state": [1]}}}, [0.0]),
    ],
)
def test_a_checkpoint_without_the_note_is_taken_by_its_settings(saved: dict[str, Any], expected: list[float]):
    assert [each.item() for each in validated_weights(saved, "here").values()] == expected


def test_averages_of_weights_that_the_model_lacks_are_refused_unless_it_leaves_them_out():
    saved = checkpoint(a=2.0, b=3.0, c=4.0)
    with pytest.raises(CheckpointError, match=r"^here: there are averages of c, .*; averages=False \(--no-averages\)"):
        validated_weights(saved, "here")
    saved["modules"] = {"model": {"left_out": {"names": ["c"], "digest": None, "held": "whole"}}}
    assert list(validated_weights(saved, "here")) == ["a", "b"]
