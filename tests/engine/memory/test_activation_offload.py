"""Activations that are kept elsewhere: the same gradients, bit for bit."""

from __future__ import annotations

import gc
import tempfile
import weakref

import pytest
import torch
from torch import nn

from benchmarks.harness.live_bytes import bytes_for_backward
from pulsetrain.engine import ActivationOffload, OffloadPolicy
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.activation_offload import HostMemory, offload_activations, setting_of_estimate
from pulsetrain.engine.memory.activations import recompute_activations
from pulsetrain.engine.memory.setup import no_values


class Noting(HostMemory):
    """The host's memory; it notes what it is given."""

    def __init__(self) -> None:
        self.packed: list[torch.Tensor] = []
        self.unpacked = 0

    def pack(self, tensor):
        self.packed.append(tensor)
        return super().pack(tensor)

    def unpack(self, handle):
        self.unpacked += 1
        return super().unpack(handle)


class File:
    """A handle of a file without a name."""

    def __init__(self, tensor):
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        torch.save(tensor.cpu().contiguous(), self.file)  # with other strides than it had

    def __del__(self):
        self.file.close()


class OnDisk:
    def __init__(self) -> None:
        self.handles = weakref.WeakSet()

    def pack(self, tensor):
        handle = File(tensor)
        self.handles.add(handle)
        return handle

    def unpack(self, handle):
        handle.file.seek(0)
        return torch.load(handle.file)


