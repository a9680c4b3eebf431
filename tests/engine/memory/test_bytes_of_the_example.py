"""What the example GPT keeps for the backward pass, in bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.live_bytes import bytes_for_backward
from pulsetrain.engine import ActivationCheckpointing
from pulsetrain.engine.memory.activations import recompute_activations


@pytest.fixture
def gpt(monkeypatch):
    """The model of examples/byte_lm and its loss for one batch."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples" / "byte_lm")
    monkeypatch.delitem(sys.modules, "model", raising=False)
    import model

    torch.manual_seed(0)
    made = model.ByteGPT(dropout=0.1)
    tokens = torch.randint(0, 256, (2, 129))

    def loss() -> Tensor:
        return F.cross_entropy(made(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    yield made, loss
    sys.modules.pop("model", None)


def gradients(made, loss):
    torch.manual_seed(1)
    made.zero_grad()
    loss().backward()
    return [parameter.grad.clone() for parameter in made.parameters()]


def test_selective_checkpointing_keeps_at_most_40_percent_and_changes_no_bit(gpt):
    made, loss = gpt
    kept, wanted = bytes_for_backward(loss), gradients(made, loss)
    found = {}
    for setting in (
        "blocks.*",
        ActivationCheckpointing("blocks.*", keep=["sdpa"]),
        ActivationCheckpointing("blocks.*", every=2),
        ActivationCheckpointing("blocks.*", keep=["matmul"]),
    ):
        recompute_activations(made, setting)
        found[setting] = bytes_for_backward(loss) / kept
        assert all(map(torch.equal, gradients(made, loss), wanted)), setting
    full, selective, second, products = found.values()
    assert full < selective <= 0.4
    assert full < 0.15
    assert second == pytest.approx((1 + full) / 2, abs=0.02)
    assert selective < products < 0.7


def test_the_count_is_of_memory_that_is_in_use():
    weight = torch.ones(8, 8, requires_grad=True)
    inputs = torch.ones(4, 8)
    product = 4 * 8 * 4
    assert bytes_for_backward(lambda: (inputs @ weight).sum()) == 0  # the batch and the weight are there anyway
    assert bytes_for_backward(lambda: (inputs @ weight).exp().sum()) == product
    assert bytes_for_backward(lambda: (inputs @ weight).exp().view(-1).square().sum()) == product
    assert bytes_for_backward(lambda: (inputs @ weight).exp()) == 0  # which is returned
