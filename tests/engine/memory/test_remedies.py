"""What makes a run fit into less memory, and whether the peak that is promised is that of the changed run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from examples.byte_lm.model import ByteGPT
from pulsetrain.engine import OptimizerOffload, PretrainStrategy, SupervisedStrategy, Topology, TorchBackend
from pulsetrain.engine.distributed.shards import local
from pulsetrain.engine.memory.estimate import estimate, peak_allocated
from pulsetrain.engine.memory.remedies import first_rows, remedies, repeated_blocks, rows_of, sharded
from pulsetrain.engine.memory.setup import Setup, without_values
from pulsetrain.engine.optimizers import create_optimizer
from pulsetrain.engine.step.backend import OptimizerRequest
from pulsetrain.engine.step.protocols import BackendSettings
from tests.support.ranks import in_processes
from tests.support.setups import linear, setup_of

WIDTH = 64


class Deep(nn.Module):
    """Blocks that keep more than their inputs."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def deep(rows: int = 1024, **settings: object) -> Setup:
    batch = torch.ones(rows, WIDTH), torch.zeros(rows, WIDTH)
    return setup_of(Deep(), batch=batch, strategy=SupervisedStrategy("mse"), **settings)


def found_for(setup: Setup, share: float) -> dict[str, object]:
    """The changes with this share of the peak available, by the first setting that they change."""
    use = estimate(setup)
    return {next(iter(each.settings)): each for each in remedies(setup, use, int(share * use.peak))}


def test_half_of_the_batch_has_the_peak_of_such_a_run() -> None:
    smaller = found_for(deep(), 0.7)["training.accumulate"]
    assert (smaller.rows, smaller.settings["training.accumulate"], smaller.fits) == (512, 2, True)
    assert smaller.peak == estimate(deep(512, accumulate=2)).peak


