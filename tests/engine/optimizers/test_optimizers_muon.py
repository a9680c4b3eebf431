"""Muon for the hidden matrices with AdamW for the rest: one optimizer that does what the two alone would do."""

import copy

import pytest
import torch
from torch import nn

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.optimizers import MuonWithAdamW, create_optimizer


class Decoder(nn.Module):
    """An untied language model: embedding, positions, one block, norm, head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 6)
        self.positions = nn.Parameter(torch.randn(1, 5, 6))
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.grid_norm = nn.LayerNorm((5, 6))
        self.head = nn.Linear(6, 16, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.positions
        return self.head(self.grid_norm(self.norm(hidden + self.down(self.up(hidden).relu()))))


TOKENS = torch.arange(20).reshape(4, 5) % 16


def backward(model):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), (TOKENS.flatten() * 3 + 1) % 16)
    loss.backward()
    return loss


def train(model, *optimizers, steps=10):
    for _ in range(steps):
        backward(model)
        for optimizer in optimizers:
            optimizer.step()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def muon_names(model, optimizer):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group for group in optimizer.param_groups if "ns_steps" in group]
    return {names[id(parameter)] for group in groups for parameter in group["params"]}


def parted(model):
    matrices = [model.up.weight, model.down.weight]
    return matrices, [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]


# -------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("fused", [True, False])
def test_each_half_has_the_numbers_of_torchs_own_optimizer_bit_for_bit(fused):
    ours, theirs = Decoder(), Decoder()
    optimizer = create_optimizer(
        ours, "muon", 0.02, 0.1, momentum=0.9, nesterov=False, ns_steps=4, adam_beta2=0.95, adam_epsilon=1e-7,
        fused=fused,
    )  # fmt: skip
    matrices, others = parted(theirs)
    muon = torch.optim.Muon(
        matrices, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=False, ns_steps=4, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-7, fused=fused)
    train(ours, optimizer, steps=50)
    train(theirs, muon, adamw, steps=50)
    assert torch.equal(weights(ours), weights(theirs))


def test_the_defaults_are_torchs_but_for_the_decay_and_the_matched_rates():
    optimizer = create_optimizer(Decoder(), "muon", 0.02)
    muon, adamw = optimizer.param_groups
    alone = torch.optim.Muon([torch.zeros(2, 2)]).defaults
    assert {key: muon[key] for key in alone} == {
        **alone, "lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"
    }  # fmt: skip
    assert (adamw["betas"], adamw["eps"], adamw["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.0)


def test_keywords_go_to_the_half_that_knows_them():
    optimizer = create_optimizer(
        Decoder(), "muon", 0.02, eps=1e-5, adam_epsilon=1e-6, ns_coefficients=[3.0, -4.0, 2.0], adjust_lr_fn="original"
    )
    muon, adamw = optimizer.param_groups
    assert (muon["eps"], muon["ns_coefficients"], muon["adjust_lr_fn"]) == (1e-5, (3.0, -4.0, 2.0), "original")
    assert adamw["eps"] == 1e-6


# ------------------------------------------------------------------------------------------- who updates what


def test_muon_gets_matrices_but_no_embedding_norm_or_untied_head():
    model = Decoder()
    assert muon_names(model, create_optimizer(model, "muon", 0.02)) == {"up.weight", "down.weight"}


def test_a_rule_decides_what_muon_gets():
    model = Decoder()
    optimizer = create_optimizer(model, "muon", 0.02, muon_rule=lambda name, parameter: name == "head.weight")
    assert muon_names(model, optimizer) == {"head.weight"}


def test_both_halves_know_decay_and_rates_of_their_own():
    model = Decoder()
    optimizer = create_optimizer(
        model, "muon", 0.02, 0.1, layer_rates={"up": 0.01},
        no_decay=lambda name, parameter: name in ("down.weight", "head.weight"),
    )  # fmt: skip
    assert [("ns_steps" in group, group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (True, 0.02, 0.0),
        (True, 0.01, 0.1),
        (False, 0.02, 0.1),
        (False, 0.02, 0.0),
        (False, 0.01, 0.1),
    ]


def test_a_model_of_matrices_alone_needs_no_adamw():
    model = nn.Linear(3, 3, bias=False)
    optimizer = create_optimizer(model, "muon", 0.02)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("model", [nn.LayerNorm(4), nn.Embedding(4, 4), nn.Conv2d(2, 2, 3)])
def test_a_model_without_a_matrix_for_muon_is_refused(model):
    with pytest.raises(
        ConfigurationError, match=r"create_optimizer\(name='muon'\): \w+ has no matrix for Muon .*; choose 'adamw', or"
    ):
        create_optimizer(model, "muon", 0.02)


def test_a_rule_that_picks_no_matrix_is_refused():
    with pytest.raises(ConfigurationError, match=r"muon_rule\): picks 'positions' of shape \(1, 5, 6\).*ndim == 2"):
        create_optimizer(Decoder(), "muon", 0.02, muon_rule=lambda name, parameter: True)
    with pytest.raises(ConfigurationError, match=r"create_optimizer\(muon_rule='head'\): needs a rule"):
        create_optimizer(Decoder(), "muon", 0.02, muon_rule="head")


# --------------------------------------------------------------------------------------- one optimizer to others


def test_torchs_schedulers_and_clipping_reach_both_halves():
    ours, theirs = Decoder(), Decoder()
    optimizer = create_optimizer(ours, "muon", 0.02, fused=False)
    matrices, others = parted(theirs)
    alone = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.02, weight_decay=0.0, fused=False),
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (optimizer, *alone)]
    for _ in range(6):
        for model, optimizers in ((ours, [optimizer]), (theirs, alone)):
            backward(model)
            nn.utils.clip_grad_norm_([p for each in optimizers for g in each.param_groups for p in g["params"]], 0.01)
            # the norm is summed in another order: the same gradients for both, then
            if model is theirs:
                for mine, other in zip(theirs.parameters(), ours.parameters(), strict=True):
                    mine.grad.copy_(other.grad)
            for each in optimizers:
                each.step()
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * 0.7**6)
    assert torch.equal(weights(ours), weights(theirs))


def test_the_state_of_a_copy_and_of_a_loaded_one_is_its_own():
    model = Decoder()
    optimizer = create_optimizer(model, "muon", 0.02)
    train(model, optimizer, steps=2)
    copied_model, copied = copy.deepcopy((model, optimizer))
    copied.load_state_dict(optimizer.state_dict())
    train(copied_model, copied, steps=2)
    assert copied.state[copied_model.up.bias]["step"].item() == 4
    assert set(copied.state) == set(copied_model.parameters())
    # inside the copy, the halves write where the whole reads
    for group in copied.param_groups:
        group["lr"] = 0.0
    before = weights(copied_model)
    train(copied_model, copied, steps=1)
    assert torch.equal(weights(copied_model), before)


def test_a_state_of_other_halves_is_refused():
    state = create_optimizer(Decoder(), "muon", 0.02).state_dict()
    other = create_optimizer(Decoder(), "muon", 0.02, no_decay="auto")
    found, here = r"\['Muon', 'AdamW'\]", r"\['Muon', 'AdamW', 'AdamW'\]"
    with pytest.raises(CheckpointError, match=rf"load_state_dict\(param_groups={found}\): this optimizer has {here}"):
        other.load_state_dict(state)


def test_a_group_added_later_is_adamws_unless_it_says_it_is_muons():
    model, late = Decoder(), nn.Linear(3, 3)
    optimizer = create_optimizer(model, "muon", 0.02)
    optimizer.add_param_group({"params": [late.bias]})
    optimizer.add_param_group({"params": [late.weight], "ns_steps": 5})
    late(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert set(optimizer.state[late.bias]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[late.weight]) == {"momentum_buffer"}
    assert optimizer.param_groups[-1].keys() == optimizer.param_groups[0].keys()
    with pytest.raises(ConfigurationError, match=r"Muon updates only matrices, got a parameter of shape \(2,\)"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "ns_steps": 5})
    assert len(optimizer.param_groups) == 4


def test_it_is_made_from_groups_without_a_model_too():
    matrix, bias = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    optimizer = MuonWithAdamW([{"params": [matrix]}], [{"params": [bias], "lr": 0.5}], lr=0.1, muon={"momentum": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert optimizer.param_groups[0]["momentum"] == 0.5


# ------------------------------------------------------------------------------------------- states that do not fit


def trained_muon(model):
    optimizer = create_optimizer(model, "muon", 0.02)
    train(model, optimizer, steps=2)
    return optimizer


def test_its_own_state_fits_and_changes_nothing():
    first, second = trained_muon(Decoder()), trained_muon(Decoder())
    before = copy.deepcopy(second.state_dict())
    state = first.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    second.check_state_dict(state)
    assert second.state_dict()["param_groups"] == before["param_groups"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["param_groups"].reverse(), r"\(param_groups=\['AdamW', 'Muon'\]\): this optimizer has"),
        (
            lambda state: state["param_groups"][1]["params"].pop(),
            r"\(numbers of parameters=\[2, 7\]\): .* has \[2, 8\]",
        ),
        (
            lambda state: state["state"][1].update(momentum_buffer=torch.zeros(24, 6)),
            r"state\[1\]\['momentum_buffer'\] of shape \(24, 6\)\): this optimizer's parameter has shape \(6, 24\)",
        ),
        (
            lambda state: state["state"][2].update(exp_avg_sq=torch.zeros(3)),
            r"state\[2\]\['exp_avg_sq'\] of shape \(3,\)",
        ),
        (lambda state: state.pop("state"), r"load_state_dict\(state_dict=dict\): needs what state_dict\(\) returned"),
    ],
)
@pytest.mark.parametrize("method", ["check_state_dict", "load_state_dict"])
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(method, change, message):
    model = Decoder()
    optimizer = trained_muon(model)
    state = copy.deepcopy(optimizer.state_dict())
    for kept in state["state"].values():
        for tensor in kept.values():
            tensor.zero_()
    change(state)
    with pytest.raises(CheckpointError, match=message):
        getattr(optimizer, method)(state)
    assert optimizer.state[model.up.weight]["momentum_buffer"].any()


def test_replaced_groups_and_states_are_used():
    model = Decoder()
    optimizer = trained_muon(model)
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    kept = optimizer.state
    optimizer.state = copy.copy(kept)
    optimizer.state.clear()
    before = weights(model)
    train(model, optimizer, steps=1)
    assert torch.equal(weights(model), before)
    assert optimizer.state[model.up.bias]["step"].item() == 1
    assert kept[model.up.bias]["step"].item() == 2


def test_a_state_of_an_older_torch_gets_what_its_groups_lack():
    ours, theirs = Decoder(), Decoder()
    first, second = trained_muon(ours), trained_muon(theirs)
    state = copy.deepcopy(first.state_dict())
    for key in ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "decoupled_weight_decay", "fused"):
        del state["param_groups"][1][key]
    second.load_state_dict(state)
    assert second.param_groups[1]["maximize"] is False
    train(ours, first, steps=1)
    train(theirs, second, steps=1)
    torch.testing.assert_close(weights(theirs), weights(ours))  # it has lost its fused kernel