class Attending(nn.Module):
    """Keys, queries and values are views with gaps; an exponential is saved as its own result."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(dropout)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        query, key, value = self.projection(self.norm(x)).chunk(3, dim=-1)
        weights = (query @ key.transpose(1, 2)).exp()
        mixed = self.out((weights / weights.sum(-1, keepdim=True)) @ value)
        return x + self.frozen(self.dropout(mixed)) * x.new_ones(1).expand(16)


class Attentions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[Attending() for _ in range(3)])


def gradients(setting=None, checkpointing=None, precision=None):
    torch.manual_seed(0)
    model = Attentions()
    recompute_activations(model, checkpointing)
    inputs = torch.randn(4, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        if setting is None:
            loss = model(inputs).square().mean()
        else:
            with offload_activations(model, setting):
                loss = model(inputs).square().mean()
    loss.backward()
    return [loss, *(each.grad for each in model.parameters() if each.requires_grad)]


@pytest.mark.parametrize("policy", [None, OnDisk()], ids=["host", "disk"])
@pytest.mark.parametrize("checkpointing", [None, "*"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gradients_are_the_same_bit_for_bit(policy, checkpointing, precision):
    wanted = gradients(precision=precision)
    found = gradients(ActivationOffload(min_bytes=0, policy=policy), checkpointing, precision)
    assert all(map(torch.equal, found, wanted))


def test_weights_and_small_tensors_stay_where_they_are():
    policy = Noting()
    torch.manual_seed(0)
    model = Attentions()
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    with offload_activations(model, ActivationOffload(min_bytes=4 * 8 * 8 * 4, policy=policy)):
        loss = model(torch.randn(4, 8, 16)).sum()
    assert policy.packed
    assert all(each.nbytes >= 1024 for each in policy.packed)
    assert weights.isdisjoint(each.untyped_storage().data_ptr() for each in policy.packed)
    loss.backward()
    assert policy.unpacked == len(policy.packed)


def test_with_checkpointing_only_the_inputs_of_modules_are_moved():
    policy = Noting()
    gradients(ActivationOffload(min_bytes=1024, policy=policy), checkpointing="*")
    assert [tuple(each.shape) for each in policy.packed[:3]] == [(4, 8, 16)] * 3
    assert len(policy.packed) == 4  # and the squared output's


def test_strides_are_those_of_the_forward_pass():
    seen = {}

    class Contiguous(HostMemory):
        def pack(self, tensor):
            seen["packed"] = tensor.stride()
            return tensor.contiguous().clone()

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(context, gradient):
            seen["unpacked"] = context.saved_tensors[0].stride()
            return gradient

    x = torch.randn(4, 6, requires_grad=True)
    with offload_activations(nn.Module(), ActivationOffload(min_bytes=0, policy=Contiguous())):
        y = Look.apply((x + 1).t()[:, 1:3])
    y.sum().backward()
    assert seen["packed"] == seen["unpacked"] == (1, 6)


def test_files_are_gone_when_the_graph_is():
    policy = OnDisk()
    torch.manual_seed(0)
    model = Attentions()
    with offload_activations(model, ActivationOffload(min_bytes=0, policy=policy)):
        loss = model(torch.randn(4, 8, 16)).sum()
    assert len(policy.handles) > 10
    loss.backward()
    del loss
    gc.collect()
    assert not policy.handles


def test_nothing_is_kept_of_a_graph_without_a_backward_pass():
    model, kept = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), []
    for min_bytes in (0, 1 << 20):
        with offload_activations(model, ActivationOffload(min_bytes=min_bytes)):
            kept.append(weakref.ref(model(torch.ones(2, 4))))
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_an_expanded_tensor_stays():
    inputs = torch.ones(3, 4)
    scale = torch.ones(3, 4, requires_grad=True)
    with offload_activations(nn.Identity(), ActivationOffload(min_bytes=0)):
        loss = (inputs[:, :1].expand(-1, 4) * scale).sum()
    loss.backward()
    assert scale.grad is not None
    assert scale.grad.tolist() == inputs.tolist()


def test_what_is_on_disk_is_not_in_memory():
    torch.manual_seed(0)
    model, inputs = Attentions(), torch.randn(4, 8, 16)

    def moved():
        with offload_activations(model, ActivationOffload(min_bytes=0, policy=OnDisk())):
            return model(inputs).sum()

    assert bytes_for_backward(moved) < 0.15 * bytes_for_backward(lambda: model(inputs).sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_activations_of_an_accelerator_are_in_pinned_memory():
    device, handles = torch.device("cuda"), []

    class Noting(HostMemory):
        def pack(self, tensor):
            handles.append(super().pack(tensor))
            return handles[-1]

    torch.manual_seed(0)
    model, inputs = Attentions().to(device), torch.randn(4, 8, 16, device=device)
    found = []
    for policy in (None, Noting()):
        torch.manual_seed(1)
        if policy is None:
            loss = model(inputs).square().mean()
        else:
            with offload_activations(model, ActivationOffload(min_bytes=0, policy=policy)):
                loss = model(inputs).square().mean()
        learning = [each for each in model.parameters() if each.requires_grad]
        found.append(torch.autograd.grad(loss, learning))
    assert all(map(torch.equal, *found))
    assert handles
    assert all(each.is_pinned() for each in handles)


def test_a_backward_pass_may_be_repeated():
    weight = torch.ones(3, requires_grad=True)
    with offload_activations(nn.Module(), ActivationOffload(min_bytes=0, policy=OnDisk())):
        loss = weight.exp().square().sum()
    first = torch.autograd.grad(loss, weight, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(loss, weight)[0])


def test_a_tensor_that_stays_and_is_changed_in_place_is_refused_as_without():
    weight = torch.ones(3, requires_grad=True)
    with offload_activations(nn.Module(), ActivationOffload(min_bytes=1000)):
        hidden = weight * 2
        loss = hidden.square().sum()
        hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match="was changed in place"):
        loss.backward()


def test_what_a_policy_returns_is_checked():
    class Wrong(HostMemory):
        def unpack(self, handle):
            return handle[:1]

    weight = torch.ones(3, requires_grad=True)
    with offload_activations(nn.Module(), ActivationOffload(min_bytes=0, policy=Wrong())):
        loss = weight.exp().sum()
    with pytest.raises(RuntimeError, match=r"Wrong.unpack\(\) returned torch.float32 \(1,\) for .* \(3,\)"):
        loss.backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_bytes": -1}, "min_bytes=-1.*at least 0"),
        ({"policy": OnDisk}, "policy=OnDisk.*needs an object"),
        ({"policy": object()}, "needs an object with pack"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ActivationOffload(**arguments)


def test_a_policy_of_the_users_is_one_by_its_methods():
    assert isinstance(OnDisk(), OffloadPolicy)


def test_an_estimate_calls_no_policy_that_needs_values():
    host, noting = ActivationOffload(min_bytes=0), Noting()
    assert setting_of_estimate(host, torch.device("cpu")) is host, "copies are in the same memory, and are counted"
    for setting, device in ((host, "cuda"), (ActivationOffload(min_bytes=0, policy=noting), "cpu")):
        found = setting_of_estimate(setting, torch.device(device))
        assert found.min_bytes == 0
        with no_values():
            model = Attentions()
            with offload_activations(model, found):
                loss = model(torch.randn(4, 8, 16)).square().mean()
            loss.backward()
        shapes = [each.grad.shape for each in model.parameters() if each.requires_grad]
        assert shapes == [each.shape for each in model.parameters() if each.requires_grad]
    assert noting.packed == []
