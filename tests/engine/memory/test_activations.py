"""Recomputed activations: the same numbers, with fewer tensors kept."""

import copy
import pickle

import pytest
import torch
from torch import nn

from pulsetrain.engine import ActivationCheckpointing
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


def test_every_second_module_beginning_with_the_first():
    recomputed = model()
    assert recompute_activations(recomputed, ActivationCheckpointing("blocks.*", every=2)) == ["blocks.0", "blocks.2"]
    losses, _, _ = train(recomputed)
    assert losses == train(model())[0]
    assert [block.calls for block in recomputed.blocks] == [6, 3, 6]


class Drawing(nn.Module):
    """Draws by two operators, and counts in a buffer: what is left out of a second pass must not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}) for _ in range(2)])
        self.norms = nn.ModuleList([Normed() for _ in range(2)])

    def forward(self, x):
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block["b"](block["a"](x)))
        return x


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        hidden = self.first(x)
        hidden = self.norm(self.dropout((hidden * torch.rand_like(hidden)).sin()))
        heads = hidden.view(len(x), 1, 3, 4)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.second(attended.reshape(len(x), 12).square())


def everything(context, operator, *arguments, **named):
    return operator is not torch.ops.aten.empty_like.default  # which dropout fills with its draws


KEPT = {
    "products": ActivationCheckpointing("norms.*", keep=["matmul"]),
    "attention": ActivationCheckpointing("norms.*", keep=["aten._scaled_dot_product_flash_attention_for_cpu"]),
    "a random operator": ActivationCheckpointing("norms.*", keep=["rand_like", "matmul"]),
    "another library's name": ActivationCheckpointing("norms.*", keep=["torch.ops.aten.sin.default"]),
    "a policy": ActivationCheckpointing("norms.*", policy=everything),
}


def test_what_is_kept_changes_no_bit():
    torch.manual_seed(0)
    start = Drawing()
    losses, gradients, state = train(copy.deepcopy(start))
    for what, setting in KEPT.items():
        recomputed = copy.deepcopy(start)
        recompute_activations(recomputed, setting)
        others, other_gradients, other_state = train(recomputed)
        assert others == losses, what
        for name, gradient in gradients.items():
            assert torch.equal(other_gradients[name], gradient), (what, name)
        for name, value in state.items():
            assert torch.equal(other_state[name], value), (what, name)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of an operator."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is self.operator
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keep", "again"), [((), 2), (("matmul",), 0), (("sdpa",), 2)])
def test_what_is_kept_is_computed_once(keep, again):
    torch.manual_seed(0)
    recomputed = Drawing()
    recompute_activations(recomputed, ActivationCheckpointing("norms.*", keep=keep))
    loss = recomputed(torch.randn(5, 6)).sum()
    with Calls(torch.ops.aten.addmm.default) as counting:
        loss.backward()
    assert counting.count == again  # the last product of each module is not needed


def test_a_policy_is_torchs_and_decides():
    seen = []

    def products(context, operator, *arguments, **named):
        seen.append((context.is_recompute, operator))
        save = torch.utils.checkpoint.CheckpointPolicy
        return save.MUST_SAVE if operator is torch.ops.aten.addmm.default else save.PREFER_RECOMPUTE

    recomputed = Drawing()
    recompute_activations(recomputed, ActivationCheckpointing("norms.*", policy=products))
    loss = recomputed(torch.randn(5, 6)).sum()
    with Calls(torch.ops.aten.addmm.default) as counting:
        loss.backward()
    assert counting.count == 0
    assert (False, torch.ops.aten.addmm.default) in seen


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("softmaxx", r"keep='softmaxx'\): there is no such operator; near it are '_softmax', '_log_softmax'"),
        ("softmax", r"keep='softmax'\): is made of other operators, .*; near it are '_softmax'"),
        ("linear", r"keep='linear'\): is made of other operators, .*; near it are 'matmul'"),
        ("relu_", r"keep='relu_'\): changes its arguments, so it has to be computed again; near it are 'relu'"),
        ("nothing.mm", r"keep='nothing.mm'\): there is no such operator$"),
        ("", r"keep=''\): there is no such operator$"),
    ],
)
def test_an_operator_that_cannot_be_kept_is_refused_with_names_near_it(name, message):
    untouched = model()
    with pytest.raises(ConfigurationError, match=message):
        recompute_activations(untouched, ActivationCheckpointing("blocks.*", keep=["mm", name]))
    assert "forward" not in vars(untouched.blocks[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": ""}, "modules=''.*needs the names of modules"),
        ({"modules": "a", "every": 0}, "every=0.*at least 1"),
        ({"modules": "a", "keep": "mm"}, "keep='mm'.*needs a list of operators"),
        ({"modules": "a", "policy": 3}, "policy=3.*needs a function"),
        ({"modules": "a", "keep": ["mm"], "policy": everything}, "the policy decides what is kept"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        ActivationCheckpointing(**arguments)


def test_a_setting_reads_the_same_in_each_process():
    assert repr(ActivationCheckpointing("a", policy=everything)).endswith(f"policy={__name__}.everything)")
    assert "0x" not in repr(ActivationCheckpointing("a", policy=Calls(None).__torch_dispatch__))


def test_selective_checkpointing_survives_copies():
    original = model()
    recompute_activations(original, ActivationCheckpointing("blocks.*", keep=["matmul"]))
    losses = train(copy.deepcopy(original))[0]
    assert train(pickle.loads(pickle.dumps(original)))[0] == losses == train(model())[0]
