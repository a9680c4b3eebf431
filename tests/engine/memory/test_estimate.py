"""The estimate of a run's memory against what its computation holds and what the allocator counts."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from pulsetrain.engine import ActivationOffload, DPOStrategy, OptimizerOffload, SupervisedStrategy
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.memory.estimate import MemoryUse, estimate, measure, peak_allocated
from pulsetrain.engine.memory.live_tensors import PHASES
from pulsetrain.engine.memory.optimizer_state import offload_optimizer
from pulsetrain.engine.memory.setup import Setup
from tests.support.setups import MODELS, convolutions, linear, setup_of

WEIGHTS = 256 * 256 * 4
TRAININGS = {"adamw": {}, "sgd": {"optimizer": "sgd"}, "lora": {"lora": True}}


def needed(model: str, training: str) -> None:
    if model == "llama":
        pytest.importorskip("transformers")
    if training == "lora":
        pytest.importorskip("peft")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("model", "training"),
    [
        pytest.param(model, training, marks=[pytest.mark.slow] if model == "llama" or training == "lora" else [])
        for model in MODELS
        for training in TRAININGS
    ],
)
def test_the_estimate_is_within_a_tenth_of_what_the_allocator_counts(model: str, training: str) -> None:
    needed(model, training)
    estimated = estimate(setup_of(model, **TRAININGS[training]))
    measured = measure(setup_of(model, **TRAININGS[training]))
    assert measured.allocated is not None
    assert estimated.peak == pytest.approx(measured.allocated, rel=0.1)
    assert estimated.assumed == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"optimizer": "sgd", "options": {"momentum": 0.0}},
        {"options": {"fused": False, "foreach": True}},
        {"options": {"fused": False, "foreach": False}},
        {"optimizer": "rmsprop"},
        {"accumulate": 4},
        {"accumulate": 4, "clip_grad_norm": 1.0},
        {"clip_grad_norm": 1.0},
        {"clip_grad_value": 1.0},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"activation_checkpointing": "blocks.*"},
        {"activation_checkpointing": "blocks.*", "precision": "bf16"},
        {"activation_offload": ActivationOffload(min_bytes=4096)},  # to the same memory
        {"activation_offload": ActivationOffload(min_bytes=4096), "activation_checkpointing": "blocks.*"},
        pytest.param({"model": "llama"}, marks=pytest.mark.slow),
        pytest.param({"model": "llama", "lora": True}, marks=pytest.mark.slow),
        pytest.param({"lora": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_component_of_each_phase_is_that_of_the_computation(case: dict[str, object]) -> None:
    needed(str(case.get("model", "")), "lora" if case.get("lora") else "")
    case = {"model": "small gpt", **case}
    estimated, measured = estimate(setup_of(**case)), measure(setup_of(**case))
    for phase, at in measured.phases.items():
        assert estimated.phases[phase] == pytest.approx(dict(at), rel=0.002, abs=200), phase
    assert sum(estimated.saved.values()) == pytest.approx(sum(measured.saved.values()), rel=0.002)


def test_a_layer_needs_what_can_be_counted_by_hand() -> None:
    use = estimate(linear())
    rows = 8 * 256 * 4
    assert use.components["parameters"] == use.components["gradients"] == WEIGHTS
    assert use.components["optimizer"] == pytest.approx(2 * WEIGHTS, abs=16)  # and a step
    assert use.components["batch"] == 2 * rows
    assert use.components["buffers"] == 0
    assert use.phases["update"]["gradients"] == WEIGHTS
    assert use.saved[""] == rows  # the outputs, of the module that is the model itself
    assert use.peak_phase in ("backward", "update")


def test_gradients_wait_in_the_forward_pass_where_batches_are_accumulated() -> None:
    assert estimate(linear()).phases["forward"]["gradients"] == 0
    assert estimate(linear(accumulate=2)).phases["forward"]["gradients"] == WEIGHTS


def test_a_shared_weight_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x))

    batch = torch.ones(8, 256), torch.zeros(8, 256)
    use = estimate(setup_of(Tied(), batch=batch, strategy=SupervisedStrategy("mse")))
    assert use.components["parameters"] == use.components["gradients"] == WEIGHTS
    assert use.components["optimizer"] == pytest.approx(2 * WEIGHTS, abs=16)


def test_what_is_computed_again_is_not_kept() -> None:
    def of_blocks(use: MemoryUse) -> int:
        return sum(size for name, size in use.saved.items() if name.startswith("blocks."))

    kept, again = estimate(setup_of()), estimate(setup_of(activation_checkpointing="blocks.*"))
    assert of_blocks(again) < 0.1 * of_blocks(kept)
    assert again.phases["backward"]["activations"] > sum(again.saved.values())  # those of one block, computed again


class InArrays:
    """Keeps activations where torch does not count them."""

    def pack(self, tensor: torch.Tensor) -> object:
        return numpy.array(tensor.numpy())

    def unpack(self, handle: numpy.ndarray) -> torch.Tensor:
        return torch.from_numpy(handle)


def test_activations_that_a_policy_moves_do_not_count() -> None:
    setting = ActivationOffload(min_bytes=4096, policy=InArrays())
    kept, moved = estimate(setup_of("small gpt")), estimate(setup_of("small gpt", activation_offload=setting))
    assert sum(moved.saved.values()) < 0.1 * sum(kept.saved.values())
    assert moved.components["parameters"] == kept.components["parameters"]
    measured = measure(setup_of("small gpt", activation_offload=setting))
    assert moved.phases["forward"] == pytest.approx(dict(measured.phases["forward"]), rel=0.002, abs=200)
    assert kept.unknown == ()
    assert moved.unknown == ("InArrays.pack",), "how much of the host's memory it needs is not known"


def test_optimizer_state_in_a_file_counts_for_what_an_update_works_on(tmp_path: Path) -> None:
    setting = OptimizerOffload(folder=str(tmp_path), part_bytes=WEIGHTS // 8)
    estimated, setup = estimate(linear(optimizer_offload=setting)), linear(optimizer_offload=setting)
    assert [estimated.phases[phase]["optimizer"] for phase in PHASES] == [0, 0, WEIGHTS // 8]
    offload_optimizer(setup.optimizer, setting)
    measured = measure(setup)
    assert measured.allocated is not None
    assert estimated.peak == pytest.approx(measured.allocated, rel=0.1)
    assert measured.components["optimizer"] < 100, "its step"
    assert estimated.peak < 0.8 * estimate(linear()).peak


def test_optimizer_state_on_the_host_counts_where_the_model_is_there_as_well() -> None:
    assert estimate(linear(optimizer_offload=OptimizerOffload(to="host"))).phases == estimate(linear()).phases


def test_the_reference_of_a_strategy_counts() -> None:
    tokens = torch.randint(0, 64, (4, 17))
    batch = {f"{side}_{name}": tokens for side in ("chosen", "rejected") for name in ("input_ids", "labels")}

    def policy() -> Setup:
        model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
        return setup_of(model, batch=batch, strategy=DPOStrategy())

    estimated, measured = estimate(policy()), measure(policy())
    assert estimated.components["strategy"] == estimated.components["parameters"]
    assert estimated.phases == measured.phases
    assert estimated.peak == pytest.approx(measured.peak, rel=0.1)


def test_nothing_of_the_run_changes() -> None:
    setup = setup_of()
    weights, hooks = copy.deepcopy(setup.model.state_dict()), len(setup.model.head._forward_hooks)
    torch.manual_seed(3)
    generator = torch.get_rng_state()
    estimate(setup)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(each, weights[name]) for name, each in setup.model.state_dict().items())
    assert not setup.optimizer.state
    assert all(each.grad is None for each in setup.model.parameters())
    assert len(setup.model.head._forward_hooks) == hooks == 0


def test_a_measurement_leaves_no_hooks() -> None:
    setup = linear()
    measure(setup)
    assert not setup.model._forward_hooks
    assert not setup.model._forward_pre_hooks
    assert not setup.optimizer._optimizer_step_post_hooks


def test_a_model_larger_than_any_machine_is_estimated() -> None:
    width = 2**21
    with torch.device("meta"):
        model = nn.Linear(width, width, bias=False)
    batch = torch.ones(1, width), torch.zeros(1, width)
    use = estimate(setup_of(model, batch=batch, strategy=SupervisedStrategy("mse"), device="meta"))
    assert use.components["parameters"] == width * width * 4


class Reads(nn.Module):
    """It reads values: a number, and whether something holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        if torch.isnan(y).any():
            raise ValueError("not a number")
        return y * y.detach().norm().item()


