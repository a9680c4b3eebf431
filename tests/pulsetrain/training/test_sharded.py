"""Models that are split over the processes: they learn what one process learns, and resume on any number of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from pulsetrain import SignalWatch, Trainer
from pulsetrain.engine import Accumulate, ConfigurationError, Events, Every, TorchBackend
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.shards import gathered
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.recording.diff.ranks import diff_ranks
from pulsetrain.handlers import EMA, SWA, BestModel, Checkpointer, CrashBundle, EventRecorder, Fingerprints, NaNGuard
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import double, make_with


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0), nn.Tanh(), nn.Linear(5, 1)).double()


def sharded(**topology: Any) -> TorchBackend:
    made: TorchBackend = TorchBackend("cpu", topology=Topology(**{"shard": 2, **topology}))
    return made


def trained(made: Trainer, resume: str | None = None) -> dict[str, Any]:
    history = made.train(resume=resume)
    weights = {name: _whole(each).tolist() for name, each in made.model.state_dict().items()}
    return {"weights": weights, "val": history.get("val/loss"), "sharded": is_sharded(made.model)}


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of the weights and of the validations."""
    found = [
        (torch.tensor(each, dtype=torch.float64) - torch.tensor(b["weights"][name], dtype=torch.float64)).abs().max()
        for name, each in a["weights"].items()
    ]
    found += [(torch.tensor(a["val"]).double() - torch.tensor(b["val"]).double()).abs().max()]
    return float(max(found))


@pytest.mark.parametrize("rows", [15, 16, 17, 34])
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
def test_two_shards_learn_what_one_process_learns(rows: int, config: dict[str, Any]):
    def run(rank: int, backend: Any) -> dict[str, Any]:
        loaders = DataLoader(double(rows), 4, shuffle=True), DataLoader(double(9), 2)
        return trained(make_with(net(rank), *loaders, backend=backend, **config))

    one = run(0, None)
    for each in in_processes(lambda rank: run(rank, sharded())):
        assert each.error == ""
        assert each.value["sharded"]
        assert apart(each.value, one) < 1e-12


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


KINDS: dict[str, tuple[int, bool]] = {"one": (1, False), "ddp": (2, False), "fsdp": (2, True)}


def saving(run: Path, rank: int, kind: str, **config: Any) -> Trainer:
    settings = {"max_epochs": 4, "optimizer": "adamw", "learning_rate": 0.01, "clip_grad_norm": 0.5, "accumulate": 2}
    handlers = [Checkpointer(run, every=Every(iterations=3), keep_last=20, metric="val/loss"), EventRecorder(run)]
    return make_with(
        net(rank), DataLoader(double(17), 4, shuffle=True), DataLoader(double(9), 2), *handlers,
        backend=sharded() if KINDS[kind][1] else None, **{**settings, **config},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "then"), [("fsdp", "one"), ("fsdp", "ddp"), ("ddp", "fsdp"), ("one", "fsdp"), ("fsdp", "fsdp")]
)
def test_a_checkpoint_of_any_topology_resumes_on_any_other(first: str, then: str, tmp_path: Path):
    def cut(rank: int) -> None:
        made = saving(tmp_path / "run", rank, first)
        made.on(Events.ITERATION_COMPLETED(once=11))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    in_processes(cut, KINDS[first][0])
    assert [path.name[:9] for path in CheckpointManager(tmp_path / "run" / "checkpoints").valid()][-1] == "000000009"
    ended = in_processes(lambda rank: trained(saving(tmp_path / "run", rank, then), resume="latest"), KINDS[then][0])
    whole = in_processes(lambda rank: trained(saving(tmp_path / f"{then}-{rank}", 0, then)), KINDS[then][0])
    for each in (*ended, *whole):
        assert each.error == ""
    found, expected = ended[0].value, whole[0].value
    if first == then:
        assert found["weights"] == expected["weights"]  # bit for bit
        assert not diff_ranks(tmp_path / "run")
    else:
        found["val"] = expected["val"] = found["val"][-1:]
        assert apart(found, expected) < 1e-12


