"""Layers that several processes compute together: they learn what one process learns, and resume in any layout."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, Topology, TorchBackend
from pulsetrain.engine.checkpoint import CheckpointManager, load_checkpoint
from pulsetrain.engine.distributed.saved_shards import sharded_like
from pulsetrain.engine.recording.diff.ranks import diff_ranks
from pulsetrain.engine.strategies import PretrainStrategy
from pulsetrain.handlers import EMA, SWA, EventRecorder, Fingerprints, GradientMonitor
from tests.support.ranks import in_processes
from tests.support.runs_of_shards import apart, trained, whole_of
from tests.support.tensor_parallel import TOPOLOGIES, Attending, Stack, attending, sequences

FAST = ("tensor", "sequence")
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("shards of tensor", "copies of tensor", "tensor 4")]


@pytest.mark.parametrize("layout", [*FAST, *SLOW])
def test_they_learn_what_one_process_learns(layout: str):
    """Clipped, accumulated, with a decayed rate, and with a last batch that is smaller."""
    configs: list[dict[str, Any]] = [
        {"clip_grad_norm": None},
        {"accumulate": 2},
        {"clip_grad_value": 0.01, "schedule": "cosine"},
    ]

    def run(rank: int, layout: str) -> list[Any]:
        found = []
        for config in configs:
            for rows in (17, 16):
                norms: list[float] = []
                made = attending(layout, rank, rows=rows, **config)
                made.on(Events.GRADIENTS_READY)(
                    lambda engine, event, norms=norms: norms.append(float(event.payload.grad_norm))
                )
                found.append((trained(made), norms, made.state.samples))
        return found

    expected = run(0, "one")
    for each in in_processes(lambda rank: run(rank, layout), TOPOLOGIES[layout].processes):
        assert each.error == "", each.error
        for (found, norms, samples), (alone, its_norms, its_samples) in zip(each.value, expected, strict=True):
            assert found["sharded"]
            assert apart(found, alone) < 1e-12
            assert norms == pytest.approx(its_norms, abs=1e-12)
            assert samples == its_samples


@pytest.mark.parametrize("layout", ["sequence", pytest.param("shards", marks=pytest.mark.slow)])
def test_activations_that_are_computed_again_change_nothing(layout: str):
    def run(rank: int, layout: str) -> Any:
        return trained(attending(layout, rank, activation_checkpointing="up"))

    expected = run(0, "one")
    for each in in_processes(lambda rank: run(rank, layout)):
        assert each.error == "", each.error
        assert apart(each.value, expected) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*FAST, "shards of tensor"])
def test_fifty_steps_in_float32(layout: str):
    def run(rank: int, layout: str) -> Any:
        return trained(attending(layout, rank, dtype=torch.float32, rows=40, max_epochs=5))

    expected = run(0, "one")
    for each in in_processes(lambda rank: run(rank, layout), TOPOLOGIES[layout].processes):
        assert each.error == "", each.error
        assert apart(each.value, expected) < 1e-5


def cut_after(trainer: Any, iteration: int) -> None:
    trainer.on(Events.ITERATION_COMPLETED(once=iteration))(lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer.train()


@pytest.mark.parametrize("layout", ["tensor", *SLOW[:2], pytest.param("sequence", marks=pytest.mark.slow)])
def test_a_run_that_was_killed_resumes_bit_for_bit(layout: str, tmp_path: Path):
    def run(rank: int, folder: str, body: Callable[[Any], Any]) -> Any:
        model, run = Attending(dropout=0.1), tmp_path / folder
        handlers = EventRecorder(run), EMA(0.9), Fingerprints(Every(iterations=2)), GradientMonitor(Every(updates=2))
        return body(attending(layout, rank, *handlers, run=run, model=model, accumulate=2))

    count = TOPOLOGIES[layout].processes
    in_processes(lambda rank: run(rank, "run", lambda made: cut_after(made, 8)), count)
    resumed = in_processes(lambda rank: run(rank, "run", lambda made: trained(made, resume="latest")), count)
    whole = in_processes(lambda rank: run(rank, "whole", trained), count)
    for each, expected in zip(resumed, whole, strict=True):
        assert (each.error, expected.error) == ("", "")
        assert each.value["weights"] == expected.value["weights"]
    assert not diff_ranks(tmp_path / "run")


LAYOUTS = [each for each in TOPOLOGIES if each != "pipeline"]
PAIRS = [(one, other) for one in LAYOUTS for other in LAYOUTS if one != other]
FEW = [("tensor", "one"), ("one", "tensor")]


@pytest.mark.parametrize(
    ("first", "then"), [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in PAIRS if each not in FEW)]
)
def test_a_checkpoint_of_any_layout_has_the_same_bits_in_any_other(first: str, then: str, tmp_path: Path):
    ended = in_processes(lambda rank: trained(attending(first, rank, run=tmp_path)), TOPOLOGIES[first].processes)
    for each in ended:
        assert each.error == "", each.error
    newest = CheckpointManager(tmp_path / "checkpoints").valid()[-1]
    saved = load_checkpoint(newest)
    for name, weights in ended[0].value["weights"].items():  # as torch puts them together
        assert saved["model"][name].tolist() == weights

    def loaded(rank: int) -> int:
        made = attending(then, rank)
        made.load_checkpoint(newest)
        now = {"model": made.checkpoint_state()["model"], "optimizer": made.checkpoint_state()["optimizer"]["state"]}
        return compared(saved["model"], now["model"]) + compared(saved["optimizer"]["state"], now["optimizer"])

    for each in in_processes(loaded, TOPOLOGIES[then].processes):
        assert each.error == "", each.error
        assert each.value == 3 * 17 + 17  # weights, two moments and a count of steps each


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("tensor", "pipeline"), ("pipeline", "tensor"), ("pipeline", "sharded")])
def test_a_checkpoint_of_a_pipeline_and_of_split_layers_has_the_same_bits_in_the_other(
    first: str, then: str, tmp_path: Path
):
    then = {"sharded": "shards of tensor"}.get(then, then)
    count = TOPOLOGIES[first].processes
    for each in in_processes(lambda rank: trained(attending(first, rank, run=tmp_path, model=Stack())), count):
        assert each.error == "", each.error
    newest = CheckpointManager(tmp_path / "checkpoints").valid()[-1]
    saved = load_checkpoint(newest)

    def loaded(rank: int) -> int:
        made = attending(then, rank, model=Stack())
        made.load_checkpoint(newest)
        state = made.checkpoint_state()
        return compared(saved["model"], state["model"]) + compared(
            saved["optimizer"]["state"], state["optimizer"]["state"]
        )

    ended = in_processes(loaded, TOPOLOGIES[then].processes)
    assert [each.error for each in ended] == [""] * len(ended)
    assert all(each.value > 0 for each in ended)
    assert sum(each.value for each in ended) >= 4 * 12  # of 12 parameters: the weight, two moments, and the steps


def compared(saved: Any, now: Any) -> int:
    """How many tensors have the same bits as those that were saved: of shards, the part that this process has."""
    if isinstance(saved, dict):
        assert now.keys() <= saved.keys()  # a process of a pipeline has the state of its own layers
        return sum(compared(saved[name], each) for name, each in now.items())
    assert isinstance(saved, torch.Tensor)
    if now.is_meta:  # of a layer that another process has
        return 0
    mine = sharded_like(saved, now)
    if hasattr(mine, "to_local"):
        mine, now = mine.to_local(), now.to_local()
    assert torch.equal(mine, now)
    return 1


@pytest.mark.parametrize(
    "layout", ["tensor", *(pytest.param(each, marks=pytest.mark.slow) for each in ("copies", "sequence", "pipeline"))]
)
def test_an_average_of_late_weights_is_that_of_one_process(layout: str):
    def run(rank: int, layout: str, model: type[nn.Module]) -> Any:
        torch.manual_seed(0)
        average = SWA(after_update=4, every=Every(updates=2))
        made = attending(layout, rank, average, model=model())
        found = trained(made)
        with average.applied():
            here = {name: each for name, each in made.model.state_dict().items() if not each.is_meta}
            weights = {name: whole_of(each).tolist() for name, each in here.items()}
        return found, {**found, "weights": weights}, average.number_averaged

    model = Stack if layout == "pipeline" else Attending
    raw, averaged, count = run(0, "one", model)
    assert count == 3
    assert apart(raw, averaged) > 1e-3
    for each in in_processes(lambda rank: run(rank, layout, model)):
        assert each.error == "", each.error
        its_raw, its_averaged, its_count = each.value
        assert its_count == count
        assert apart(its_raw, raw) < 1e-12
        assert apart(its_averaged, averaged) < 1e-12


@pytest.mark.parametrize("layout", [*FAST, *SLOW, pytest.param("shards", marks=pytest.mark.slow)])
def test_norms_of_parts_and_of_whole_parameters_are_those_of_one_process(layout: str):
    def run(rank: int, layout: str) -> list[dict[str, float]]:
        found: list[dict[str, float]] = []
        made = attending(layout, rank, GradientMonitor(Every(updates=2), updates=True), clip_grad_norm=None)
        made.on(Events.METRICS_LOGGED)(lambda engine, event: found.append(dict(event.payload.metrics)))
        made.train()
        return [{name: each for name, each in metrics.items() if "/" in name} for metrics in found]

    expected = run(0, "one")
    assert any("update_ratio/qkv.weight" in each for each in expected), expected
    for each in in_processes(lambda rank: run(rank, layout), TOPOLOGIES[layout].processes):
        assert each.error == "", each.error
        for found, alone in zip(each.value, expected, strict=True):
            # the loss that is reported is a mean in float32 over the processes
            assert found.pop("train/loss", 0) == pytest.approx(alone.get("train/loss", 0), abs=1e-6)
            norms = {name: each for name, each in alone.items() if name != "train/loss"}
            assert found == pytest.approx(norms, rel=1e-11, abs=1e-12)


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_head=4, n_embd=16, vocab_size=32, n_positions=8, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
        )
    else:
        made = transformers.LlamaConfig if kind == "llama" else transformers.Qwen2Config
        config = made(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.double()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_models_of_transformers_learn_what_they_learn_in_one_process(kind: str):
    tokens = torch.randint(0, 32, (12, 8), generator=torch.Generator().manual_seed(1))

    def run(backend: Any) -> Any:
        loader = DataLoader(TensorDataset(tokens), 4, shuffle=True)
        # AdamW would enlarge the rounding of gradients that are 0, such as for the biases of keys
        config = TrainingConfig(optimizer="sgd", learning_rate=0.1, clip_grad_norm=1.0, max_epochs=3, seed=3)
        return trained(
            Trainer(transformer(kind), loader, loader, strategy=PretrainStrategy(), backend=backend, config=config)
        )

    expected = run(None)
    backend: Callable[[], Any] = lambda: TorchBackend("cpu", topology=Topology(tensor=2))  # noqa: E731
    for each in in_processes(lambda rank: run(backend())):
        assert each.error == "", each.error
        assert apart(each.value, expected) < 1e-12


def test_what_does_not_fit_ends_all_before_training():
    def run(rank: int, **given: Any) -> None:
        attending("tensor", rank, model=given["model"]).train()

    bad = Attending()
    bad.up = nn.Linear(8, 15)
    cases = {
        "has no plan": nn.Linear(3, 4),
        "'up' has 15 outputs, which 2 processes cannot split evenly": bad,
    }
    for said, model in cases.items():
        for each in in_processes(lambda rank, model=model: run(rank, model=model)):
            assert said in each.error.splitlines()[-1]


class Gated(Attending):
    """With a parameter that each process uses on its own part of the features."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(input=x)
        found: torch.Tensor = self.head(x + self.down(self.gate(self.up(input=self.norms[1](x))))).tanh()
        return found


