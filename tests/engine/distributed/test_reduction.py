"""Sums in a fixed binary tree, within a process and over several."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from torch import Tensor, nn

from pulsetrain.engine.distributed import reduction
from pulsetrain.engine.distributed.joining import join
from pulsetrain.engine.distributed.parallelize import start_alike
from pulsetrain.engine.distributed.reduction import TreeSum, add_over_processes
from tests.support.ranks import in_processes

SHAPES = [(7, 5), (3,), (), (2, 1, 4)]
TYPES = [torch.float32, torch.float64, torch.float32, torch.bfloat16]


def leaves(count: int) -> list[list[Tensor]]:
    """Values of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(5)
    scales = torch.logspace(0, 6, count).tolist()
    return [
        [
            (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
            for shape, dtype in zip(SHAPES, TYPES, strict=True)
        ]
        for scale in scales
    ]


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [each.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for each in tensors]


def in_one(count: int) -> list[bytes]:
    tree = TreeSum()
    for leaf in leaves(count):
        tree.add(leaf)
    return bits(tree.total())


def test_the_tree_adds_neighbours_and_not_from_left_to_right():
    a, b, c, d = (leaf[0] for leaf in leaves(4))
    assert in_one(4)[0] == bits([(a + b) + (c + d)])[0]
    assert in_one(4)[0] != bits([reduce(torch.add, [a, b, c, d])])[0]


def test_one_leaf_is_its_own_sum():
    assert in_one(1) == bits(leaves(1)[0])


def block_of(rank: int, world: int, count: int) -> list[bytes]:
    """What a process has after its leaves were added up, and then those of all."""
    join()
    tree, each = TreeSum(), count // world
    for leaf in leaves(count)[rank * each : (rank + 1) * each]:
        tree.add(leaf)
    sums = tree.total()
    add_over_processes(sums)
    return bits(sums)


@pytest.mark.parametrize(("world", "count"), [(2, 2), (2, 8), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_processes_have_the_bits_of_one(world: int, count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reduction, "_BUCKET", 24)  # bytes: tensors are cut and exchanged in several parts
    ended = in_processes(lambda rank: block_of(rank, world, count), world)
    assert [each.error for each in ended] == [""] * world
    assert [each.value for each in ended] == [in_one(count)] * world


def test_gradients_in_another_memory_format_keep_their_values_and_their_format():
    def body(rank: int) -> tuple[list[float], bool]:
        join()
        own = torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last) * (rank + 1)
        add_over_processes([own])
        return own.flatten().tolist(), own.is_contiguous(memory_format=torch.channels_last)

    for each in in_processes(body):
        assert each.value == ((3 * torch.arange(48.0)).tolist(), True), each.error


def test_every_process_starts_with_the_weights_of_rank_0():
    def body(rank: int) -> list[float]:
        join()
        module = nn.Linear(2, 1)
        with torch.no_grad():
            module.weight.fill_(rank)
        start_alike(module)
        return module.weight.flatten().tolist()

    assert [each.value for each in in_processes(body)] == [[0.0, 0.0]] * 2
