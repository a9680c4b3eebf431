"""Recomputed activations: the same numbers, with fewer tensors kept."""

import copy
import pickle

import pytest
import torch
from torch import nn

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.activations import recompute_activations


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(4 * width, width),
        )
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)
        self.calls = 0

    def forward(self, x, shift=0.0):
        self.calls += 1
        return x + self.norm(self.layers(x).unsqueeze(1)).squeeze(1) + shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(3)])
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, shift=0.1)
        return self.head(x)


def model():
    torch.manual_seed(0)
    return Model()


def train(model, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}, model.state_dict()


def kept_bytes(model):
    """What the graph of one forward pass keeps for the backward pass."""
    sizes: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (sizes.__setitem__(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()), t)[1], lambda t: t
    ):
        model(torch.randn(512, 6)).sum()
    return sum(sizes.values())


def test_losses_gradients_draws_and_statistics_are_the_same_bit_for_bit():
    plain, recomputed = model(), model()
    assert recompute_activations(recomputed, "blocks.*") == ["blocks.0", "blocks.1", "blocks.2"]
    losses, gradients, state = train(plain)
    others, other_gradients, other_state = train(recomputed)
    assert others == losses
    for name, gradient in gradients.items():
        assert torch.equal(other_gradients[name], gradient), name
    assert other_state.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(other_state[name], value), name
    assert int(state["blocks.0.layers.1.num_batches_tracked"]) == 3
    assert [block.calls for block in recomputed.blocks] == [6, 6, 6]
    assert [block.calls for block in plain.blocks] == [3, 3, 3]


def test_a_fraction_of_the_activations_is_kept():
    recomputed = model()
    recompute_activations(recomputed, "blocks.*")
    assert kept_bytes(recomputed) < 0.3 * kept_bytes(model())


def test_without_gradients_nothing_is_computed_twice():
    recomputed = model().eval()
    recompute_activations(recomputed, "blocks.*")
    with torch.no_grad():
        recomputed(torch.randn(5, 6))
    assert [block.calls for block in recomputed.blocks] == [1, 1, 1]


def test_a_star_matches_one_part_of_a_name():
    assert recompute_activations(model(), "h*") == ["head"]
    assert recompute_activations(model(), "blocks.[02].layers.0") == ["blocks.0.layers.0", "blocks.2.layers.0"]


def test_arranging_it_again_replaces_what_was_arranged():
    again = model()
    recompute_activations(again, "blocks.*")
    recompute_activations(again, "blocks.0")
    train(again, steps=1)
    assert [block.calls for block in again.blocks] == [2, 1, 1]
    recompute_activations(again, None)
    train(again, steps=1)
    assert [block.calls for block in again.blocks] == [3, 2, 2]


def test_a_forward_that_somebody_had_replaced_is_put_back():
    patched = model()
    patched.head.forward = lambda x: x.sum(1, keepdim=True)
    recompute_activations(patched, "head")
    assert patched(torch.ones(2, 6)).shape == (2, 1)
    recompute_activations(patched, None)
    assert patched.head(torch.ones(2, 6)).tolist() == [[6.0], [6.0]]


def test_copies_compute_with_their_own_weights():
    original = model().eval()
    recompute_activations(original, "blocks.*")
    inputs = torch.randn(5, 6)
    before = original(inputs)
    for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        with torch.no_grad():
            for parameter in original.parameters():
                parameter.add_(1.0)
        assert torch.equal(twin(inputs), before)
        with torch.no_grad():
            for parameter, own in zip(original.parameters(), twin.parameters(), strict=True):
                parameter.copy_(own)


def test_a_list_of_modules_is_refused_for_it_computes_nothing_itself():
    with pytest.raises(ConfigurationError, match=r"'blocks' is a ModuleList, .* 'blocks\.\*'"):
        recompute_activations(model(), "blocks")


def test_a_name_that_no_module_has_is_refused_with_those_that_exist():
    with pytest.raises(ConfigurationError, match=r"'layers\.\*': no module of Model has such a name; .*blocks\.0"):
        recompute_activations(model(), "layers.*")