class Selects(Reads):
    """Its outputs have a shape that depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y[y > 0].sum() + torch.zeros_like(x)


class Places(Reads):
    """It reads positions, which do not depend on its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        if (positions.diff() != 1).any():
            raise ValueError("not in order")
        return self.layer(x[:, : int(positions[-1]) + 1])


def reading(model: nn.Module) -> Setup:
    batch = torch.ones(8, 256), torch.zeros(8, 256)
    return setup_of(model, batch=batch, strategy=SupervisedStrategy("mse"))


def test_values_that_a_model_reads_are_assumed_and_counted() -> None:
    use = estimate(reading(Reads()))
    assert use.assumed >= 2
    assert use.peak == pytest.approx(measure(reading(Reads())).peak, rel=0.02)


def test_positions_are_computed() -> None:
    assert estimate(reading(Places())).assumed == 0


def test_a_shape_that_depends_on_values_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"Selects cannot be estimated: aten\..* needs the values .*; measure it"
    ):
        estimate(reading(Selects()))
    assert measure(reading(Selects())).peak > WEIGHTS


def test_an_error_of_the_model_stays_the_models() -> None:
    setup = reading(nn.Linear(8, 8))
    with pytest.raises(RuntimeError, match="256"):
        estimate(setup)


def test_several_losses_are_refused() -> None:
    class Turns:
        def prepare_batch(self, batch: object) -> object: ...

        def compute_losses(self, model: object, batch: object) -> object: ...

    setup = linear()
    with pytest.raises(ConfigurationError, match="one loss"):
        Setup(model=setup.model, optimizer=setup.optimizer, strategy=Turns(), backend=setup.backend, batch=None)