def test_a_parameter_that_each_process_uses_on_its_part_has_to_be_in_the_plan():
    def run(rank: int, layout: str, plan: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        model = Gated(nn.PReLU())
        model.tensor_plan = {**{name: Attending.tensor_plan[name] for name in ("up", "down")}, **plan}
        return trained(attending(layout, rank, model=model))

    for each in in_processes(lambda rank: run(rank, "tensor", {})):
        assert "gate.weight is not split, and its gradients differ" in each.error.splitlines()[-1]
    expected = run(0, "one", {})
    for each in in_processes(lambda rank: run(rank, "tensor", {"gate": "replicated"})):
        assert each.error == "", each.error
        assert apart(each.value, expected) < 1e-12


class Normed(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.batch_norm(super().forward(x).transpose(1, 2)).transpose(1, 2).tanh()
        return found


def test_a_batch_norm_sees_the_whole_batch_where_layers_are_split_and_nothing_is_warned_of():
    def run(rank: int, layout: str) -> Any:
        torch.manual_seed(0)
        with structlog.testing.capture_logs() as logs:
            made = attending(layout, rank, model=Normed())
        return trained(made), [line["event"] for line in logs if "BatchNorm" in line["event"]]

    expected, _ = run(0, "one")
    for each in in_processes(lambda rank: run(rank, "tensor")):
        assert each.error == "", each.error
        assert each.value[1] == []
        assert apart(each.value[0], expected) < 1e-12


class Reaching(Attending):
    """Computes with the weight of a split layer itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = x + self.down(self.up(x).relu())
        return nn.functional.linear(x, self.head.weight, self.head.bias).tanh()


def test_a_split_layer_whose_weight_the_model_uses_itself_is_named():
    class Nested(nn.Module):
        tensor_plan: ClassVar[dict[str, Any]] = {
            "inner.up": "colwise", "inner.down": "rowwise", "inner.head": "colwise",
        }  # fmt: skip

        def __init__(self) -> None:
            super().__init__()
            self.inner = Reaching()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner(x)
            return found

    def run(rank: int) -> list[str]:
        with pytest.raises(RuntimeError) as error:
            attending("tensor", rank, model=Nested()).train()
        return list(error.value.__notes__)

    for each in in_processes(run):
        assert each.error == "", each.error
        (note,) = [note for note in each.value if "several processes" in note]
        assert note.startswith("inner.head: several processes have a part of its weight each")
        assert "call the layer, as self.head(x) in place of F.linear(x, self.head.weight)" in note


def test_a_norm_that_a_plan_forgets_along_the_sequence_is_named():
    def run(rank: int) -> None:
        model = Attending()
        model.tensor_plan = {name: each for name, each in Attending.tensor_plan.items() if name != "norms.*"}  # type: ignore[misc]
        attending("sequence", rank, model=model).train()

    for each in in_processes(run):
        assert "norms.0.weight is not split, and its gradients differ" in each.error.splitlines()[-1]


def test_processes_that_compute_a_layer_together_and_read_different_batches_are_refused():
    def run(rank: int, loader: Any) -> None:
        made = attending("tensor", rank)
        made.train_loader = loader(rank)
        made.train()

    data = sequences(8)
    loaders: list[Callable[[int], Any]] = [
        lambda rank: [(data.tensors[0][rank : rank + 4], data.tensors[1][:4])],
        lambda rank: DataLoader(data, 2, sampler=DistributedSampler(data, 2, rank)),
    ]
    for loader in loaders:
        for each in in_processes(lambda rank, loader=loader: run(rank, loader)):
            assert "need the same batches, and got different ones: that of rank 1 is not that of rank 0" in each.error


def test_a_distributed_sampler_for_every_process_is_refused_before_training():
    def run(rank: int) -> None:
        data = sequences(8)
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, rank))
        Trainer(
            Attending().double(), loader, strategy="supervised", backend=TorchBackend(topology=Topology(tensor=2)),
            config=TrainingConfig(max_epochs=1),
        )  # fmt: skip

    for each in in_processes(run):
        assert (
            "DistributedSampler(num_replicas=2): shares the data out to each process, and there are 1 copies"
            in each.error
        )


def test_a_sequence_that_cannot_be_split_is_named():
    def run(rank: int) -> None:
        made = attending("sequence", rank)
        made.train_loader = [(torch.ones(4, 3, 3).double(), torch.ones(4, 3, 4).double())]
        made.train()

    for each in in_processes(run):
        assert "a sequence of 3 positions cannot be split evenly over 2 processes" in each.error
