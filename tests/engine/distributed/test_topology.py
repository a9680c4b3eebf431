from __future__ import annotations

from typing import Any

import pytest

from pulsetrain.engine.distributed.ranks import DataRank, Ranks
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "world", "sizes"),
    [
        ({}, 1, (1, 1)),
        ({}, 4, (4, 1)),
        ({"shard": 2}, 2, (1, 2)),
        ({"shard": 2}, 8, (4, 2)),
        ({"replicate": 1, "shard": -1}, 4, (1, 4)),
        ({"replicate": 2, "shard": -1}, 8, (2, 4)),
        ({"replicate": 2, "shard": 2}, 4, (2, 2)),
        ({"pipeline": 2}, 4, (2, 1)),
        ({"pipeline": 2, "shard": 2}, 8, (2, 2)),
        ({"virtual": 4, "reduction": "tree"}, 1, (1, 1)),
        ({"virtual": 4, "reduction": "tree"}, 2, (2, 1)),
    ],
)
def test_the_processes_are_divided_up(given: dict[str, Any], world: int, sizes: tuple[int, int]):
    assert Topology(**given).sizes(world) == sizes
    assert Topology(**given).is_sharded(world) == (sizes[1] > 1 or "pipeline" in given)


def test_the_processes_of_a_pipeline_train_the_same_samples_and_the_first_counts_them():
    found = [Topology(pipeline=2, shard=2).data_rank(Ranks(rank, 8)) for rank in range(8)]
    assert [each.rank for each in found] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert {each.count for each in found} == {4}
    assert [each.leads for each in found] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("given", "world", "said"),
    [
        ({"shard": 2}, 1, r"Topology\(replicate=-1, shard=2\): does not fit 1 process: start a multiple of 2"),
        ({"shard": 3}, 2, r"does not fit 2 processes: start a multiple of 3"),
        ({"replicate": 2, "shard": 2}, 8, r"does not fit 8 processes: start 4"),
        ({"replicate": 4, "shard": -1}, 2, r"does not fit 2 processes: start a multiple of 4"),
        ({"pipeline": 3}, 4, r"pipeline=3\): does not fit 4 processes: start a multiple of 3"),
        (
            {"virtual": 4, "reduction": "tree"},
            3,
            r"virtual=4\): cannot be shared out evenly to 3 .* one of 1, 2, 4",
        ),
        (
            {"virtual": 2, "reduction": "tree"},
            4,
            r"virtual=2\): cannot be shared out evenly to 4 .* one of 1, 2$",
        ),
    ],
)
def test_processes_that_do_not_fit_are_refused(given: dict[str, Any], world: int, said: str):
    with pytest.raises(ConfigurationError, match=said):
        Topology(**given).sizes(world)


@pytest.mark.parametrize(
    "given",
    [
        {"shard": 0}, {"replicate": -2}, {"shard": 1.5}, {"shard": True}, {"replicate": -1, "shard": -1},
        {"param_dtype": "float8"}, {"offload": 1},
        {"virtual": 2}, {"reduction": "tree"}, {"reduction": "ring"}, {"virtual": 0, "reduction": "tree"},
        {"virtual": 6, "reduction": "tree"}, {"virtual": 2, "reduction": "tree", "shard": 2},
        {"virtual": 2, "reduction": "tree", "tensor": 2}, {"virtual": 2, "reduction": "tree", "replicate": 2},
    ],
    ids=str,
)  # fmt: skip
def test_other_values_are_refused(given: dict[str, Any]):
    with pytest.raises(ConfigurationError, match="Topology"):
        Topology(**given)


def test_processes_compute_neighbouring_virtual_ranks_of_the_same_batches():
    topology = Topology(virtual=8, reduction="tree")
    blocks = [topology.virtual_ranks(Ranks(rank, 4)) for rank in range(4)]
    assert [list(block.here) for block in blocks if block is not None] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [topology.data_rank(Ranks(rank, 4)) for rank in range(2)] == [DataRank(0, 1, True), DataRank(0, 1, False)]
    assert Topology().virtual_ranks(Ranks(1, 2)) is None