def test_the_batch_is_cut_until_it_fits() -> None:
    smaller = found_for(deep(), 0.4)["training.accumulate"]
    assert smaller.fits
    assert smaller.rows < 512
    assert estimate(deep(2 * smaller.rows, accumulate=512 // smaller.rows)).peak > 0.4 * estimate(deep()).peak


def test_other_changes_have_the_peak_of_such_a_run() -> None:
    found = found_for(deep(), 0.7)
    again = found["training.activation_checkpointing"]
    assert again.settings["training.activation_checkpointing"] == "blocks.*"
    assert again.peak == estimate(deep(activation_checkpointing="blocks.*")).peak
    assert found["training.precision"].peak == estimate(deep(precision="bf16")).peak


def test_if_no_single_one_fits_they_are_tried_together() -> None:
    batch = torch.ones(2, 512, WIDTH), torch.zeros(2, 512, WIDTH)  # it cannot be cut into many parts
    setup = setup_of(Deep(), batch=batch, strategy=SupervisedStrategy("mse"))
    use = estimate(setup)
    least = min(each.peak for each in remedies(setup, use, use.peak - 1) if "parallel.shard" not in each.settings)
    found = list(remedies(setup, use, least - 1))
    assert found[-2].what.startswith("all of these together: ")
    assert found[-2].peak <= least


def test_what_is_in_use_already_is_not_recommended() -> None:
    found = found_for(deep(activation_checkpointing="blocks.*", precision="bf16"), 0.8)
    assert set(found) == {"training.accumulate", "parallel.shard"}


def test_if_the_weights_do_not_fit_only_more_processes_help() -> None:
    setup = linear(rows=1)
    use = estimate(setup)
    (only,) = remedies(setup, use, use.components["parameters"])
    assert only.settings["parallel.shard"] > 2
    assert only.peak == sharded(setup.model, use, only.settings["parallel.shard"], 1)


class Once(nn.Sequential):
    """It cannot be computed again in the backward pass, and not in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1 or torch.is_autocast_enabled("cpu"):
            raise RuntimeError("not so")
        return super().forward(x)


def test_a_change_that_cannot_be_estimated_is_left_out() -> None:
    model = Deep()
    model.blocks[0] = Once(*model.blocks[0])  # the last one that the backward pass reaches
    batch = torch.ones(1024, WIDTH), torch.zeros(1024, WIDTH)
    setup = setup_of(model, batch=batch, strategy=SupervisedStrategy("mse"))
    assert repeated_blocks(setup.model, estimate(setup)) == "blocks.*"
    assert set(found_for(setup, 0.7)) == {"training.accumulate", "parallel.shard"}
    copied = without_values(setup)
    assert len(list(remedies(copied, estimate(copied), int(0.7 * estimate(copied).peak)))) == 2
    assert all(each.grad is None for each in copied.model.parameters()), "of a pass that was interrupted"


def test_with_several_processes_peaks_are_those_of_each() -> None:
    setup, half = deep(), deep(512, accumulate=2)
    use = estimate(setup)
    share = sharded(setup.model, use, 2, rows=1024)
    found = {next(iter(each.settings)): each for each in remedies(setup, use, int(0.7 * share), processes=2)}
    smaller = found["training.accumulate"]
    assert (smaller.rows, smaller.peak) == (512, sharded(half.model, estimate(half), 2, rows=512))
    assert smaller.fits
    assert found["training.precision"].peak < share
    assert found["parallel.shard"].settings == {"parallel.shard": 4}
    assert found["parallel.shard"].peak == sharded(setup.model, use, 4, rows=1024)


def test_a_model_is_shared_out_without_what_is_refused_with_it() -> None:
    setup, plain = deep(optimizer_offload=OptimizerOffload()), deep()
    use = estimate(setup)
    *_, last = remedies(setup, use, use.peak - 1)
    count = last.settings["parallel.shard"]
    assert last.settings == {"parallel.shard": count, "training.optimizer_offload": None}
    assert last.what.endswith(f"over {count} processes, without optimizer_offload")
    assert last.peak == sharded(plain.model, estimate(plain), count, rows=1024)


def test_a_model_is_as_it_was_afterwards() -> None:
    setup = without_values(deep())
    list(remedies(setup, estimate(setup), 1_500_000))
    assert all("forward" not in vars(each) for each in setup.model.modules())
    assert rows_of(setup.batch) == 1024


def test_shares_of_many_processes_add_up_to_the_whole_and_what_is_gathered() -> None:
    setup = deep()
    use = estimate(setup)
    at = use.phases[use.peak_phase]
    block = sum(each.nbytes for each in setup.model.blocks[0].parameters())
    shares = sharded(setup.model, use, 4, rows=1024)
    assert shares == pytest.approx((use.peak - at["buffers"]) / 4 + at["buffers"] + 3 * block, abs=8)
    of_batch = at["batch"] + at["activations"] + at["temporary"]
    assert sharded(setup.model, use, 4, rows=2) - shares == pytest.approx(of_batch / 4, abs=8)  # two idle ones


def test_the_blocks_that_keep_most_are_found() -> None:
    assert repeated_blocks(deep().model, estimate(deep())) == "blocks.*"
    assert repeated_blocks(linear().model, estimate(linear())) is None


def test_rows_are_cut_in_all_tensors_of_a_batch_and_nothing_is_copied() -> None:
    batch = {"x": torch.arange(12).reshape(6, 2), "y": [torch.arange(6), torch.arange(4)], "name": "a"}
    cut = first_rows(batch, 2)
    assert rows_of(batch) == 6
    assert cut["x"].tolist() == [[0, 1], [2, 3]]
    assert cut["y"][0].tolist() == [0, 1]
    assert cut["y"][1].tolist() == [0, 1, 2, 3]
    assert cut["name"] == "a"
    assert cut["x"].data_ptr() == batch["x"].data_ptr()
    whole = linear(rows=64)
    half = replace(whole, batch=first_rows(whole.batch, 32))
    assert estimate(half).components["batch"] == estimate(whole).components["batch"] // 2


@pytest.mark.parametrize("batch", [[], "text", {"x": 3}, torch.tensor(1.0)])
def test_a_batch_without_rows_has_none(batch: object) -> None:
    assert rows_of(batch) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{"layers": 8, "width": 256, "context": 128}, {"layers": 8, "width": 512, "heads": 8, "context": 32}],
    ids=["activations", "weights"],
)
def test_the_share_of_a_process_is_about_what_two_processes_allocate(sizes: dict[str, int]) -> None:
    def body(rank: int) -> int:
        """The peak of a step once the optimizer has its state."""
        backend, strategy = TorchBackend(topology=Topology(shard=2)), PretrainStrategy(unit="byte")
        backend.configure(BackendSettings(device="cpu"))
        request = OptimizerRequest(build=lambda module: create_optimizer(module, "adamw", 1e-3))
        store = backend.make_store(ByteGPT(**sizes), request, strategy)
        batch = torch.randint(0, 256, (4, sizes["context"] + 1))

        def step() -> None:
            backend.train_step(store.state, backend.prepare_batch(batch, strategy), strategy, donate=True)

        step()
        states = [each for state in store.optimizer.state.values() for each in state.values()]
        return sum(local(each).nbytes for each in (*store.module.parameters(), *states)) + min(
            peak_allocated(step) for _ in range(5)
        )

    batch = torch.randint(0, 256, (8, sizes["context"] + 1))
    whole = setup_of(ByteGPT(**sizes), batch=batch, strategy=PretrainStrategy(unit="byte"))
    share = sharded(whole.model, estimate(whole), 2, rows=8)
    ended = in_processes(body, own_group=True)
    assert [each.error for each in ended] == ["", ""]
    # gathered weights are freed by other threads, sooner or later: in one of the steps soon enough
    assert [each.value for each in ended] == pytest.approx([share, share], rel=0.25)
