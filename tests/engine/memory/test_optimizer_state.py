"""Optimizers whose state is elsewhere: the same weights, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pulsetrain.engine import OptimizerOffload
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory import optimizer_state
from pulsetrain.engine.memory.optimizer_state import ELEMENTWISE, offload_optimizer
from pulsetrain.engine.optimizers import NamedOptimizers, create_optimizer
from pulsetrain.engine.step.precision import Precision
from tests.support.offloaded import HOST, learn, network, same_state, to_disk

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "fused momentum": {"fused": True, "momentum": 0.9},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "centered": {"centered": True, "momentum": 0.9},
    "maximize": {"maximize": True},
}


def kinds() -> Iterator[Any]:
    for kind in ELEMENTWISE:
        for name, options in OPTIONS.items():
            try:
                kind([torch.zeros(1)], lr=0.1, **options)
            except (TypeError, RuntimeError):  # it has no such option
                continue
            if kind is not torch.optim.SGD or "momentum" in options:
                yield pytest.param(kind, options, id=f"{kind.__name__} {name}")


@pytest.mark.parametrize("to", ["disk", "host", "device"])
@pytest.mark.parametrize(("kind", "options"), list(kinds()))
def test_weights_and_state_are_the_same_bit_for_bit(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any], to: str, tmp_path: Path, monkeypatch
):
    if to == "device":  # as if the parameters were on one: the state is copied there and back
        monkeypatch.setattr(optimizer_state, "_moves", lambda slot, parameter: True)
    plain, offloaded = network(), network()
    one, other = (kind(each.parameters(), lr=0.01, **options) for each in (plain, offloaded))
    offload_optimizer(other, to_disk(tmp_path) if to == "disk" else HOST)
    assert all(map(torch.equal, learn(offloaded, other), learn(plain, one)))
    assert same_state(one, other)
    for part in (one, other):
        part.param_groups[0]["lr"] = 0.02
    assert all(map(torch.equal, learn(offloaded, other, seed=2), learn(plain, one, seed=2)))
    for parameter, values in other.state.items():  # all of it is where it is kept
        for name, value in values.items():
            assert value.dim() == 0 or value is other._slots[parameter][name]


@pytest.mark.parametrize("part_bytes", [1000, 1 << 20], ids=["pieces", "parts"])
def test_a_step_works_on_copies_where_the_parameters_are(part_bytes: int, monkeypatch):
    seen = []
    own_step = optimizer_state._own_step

    def look(part: torch.optim.Optimizer) -> None:
        kept = {each.untyped_storage().data_ptr() for slots in optimizer._slots.values() for each in slots.values()}
        for parameter in part.param_groups[0]["params"]:
            for value in part.state.get(parameter, {}).values():
                seen.append(value.untyped_storage().data_ptr() in kept)
        own_step(part)

    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    offload_optimizer(optimizer, OptimizerOffload(to="host", part_bytes=part_bytes))
    monkeypatch.setattr(optimizer_state, "_own_step", look)
    monkeypatch.setattr(optimizer_state, "_moves", lambda slot, parameter: True)
    learn(model, optimizer, steps=2)
    pieces = 3 + 1 + 1 + 1 if part_bytes == 1000 else 4  # of 1,024 elements
    assert len(seen) >= 3 * pieces
    assert not any(seen)


def test_writes_to_a_weight_are_counted(tmp_path: Path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    offload_optimizer(optimizer, to_disk(tmp_path))
    versions = [[each._version for each in model.parameters()]]
    for _ in range(2):
        learn(model, optimizer, steps=1)
        versions.append([each._version for each in model.parameters()])
    assert all(first < second < third for first, second, third in zip(*versions, strict=True))


def test_it_stays_the_optimizer_that_it_was(tmp_path: Path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    groups = optimizer.param_groups
    offload_optimizer(optimizer, to_disk(tmp_path))
    learn(model, optimizer)
    assert type(optimizer).__name__ == "AdamW"
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups is groups
    assert len(groups[0]["params"]) == 4


def test_states_pass_between_optimizers_with_and_without(tmp_path: Path):
    def adamw(model: nn.Module, setting: OptimizerOffload | None) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if setting is not None:
            offload_optimizer(made, setting)
        return made

    model = network()
    whole = adamw(model, None)
    learn(model, whole)
    start = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(whole.state_dict())
    wanted = learn(model, whole, seed=2)
    for before, after in ((HOST, to_disk(tmp_path)), (None, to_disk(tmp_path)), (to_disk(tmp_path), None)):
        first = network()
        saving = adamw(first, before)
        learn(first, saving)
        loaded = network()
        optimizer = adamw(loaded, after)
        learn(loaded, optimizer, steps=1, seed=9)  # whose state is replaced
        loaded.load_state_dict(start)
        optimizer.load_state_dict(saving.state_dict())
        assert same_state(optimizer, saving)
        assert all(
            torch.equal(each, state["state"][0][name]) for name, each in optimizer.state_dict()["state"][0].items()
        )
        assert all(map(torch.equal, learn(loaded, optimizer, seed=2), wanted))


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    offload_optimizer(optimizer, to_disk(tmp_path))
    learn(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.AdamW([torch.zeros(2)])
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(other.state_dict())
    assert same_state(optimizer, _Shown(before))


class _Shown:
    def __init__(self, state: Any) -> None:
        self.state_dict = lambda: state


def test_a_state_that_it_has_already_is_moved(tmp_path: Path):
    plain, offloaded = network(), network()
    one, other = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, offloaded))
    learn(plain, one)
    learn(offloaded, other)
    offload_optimizer(other, to_disk(tmp_path))
    assert same_state(one, other)
    assert all(map(torch.equal, learn(offloaded, other, seed=2), learn(plain, one, seed=2)))


def test_a_copy_is_in_memory_and_learns_alike(tmp_path: Path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    offload_optimizer(optimizer, to_disk(tmp_path))
    learn(model, optimizer)
    twin, of_twin = copy.deepcopy((model, optimizer))
    pickled, of_pickled = pickle.loads(pickle.dumps((model, optimizer)))
    assert type(of_twin) is type(of_pickled) is torch.optim.AdamW
    wanted = learn(model, optimizer, seed=2)
    assert all(map(torch.equal, learn(twin, of_twin, seed=2), wanted))
    assert all(map(torch.equal, learn(pickled, of_pickled, seed=2), wanted))


def test_hooks_run_once_for_all_parts(tmp_path: Path):
    calls = []
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    offload_optimizer(optimizer, to_disk(tmp_path))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    of_all = register_optimizer_step_post_hook(lambda *_: calls.append("of all"))
    try:
        learn(model, optimizer, steps=2)
    finally:
        of_all.remove()
    assert calls == ["before", "after", "of all"] * 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_torchs_schedulers_work_that_were_made_before_and_that_are_made_after(when: str, tmp_path: Path):
    def trained(setting: OptimizerOffload | None) -> list[Tensor]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if when == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if setting is not None:
            offload_optimizer(optimizer, setting)
        if when == "after":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            learn(model, optimizer, steps=1, seed=step)
            scheduler.step()  # it would warn, which is an error here
        if setting is not None:
            weight = model[0].weight
            assert optimizer.state[weight]["exp_avg"] is optimizer._slots[weight]["exp_avg"]
        return learn(model, optimizer, steps=1)

    assert all(map(torch.equal, trained(to_disk(tmp_path)), trained(None)))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_is_skipped_on_the_device(kind: type, fused: bool, tmp_path: Path):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def trained(setting: OptimizerOffload | None) -> tuple[list[Tensor], torch.optim.Optimizer]:
        model = network()
        optimizer = kind(model.parameters(), lr=0.01, fused=fused, **options)
        if setting is not None:
            offload_optimizer(optimizer, setting)
        precision = Precision("fp32", "cpu")
        torch.manual_seed(1)
        for step in range(5):
            model(torch.randn(8, 33)).square().mean().backward()
            precision.step(optimizer, torch.tensor(step in (0, 3)))
            optimizer.zero_grad()
        return list(model.parameters()), optimizer

    (wanted, one), (found, other) = trained(None), trained(to_disk(tmp_path))
    assert all(map(torch.equal, found, wanted))
    assert same_state(one, other)


def test_a_group_that_is_added_is_elsewhere_too(tmp_path: Path):
    def trained(setting: OptimizerOffload | None) -> tuple[list[Tensor], torch.optim.Optimizer]:
        model = network()
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)
        if setting is not None:
            offload_optimizer(optimizer, setting)
        learn(model, optimizer, steps=2)
        model.zero_grad()
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        assert setting is None or list(optimizer._slots[model[2].weight]) == ["exp_avg", "exp_avg_sq"]
        return learn(model, optimizer), optimizer

    (wanted, one), (found, other) = trained(None), trained(to_disk(tmp_path))
    assert all(map(torch.equal, found, wanted))
    assert same_state(one, other)
    weight = other.param_groups[1]["params"][0]
    assert other.state[weight]["exp_avg"] is other._slots[weight]["exp_avg"]


def test_a_parameter_without_gradients_has_no_state(tmp_path: Path):
    def trained(setting: OptimizerOffload | None) -> tuple[list[Tensor], torch.optim.Optimizer]:
        model = network()
        optimizer = create_optimizer(model, "sgd", 0.01)
        if setting is not None:
            offload_optimizer(optimizer, setting)
        model[0].weight.requires_grad_(False)
        learn(model, optimizer, steps=2)
        assert len(optimizer.state) == 3
        model[0].weight.requires_grad_(True)
        return learn(model, optimizer), optimizer

    (wanted, one), (found, other) = trained(None), trained(to_disk(tmp_path))
    assert all(map(torch.equal, found, wanted))
    assert same_state(one, other)


def test_several_optimizers_share_one_memory(tmp_path: Path):
    def trained(setting: OptimizerOffload | None) -> tuple[list[Tensor], torch.optim.Optimizer]:
        model = network()
        optimizer = NamedOptimizers(
            {
                "first": torch.optim.AdamW(model[0].parameters(), lr=0.01),
                "last": torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
            }
        )
        if setting is not None:
            offload_optimizer(optimizer, setting)
        learn(model, optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return learn(model, optimizer, seed=2), optimizer

    (wanted, one), (found, other) = trained(None), trained(to_disk(tmp_path))
    assert all(map(torch.equal, found, wanted))
    assert same_state(one, other)


def test_scalars_and_empty_parameters_keep_their_state_in_memory(tmp_path: Path):
    def trained(setting: OptimizerOffload | None) -> tuple[list[Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in ((), (0, 3), (2, 3))]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        if setting is not None:
            offload_optimizer(optimizer, setting)
        for _ in range(3):
            sum(each.square().sum() for each in parameters).backward()
            optimizer.step()
        return parameters, optimizer

    (wanted, one), (found, other) = trained(None), trained(to_disk(tmp_path))
    assert all(map(torch.equal, found, wanted))
    assert same_state(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("to", ["disk", "host"])
def test_state_of_parameters_on_an_accelerator_is_on_the_host(to: str, tmp_path: Path):
    device = torch.device("cuda")
    plain, offloaded = network().to(device), network().to(device)
    one, other = (create_optimizer(each, "adamw", 0.01) for each in (plain, offloaded))
    offload_optimizer(other, to_disk(tmp_path) if to == "disk" else HOST)
    for step in range(3):
        for model, optimizer in ((plain, one), (offloaded, other)):
            model(torch.full((8, 33), step + 1.0, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, offloaded.parameters(), plain.parameters()))
    assert {each["exp_avg"].device.type for each in other.state.values()} == {"cpu"}


def test_a_closure_is_evaluated_once(tmp_path: Path):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    offload_optimizer(optimizer, to_disk(tmp_path))
    calls = []

    def closure() -> float:
        loss = model(torch.ones(2, 33)).sum()
        loss.backward()
        calls.append(loss.item())
        return calls[-1]

    assert optimizer.step(closure) == calls[0]
    assert len(calls) == 1
    assert len(optimizer.state) == 4


# ------------------------------------------------------------------------------------------------------------- refused


def replaced_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step = lambda: None  # type: ignore[method-assign]
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "muon": (lambda model: create_optimizer(model, "muon", 0.1), "MuonWithAdamW cannot update one parameter after"),
    "lion": (lambda model: create_optimizer(model, "lion", 0.1), "Lion cannot update one parameter after the other"),
    "schedule-free": (
        lambda model: create_optimizer(model, "schedule_free_adamw", 0.1),
        "AdamWScheduleFree cannot update one parameter after the other; choose one of Adadelta, .*, SGD",
    ),
    "no state": (lambda model: torch.optim.SGD(model.parameters()), "keeps no state for its parameters; leave it out"),
    "differentiable": (
        lambda model: torch.optim.AdamW(model.parameters(), differentiable=True),
        "an optimizer with differentiable=True needs its state in memory",
    ),
    "replaced": (replaced_step, r"the step\(\) of this AdamW has been replaced, which would be lost"),
    "one of several": (
        lambda model: NamedOptimizers({"a": create_optimizer(model, "lion", 0.1)}),
        "Lion cannot update",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_optimizer_whose_state_cannot_be_elsewhere_is_refused(case: str):
    make, message = REFUSED[case]
    optimizer = make(network())
    with pytest.raises(ConfigurationError, match=rf"optimizer_offload=OptimizerOffload\(to='host'.*{message}"):
        offload_optimizer(optimizer, HOST)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "dsk"}, "to='dsk'.*choose one of disk, host; did you mean 'disk'"),
        ({"part_bytes": 0}, "part_bytes=0.*at least 1"),
        ({"to": "host", "folder": "/tmp"}, "folder='/tmp'.*has no use with to='host'"),
        ({"folder": 3}, "folder=3.*needs a path"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        OptimizerOffload(**arguments)


def test_torchs_step_can_be_called_without_its_hooks():
    for kind in ELEMENTWISE:
        kind([torch.zeros(1)], lr=0.1)
        assert kind.step.hooked
        assert not hasattr(kind.step.__wrapped__, "hooked")
