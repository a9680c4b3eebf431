"""The processes of one copy of the model compare their batches bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed
from torch import Tensor

from pulsetrain.engine.distributed.shared_batches import check_batches
from pulsetrain.engine.errors import ConfigurationError
from tests.support.ranks import in_processes

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "the order of its rows, which leaves their sum": lambda rows: rows.flip(0),
    "the last bit of a value": lambda rows: rows.nextafter(rows.new_tensor(1e9)),
    "its type": lambda rows: rows.float(),
    "its shape": lambda rows: rows.reshape(2, 3),
    "its layout": lambda rows: rows.to_sparse(),
}


def world() -> torch.distributed.ProcessGroup:
    group = torch.distributed.group.WORLD
    assert group is not None
    return group


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_equal_batches_of_any_type_pass():
    def run(rank: int) -> None:
        tensors = [
            torch.tensor([1.0, torch.nan]), torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor([True, False]),
            torch.tensor(7), torch.ones(0, 4), torch.arange(6).reshape(2, 3).T, torch.eye(3).to_sparse(),
            torch.eye(3).to_sparse_csr(), torch.ones(2, dtype=torch.cfloat).conj(),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        ]  # fmt: skip
        check_batches({"inputs": tensors, "name": f"of rank {rank}"}, world(), "tensor")

    assert [each.error for each in in_processes(run, own_group=True)] == ["", ""]


def test_a_batch_that_differs_in_one_process_is_refused_in_all_of_them():
    def run(rank: int) -> list[str]:
        said = []
        for change in CHANGES.values():
            rows = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)
            with pytest.raises(ConfigurationError) as refused:
                check_batches((change(rows) if rank == 2 else rows, torch.zeros(3)), world(), "pipeline")
            said.append(str(refused.value))
        return said

    for each in in_processes(run, 3, own_group=True):
        assert each.error == ""
        for text in each.value:
            assert text.startswith("Topology(pipeline=3): the processes of one copy of the model need the same batches")
            assert "that of rank 2 is not that of rank 0" in text


def test_the_ranks_of_a_group_are_those_among_all_processes():
    def run(rank: int) -> str:
        group, text = torch.distributed.new_group([1, 2]), ""
        if rank > 0:
            with pytest.raises(ConfigurationError) as refused:
                check_batches(torch.tensor(rank), group, "tensor", "MegatronBackend")
            text = str(refused.value)
        torch.distributed.barrier()  # rank 0 has the store
        return text

    _, *others = in_processes(run, 3, own_group=True)
    for each in others:
        assert each.error == ""
        assert each.value.startswith("MegatronBackend(tensor=2): ")
        assert "that of rank 2 is not that of rank 1" in each.value


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_and_ragged_batches_are_compared_by_what_they_hold():
    def run(rank: int) -> None:
        ragged = [torch.ones(2 + rank), torch.ones(3 - rank)]  # the same values, cut elsewhere
        for batch in (
            torch.eye(3).flip(0) if rank else torch.eye(3),
            torch.nested.nested_tensor(ragged, layout=torch.jagged),
        ):
            with pytest.raises(ConfigurationError, match="that of rank 1 is not that of rank 0"):
                check_batches(batch if batch.is_nested else batch.to_sparse_csr(), world(), "tensor")

    assert [each.error for each in in_processes(run, own_group=True)] == ["", ""]
