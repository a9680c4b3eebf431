"""Models that are split over the processes: they learn what one process learns, and resume on any number of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain.engine import Accumulate, ConfigurationError, Events, Every, TorchBackend
from pulsetrain.engine.distributed.saved_shards import in_pieces
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.handlers import BestModel, Checkpointer, CrashBundle, Fingerprints, GradientMonitor, NaNGuard
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import double, make_with
from tests.support.runs_of_shards import apart, net, sharded, trained


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"clip_grad_norm": 0.5, "accumulate": 2},
        {"clip_grad_value": 0.01, "optimizer": "adamw"},
        {"accumulate": Accumulate(batches=3), "optimizer": "adamw", "learning_rate": 0.01, "schedule": "cosine"},
    ],
    ids=["plain", "clipped", "clamped", "accumulated"],
)
def test_two_shards_learn_what_one_process_learns(config: dict[str, Any]):
    def run(rank: int, backend: Callable[[], Any]) -> dict[int, dict[str, Any]]:
        found = {}
        for rows in (15, 16, 17, 34):
            loaders = DataLoader(double(rows), 4, shuffle=True), DataLoader(double(9), 2)
            found[rows] = trained(make_with(net(rank), *loaders, backend=backend(), **config))
        return found

    one = run(0, lambda: None)
    for each in in_processes(lambda rank: run(rank, sharded)):
        assert each.error == ""
        for rows, found in each.value.items():
            assert found["sharded"]
            assert apart(found, one[rows]) < 1e-12, rows


def test_two_shards_learn_in_bf16_what_one_process_learns_in_it():
    def run(backend: Any) -> dict[str, Any]:
        rows = TensorDataset(*(each.float() for each in double(16).tensors))
        made = make_with(net().float(), DataLoader(rows, 4), DataLoader(rows, 4), backend=backend, precision="bf16")
        types = set()
        made.model[0].register_forward_hook(lambda module, arguments, output: types.add(output.dtype))
        return {**trained(made), "types": types}

    one = run(None)
    for each in in_processes(lambda rank: run(sharded())):
        assert each.error == ""
        assert each.value["sharded"]
        assert each.value["types"] == {torch.bfloat16}
        assert 0 < apart(each.value, one) < 0.02  # bf16 has 8 bits, and half the rows are added at a time


def test_an_optimizer_that_was_made_over_the_plain_parameters_updates_the_shards():
    def run(rank: int, backend: Any) -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.AdamW(
            [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.05}], lr=0.01
        )
        loaders = DataLoader(double(17), 4), DataLoader(double(9), 2)
        return trained(make_with(model, *loaders, backend=backend, optimizer=optimizer))

    one = run(0, None)
    for each in in_processes(lambda rank: run(rank, sharded())):
        assert each.error == ""
        assert apart(each.value, one) < 1e-12


def test_an_optimizer_that_has_made_updates_is_refused():
    def run(rank: int) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 4).double()).sum().backward()
        optimizer.step()
        make_with(model, DataLoader(double(17), 4), None, backend=sharded(), optimizer=optimizer)

    for each in in_processes(run):
        assert "has made updates" in each.error.splitlines()[-1]


def test_a_model_that_the_user_has_sharded_is_taken_as_it_is():
    def run(rank: int) -> dict[str, Any]:
        model = net()
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[3], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return trained(make_with(model, DataLoader(double(17), 4), DataLoader(double(9), 2)))

    one = trained(make_with(net(), DataLoader(double(17), 4), DataLoader(double(9), 2)))
    for each in in_processes(run, own_group=True):
        assert each.error == ""
        assert each.value["sharded"]
        assert apart(each.value, one) < 1e-12


def test_a_guard_skips_an_update_on_all_shards():
    def run(rank: int, backend: Any) -> dict[str, Any]:
        rows = double(16)
        rows.tensors[0][5] = float("nan")
        made = make_with(
            net(), DataLoader(rows, 4), DataLoader(double(9), 2), NaNGuard(), backend=backend, optimizer="adamw"
        )
        return trained(made)

    one = run(0, None)
    for each in in_processes(lambda rank: run(rank, sharded())):
        assert each.error == ""
        assert apart(each.value, one) < 1e-12


def test_fingerprints_and_a_model_state_are_of_a_ranks_shard():
    def run(rank: int) -> Any:
        made = make_with(net(), DataLoader(double(16), 4), None, Fingerprints(Every(iterations=2)), backend=sharded())
        made.train()
        before = [each.to_local().tolist() for each in made.model.parameters()]
        state = made.model_state
        made.train_epoch(model_state=state)
        return before, in_pieces({"a": next(made.model.parameters())})["a"].offset

    first, second = in_processes(run)
    assert (first.error, second.error) == ("", "")
    assert first.value[0] != second.value[0]
    assert (first.value[1], second.value[1]) == ((0, 0), (3, 0))


def test_handlers_that_do_not_know_shards_are_refused_before_training(tmp_path: Path):
    handlers: dict[str, Callable[[], Any]] = {
        "BestModel": lambda: BestModel("val/loss"),
        "CrashBundle": lambda: CrashBundle(tmp_path),
        "GradientMonitor": lambda: GradientMonitor(histograms=True),
        "Checkpointer(form='torch')": lambda: Checkpointer(tmp_path, form="torch"),
    }

    def run(rank: int) -> list[str]:
        said = []
        for handler in handlers.values():
            with pytest.raises(ConfigurationError) as refused:
                make_with(net(), DataLoader(double(16), 4), DataLoader(double(9), 2), handler(), backend=sharded())
            said.append(str(refused.value))
        return said

    for each in in_processes(run):
        assert each.error == ""
        for name, text in zip(handlers, each.value, strict=True):
            assert name.split("(")[0] in text, (name, text)


def test_a_topology_that_does_not_fit_is_refused():
    with pytest.raises(ConfigurationError, match="does not fit 1 process"):
        make_with(net(), DataLoader(double(16), 4), None, backend=sharded())
    with pytest.raises(ConfigurationError, match="functional=True"):
        make_with(
            net(),
            DataLoader(double(16), 4),
            None,
            backend=TorchBackend("cpu", topology=Topology(shard=2), functional=True),
        )


@pytest.mark.slow
@pytest.mark.parametrize("topology", [{"shard": 2}, {"shard": 4}])
def test_copies_of_shards_on_four_processes(topology: dict[str, int]):
    def run(rank: int, backend: Any) -> dict[str, Any]:
        loaders = DataLoader(double(34), 8, shuffle=True), DataLoader(double(9), 2)
        return trained(make_with(net(rank), *loaders, backend=backend, clip_grad_norm=0.5))

    one = run(0, None)
    for each in in_processes(lambda rank: run(rank, sharded(**topology)), 4):
        assert each.error == ""
        assert apart(each.value, one) < 1e-12


def test_a_sharded_model_computes_in_the_type_that_is_asked_for():
    def run(rank: int) -> Any:
        seen: list[torch.dtype] = []
        model = net().float()
        model[3].register_forward_pre_hook(lambda module, inputs: seen.append(module.weight.dtype))
        made = make_with(model, DataLoader(pairs(16), 4), None, backend=sharded(param_dtype="bfloat16", offload=True))
        made.train()
        return set(seen), {each.dtype for each in made.model.parameters()}

    for each in in_processes(run):
        assert each.error == ""
        assert each.value == ({torch.bfloat16}, {torch.float32})


class Tied(nn.Module):
    """Embeddings in the model itself, blocks in a list, and a head that has the weight of the embeddings."""

    def __init__(self, across: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 6, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        if across:
            self.blocks[1].weight = self.blocks[0].weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return (hidden @ self.head.weight).sum(1, keepdim=True)


@pytest.mark.parametrize("across", [False, True])
def test_weights_of_the_model_itself_and_shared_ones_are_trained_saved_and_validated(across: bool, tmp_path: Path):
    def run(rank: int, backend: Any) -> dict[str, Any]:
        folder = tmp_path / ("one" if backend is None else "two")
        made = make_with(
            Tied(across).double(), DataLoader(double(17), 4), DataLoader(double(9), 2),
            Checkpointer(folder, Every(iterations=2)), backend=backend, validate_every=Every(iterations=2),
            learning_rate=0.003,
        )  # fmt: skip
        found = trained(made)
        assert all(hasattr(each, "to_local") == (backend is not None) for each in made.model.parameters())
        return found

    one = run(0, None)
    for each in in_processes(lambda rank: run(rank, sharded())):
        assert each.error == ""
        assert apart(each.value, one) < 1e-12


def test_what_is_not_known_to_work_on_shards_is_refused():
    refusals: list[tuple[str, Any, str]] = [
        ("precision", "fp16", "precision='fp16'"),
        ("compile", True, "compile=True"),
        ("optimizer", "muon", "is not known to work with a sharded model"),
        ("optimizer_offload", "host", "optimizer_offload=OptimizerOffload(to='host'"),
        ("optimizer", torch.optim.SGD(net().parameters(), 0.1), "a parameter that is not the model's"),
    ]

    def run(rank: int) -> list[str]:
        found = []
        for name, value, _ in refusals:
            with pytest.raises(ConfigurationError) as refused:
                make_with(net().float(), DataLoader(pairs(16), 4), None, backend=sharded(), **{name: value})
            found.append(str(refused.value))
        return found

    for each in in_processes(run):
        assert each.error == ""
        for (_, _, said), text in zip(refusals, each.value, strict=True):
            assert said in text


def test_the_norms_of_a_sharded_models_gradients_are_those_of_one_process():
    def norms(norm_type: float, backend: Any) -> dict[str, list[float]]:
        monitor = GradientMonitor(Every(updates=2), norm_type=norm_type, updates=True)
        made = make_with(net(), DataLoader(double(17), 4), None, monitor, backend=backend)
        found: dict[str, list[float]] = {}

        @made.on(Events.METRICS_LOGGED)
        def note(engine: Any, event: Any) -> None:
            for name, value in event.payload.metrics.items():
                if name.startswith(("grad_norm/", "update_ratio/")):
                    found.setdefault(name, []).append(value)

        made.train()
        return found

    kinds = (1, 2, math.inf)
    first, second = in_processes(lambda rank: [norms(kind, sharded()) for kind in kinds])
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    for kind, found in zip(kinds, first.value, strict=True):
        one = norms(kind, None)
        assert len(one) == 8
        for name, values in one.items():
            assert found[name] == pytest.approx(values, rel=1e-12), (kind, name)


def test_a_module_with_parameters_of_several_types_is_refused_before_training():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight * self.scale.float()

    def run(rank: int) -> str:
        model = nn.Sequential(Mixed(), nn.Linear(4, 1))
        with pytest.raises(ConfigurationError) as refused:
            make_with(model, DataLoader(pairs(8), 4), None, backend=sharded())
        return str(refused.value)

    for each in in_processes(run):
        assert each.error == "", each.error
        assert "Topology(shard): Mixed has parameters of several types, torch.float32 and torch.bfloat16" in each.value


class Scaled(nn.Module):
    """Has a parameter in float32 beside modules in float64."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.ones(4)), nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale.double()
        for each in self.inside:
            x = each(x).tanh()
        return x


def of_two_types(place: str) -> nn.Module:
    torch.manual_seed(0)
    if place == "around blocks":
        return nn.ModuleDict({"scaled": Scaled(*[nn.Linear(4, 4).double() for _ in range(2)])})
    blocks = [Scaled(nn.Linear(4, 4).double()) for _ in range(2)]
    return nn.ModuleDict({"blocks": nn.Sequential(*[nn.Sequential(each, nn.Linear(4, 4).double()) for each in blocks])})


class Headed(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.body, self.head = of_two_types(place), nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        for each in self.body.values():
            x = each(x)
        return self.head(x)


@pytest.mark.parametrize("place", ["in blocks", "around blocks"])
def test_a_module_with_a_parameter_of_another_type_than_what_is_in_it_is_sharded(place: str):
    def run(rank: int, backend: Any) -> dict[str, Any]:
        return trained(make_with(Headed(place), DataLoader(double(16), 4), DataLoader(double(9), 2), backend=backend))

    one = run(0, None)
    for each in in_processes(lambda rank: run(rank, sharded())):
        assert each.error == ""
        assert each.value["sharded"]
        assert apart(each.value, one) < 1e-6  # of float32