def test_a_checkpoint_of_shards_has_whole_tensors_and_the_ranking_of_all(tmp_path: Path):
    for each in in_processes(lambda rank: trained(saving(tmp_path / "run", rank, "fsdp"))):
        assert each.error == ""
    one = saving(tmp_path / "one", 0, "one")
    trained(one)
    manager, other = (CheckpointManager(tmp_path / name / "checkpoints") for name in ("run", "one"))
    assert [path.name for path in manager.valid()] == [path.name for path in other.valid()]
    assert manager.get_best().name == other.get_best().name  # type: ignore[union-attr]
    saved, expected = load_checkpoint(manager.valid()[-1]), load_checkpoint(other.valid()[-1])
    for name, each in expected["model"].items():
        assert type(saved["model"][name]) is Tensor
        torch.testing.assert_close(saved["model"][name], each, rtol=0, atol=1e-12)
    for index, values in expected["optimizer"]["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(saved["optimizer"]["state"][index][name], value, rtol=0, atol=1e-12)


def test_a_save_that_fails_on_the_main_process_fails_on_all(tmp_path: Path):
    def run(rank: int) -> Any:
        made = saving(tmp_path / "run", rank, "fsdp")
        saver = next(each for each in made.handlers if isinstance(each, Checkpointer))
        if rank == 0:
            write, failed = saver.manager.save, []

            def fail_once(*arguments: Any, **options: Any) -> Any:
                if options.get("step") == 6 and not failed:
                    failed.append(1)
                    raise OSError(28, "No space left on device")
                return write(*arguments, **options)

            saver.manager.save = fail_once  # type: ignore[method-assign]
        noted: list[tuple[int, int, bool]] = []
        made.on(Events.ITERATION_COMPLETED)(
            lambda: noted.append((made.state.iteration, saver.saved_at, saver.failure is not None))
        )
        trained(made)
        return [each for each in noted if each[0] in (7, 10)]

    ended = in_processes(run)
    assert [each.error for each in ended] == ["", ""]
    assert ended[0].value == [(7, 3, True), (10, 9, False)]
    assert [each[:2] for each in ended[1].value] == [(7, 3), (10, 9)]


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
        return before, gathered({"a": next(made.model.parameters())})["a"] is None

    first, second = in_processes(run)
    assert (first.error, second.error) == ("", "")
    assert first.value[0] != second.value[0]
    assert (first.value[1], second.value[1]) == (False, True)


@pytest.mark.parametrize(
    "handler",
    [
        lambda folder: EMA(), lambda folder: SWA(after_epoch=1), lambda folder: BestModel("val/loss"), CrashBundle,
        lambda folder: Checkpointer(folder, every="auto"), lambda folder: Checkpointer(folder, Every(seconds=5)),
        lambda folder: Checkpointer(folder, background=True),
    ],
    ids=["EMA", "SWA", "BestModel", "CrashBundle", "auto", "seconds", "background"],
)  # fmt: skip
def test_handlers_that_do_not_know_shards_are_refused_before_training(handler: Any, tmp_path: Path):
    def run(rank: int) -> None:
        make_with(net(), DataLoader(double(16), 4), DataLoader(double(9), 2), handler(tmp_path), backend=sharded())

    for each in in_processes(run):
        assert "ConfigurationError" in each.error.splitlines()[-1]


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
    for each in in_processes(lambda rank: run(rank, sharded(**topology)), 4, limit=120):
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


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_process_ends_all_with_a_checkpoint(who: int, tmp_path: Path):
    def run(rank: int) -> Any:
        made = saving(tmp_path / "run", rank, "fsdp", max_epochs=400)
        if rank == who:
            made.on(Events.ITERATION_COMPLETED(once=13))(lambda: os.kill(os.getpid(), signal.SIGTERM))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with SignalWatch(made):
            made.train()
        return made.state.iteration

    first, second = in_processes(run, limit=40)
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value
    newest = CheckpointManager(tmp_path / "run" / "checkpoints").valid()[-1]
    assert int(newest.name[:9]) == first.value


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp16"}, "precision='fp16'"),
        ({"compile": True}, "compile=True"),
        ({"optimizer": "muon"}, "is not known to work with a sharded model"),
        ({"optimizer": lambda: torch.optim.SGD(net().parameters(), 0.1)}, "a parameter that is not the model's"),
    ],
    ids=["fp16", "compile", "muon", "others"],
)
def test_what_is_not_known_to_work_on_shards_is_refused(options: dict[str, Any], said: str):
    def run(rank: int) -> str:
        given = {name: value() if callable(value) else value for name, value in options.items()}
        with pytest.raises(ConfigurationError) as refused:
            make_with(net().float(), DataLoader(pairs(16), 4), None, backend=sharded(), **given)
        return str(refused.value)

    for each in in_processes(run):
        assert each.error == ""
        assert said in each.value


def test_a_save_that_raises_on_the_main_process_ends_all(tmp_path: Path):
    def run(rank: int) -> None:
        made = saving(tmp_path / "run", rank, "fsdp")
        saver = next(each for each in made.handlers if isinstance(each, Checkpointer))
        if rank == 0:

            def refuse(*arguments: Any, **options: Any) -> Any:
                raise ValueError("cannot be written")

            saver.manager.save = refuse  # type: ignore[method-assign]
        made.train()

    first, second = in_processes(run, limit=40)
    assert "ValueError: cannot be written" in first.error
    assert "cannot be written" in second.error
