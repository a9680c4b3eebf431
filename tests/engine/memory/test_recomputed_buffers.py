"""Buffers that the forward pass of recomputed modules changes: both passes begin with the same values."""

import pytest
import torch
from torch import nn

from pulsetrain.engine import ActivationCheckpointing
from pulsetrain.engine.memory.activations import recompute_activations
from tests.engine.memory.test_activations import Calls, train


class Calibrated(nn.Module):
    """Divides by a range that follows the values it has seen, as an observer for quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("range", torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.range.lerp_(x.detach().abs().max(), 0.5)  # in place
        self.seen = self.seen + 1  # by another tensor
        return (x / self.range.clone()) * self.seen


def remembering():
    """Blocks whose results depend on buffers that their forward passes change."""
    torch.manual_seed(0)
    spectral = torch.nn.utils.parametrizations.spectral_norm
    blocks = [nn.Sequential(spectral(nn.Linear(6, 6)), nn.BatchNorm1d(6), Calibrated(), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(6, 1))


@pytest.mark.parametrize("setting", ["[01]", ActivationCheckpointing("[01]", keep=["matmul"])], ids=str)
def test_both_passes_begin_with_the_same_buffers(setting):
    plain, recomputed = remembering(), remembering()
    assert recompute_activations(recomputed, setting) == ["0", "1"]
    losses, gradients, state = train(plain, steps=4)
    others, other_gradients, other_state = train(recomputed, steps=4)
    assert others == losses
    for name, gradient in gradients.items():
        assert torch.equal(other_gradients[name], gradient), name
    for name, value in state.items():
        assert torch.equal(other_state[name], value), name
    assert int(state["0.2.seen"]) == 4
    names = dict(recomputed.named_buffers())
    assert names.keys() == dict(plain.named_buffers()).keys()


def test_a_module_that_is_called_twice_before_the_backward_pass_keeps_both_states():
    def gradients(model):
        torch.manual_seed(1)
        (model(torch.randn(5, 6)).sum() * model(torch.randn(5, 6)).sum()).backward()
        return [*(each.grad for each in model.parameters()), *model.buffers()]

    plain, recomputed = remembering(), remembering()
    recompute_activations(recomputed, "[01]")
    assert all(map(torch.equal, gradients(recomputed), gradients(plain)))


def test_a_buffer_that_modules_share_is_shared_in_both_passes():
    class Reading(nn.Module):
        def __init__(self, of):
            super().__init__()
            self.register_buffer("range", of.range)

        def forward(self, x):
            return x * self.range

    def made():
        torch.manual_seed(0)
        calibrated = Calibrated()
        return nn.Sequential(nn.Sequential(nn.Linear(6, 6), calibrated, Reading(calibrated)), nn.Linear(6, 1))

    plain, recomputed = made(), made()
    recompute_activations(recomputed, "0")
    assert train(recomputed)[0] == train(plain)[0]
    assert recomputed[0][1].range is recomputed[0][2].range


class Late(nn.Module):
    """Changes its buffer from a chosen moment on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.observes = False

    def forward(self, x):
        if self.observes and self.training:
            self.scale.mul_(0.5)
        return (x * self.scale).tanh()


def test_a_buffer_that_is_changed_later_than_in_the_first_pass_is_an_error():
    late = nn.Sequential(nn.Sequential(nn.Linear(6, 6), Late()), nn.Linear(6, 1))
    recompute_activations(late, "0")
    late.eval()
    train(late, steps=1)
    late.train()
    late[0][1].observes = True
    train(late, steps=2)  # the first passes of the training mode
    late[0][1].observes = False
    train(late, steps=1)
    late[0][1].observes = True
    train(late, steps=1)  # it has been changed before
    recompute_activations(late, "0")
    late[0][1].observes = False
    train(late, steps=1)
    late[0][1].observes = True
    with pytest.raises(RuntimeError, match=r"changed the buffer '1\.scale' for the first time, .* leave that module"):
        train(late, steps=1)


def test_large_buffers_that_stay_as_they_are_are_copied_once():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("mask", torch.ones(6))

        def forward(self, x):
            return self.layer(x).tanh() * self.mask

    masked = nn.Sequential(Masked(), nn.Linear(6, 1))
    recompute_activations(masked, "0")
    counts = []
    for _ in range(2):
        with Calls(torch.ops.aten.clone.default) as counting:
            masked(torch.ones(5, 6)).sum().backward()
        masked.zero_grad()
        counts.append(counting.count)
    assert counts[0] == counts[1] + 1


def weights_and_buffers(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_alike(make, batches):
    models = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        models.append(nn.Sequential(make(), make()))
        if recomputes:
            recompute_activations(models[-1], "*")
    expected, found = (weights_and_buffers(each, batches) for each in models)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_running_statistics_that_the_first_pass_leaves_as_they_were_count_each_batch_once():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
            nn.init.zeros_(self.layer.weight)
            nn.init.zeros_(self.layer.bias)  # the mean of the first batch is 0, which is where it begins

        def forward(self, x):
            return x + self.norm(self.layer(x))

    assert_alike(Residual, [torch.randn(5, 6) for _ in range(4)])


def test_a_table_that_grows_with_a_longer_input_is_computed_with_as_it_was():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("positions", torch.arange(4.0), persistent=False)

        def forward(self, x):
            if len(x) > len(self.positions):
                self.positions = torch.arange(float(len(x)))
            return self.layer(x) * self.positions[: len(x), None]

    assert_alike(Table, [torch.randn(rows, 6) for rows in (4, 3, 9, 9, 12)])


def test_a_buffer_that_is_none_until_the_first_pass_is_none_in_both():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("sum", None)

        def forward(self, x):
            y = self.layer(x)
            now = y.detach().mean(0)
            self.sum = now if self.sum is None else self.sum + now
            return y * self.sum.sigmoid()

    assert_alike(Summed, [torch.randn(5, 6) for _ in range(3)])


def twice(model, inputs):
    loss = model(inputs).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty(model, inputs):
    """As of Gulrajani et al. 2017: a gradient of a gradient."""
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    (gradient.norm(dim=-1) - 1).square().mean().backward()


@pytest.mark.parametrize("learn", [twice, gradient_penalty])
def test_several_backward_passes_through_one_graph_compute_again_each_time(learn):
    found = []
    for recomputes in (False, True):
        model = remembering()
        if recomputes:
            recompute_activations(model, "[01]")
        torch.manual_seed(1)
        learn(model, torch.randn(5, 6, requires_grad=True))
        found.append([each.grad for each in model.parameters() if each.grad is not None] + list(model.buffers()))
    assert len(found[0]) == len(found[1]) > 6
    assert all(map(torch.equal, *found))