def test_the_allocators_count_sees_what_is_freed_at_once() -> None:
    size = 4 * 2**20

    def call() -> None:
        for _ in range(3):
            torch.empty(size // 4)

    assert peak_allocated(call) == size
    kept: list[torch.Tensor] = []
    assert peak_allocated(lambda: kept.extend(torch.empty(size // 4) for _ in range(3))) == 3 * size


def test_what_convolutions_allocate_for_themselves_is_part_of_the_estimate() -> None:
    use = estimate(setup_of("convolutions"))
    assert use.components["kernels"] > 0.2 * use.peak  # without it the estimate would be a quarter too low
    assert estimate(setup_of()).components["kernels"] == 0


RESIDENT = """
import sys
from pulsetrain.engine.memory.estimate import estimate, _update
from tests.support.setups import setup_of
from examples.byte_lm.model import ByteGPT
import torch
from pulsetrain.engine import PretrainStrategy

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def large():
    model = ByteGPT(layers=4, width=512, heads=8, context=256)
    return setup_of(model, batch=torch.randint(0, 256, (8, 257)), strategy=PretrainStrategy(unit="byte"))

_update(setup_of())  # libraries make their threads and buffers
before = resident("VmRSS")
estimated = estimate(large()).peak
print(estimated, resident("VmRSS") - before)
before, setup = resident("VmRSS"), large()
_update(setup)
open("/proc/self/clear_refs", "w").write("5")  # the peak from now on
_update(setup)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_grows_by_what_was_estimated_and_not_by_the_estimate() -> None:
    """A process of its own, whose heap gives pages back at once."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    estimated, of_estimate, grown = map(int, done.stdout.split())
    assert estimated > 400e6
    assert grown == pytest.approx(estimated, rel=0.1)
    assert of_estimate < 0.1 * estimated


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("model", ["gpt", "convolutions"])
def test_on_a_gpu_the_estimate_is_within_a_tenth_of_what_the_allocator_counts(model: str) -> None:
    estimated, measured = estimate(setup_of(model, device="cuda")), measure(setup_of(model, device="cuda"))
    assert estimated.peak == pytest.approx(measured.peak, rel=0.1)


def test_convolutions_without_values_make_no_convolution() -> None:
    """The network of the tests, on the meta device first, gives the same estimate as with values."""
    with torch.device("meta"):
        model = convolutions()
    batch = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
    strategy = SupervisedStrategy("cross_entropy")
    on_meta = Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        strategy=strategy,
        backend=linear().backend,
        batch=batch,
    )
    assert estimate(on_meta).peak == pytest.approx(estimate(setup_of("convolutions")).peak, rel=0.001)


def test_a_run_that_has_made_updates_is_estimated_like_a_new_one() -> None:
    setup = linear(options={"fused": False, "foreach": False})  # it reads the number of its step
    for _ in range(2):
        setup.model(setup.batch[0]).sum().backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    assert estimate(setup).phases == estimate(linear(options={"fused": False, "foreach": False})).phases
