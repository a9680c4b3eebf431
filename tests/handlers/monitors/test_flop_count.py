"""Facts about devices, batches and models, and the count itself; its use is tested in test_throughput."""

import pytest
import torch
from torch import nn

from pulsetrain.handlers.monitors.flop_count import MOST_VALUES, FlopCount, is_compiled, peak_flops_of, shapes_of


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("NVIDIA L400", None),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_the_whole_name(name, peak):
    assert peak_flops_of(name) == peak


def test_shapes_distinguish_batches_and_end_in_what_holds_itself():
    class Own:
        def __init__(self, rows):
            self.x, self.me = torch.ones(rows, 2), self

    kinds = [torch.ones(2), (torch.ones(2), 3), {"x": torch.ones(2)}, {"y": torch.ones(2)}, Own(1), Own(2)]
    assert len({shapes_of(kind) for kind in kinds}) == len(kinds)
    assert shapes_of(Own(1)) == shapes_of(Own(1))


def test_only_a_few_values_of_a_large_batch_are_read_outermost_first():
    class Watched(list):
        looked_at = 0

        def __iter__(self):
            for item in super().__iter__():
                Watched.looked_at += 1
                yield item

    def batch(rows, ids=200):
        return {"meta": Watched([{"ids": Watched(range(ids))} for _ in range(rows)]), "x": torch.ones(rows, 2)}

    assert shapes_of(batch(32)) == shapes_of(batch(32))
    assert shapes_of(batch(10_000)) != shapes_of(batch(20_000))
    assert Watched.looked_at <= 4 * MOST_VALUES
    assert shapes_of(batch(1, 3)) != shapes_of(batch(1, 4))
    deep = {"many": list(range(10_000)), "inner": {"x": torch.ones(2)}}
    assert shapes_of(deep) != shapes_of({**deep, "inner": {"x": torch.ones(3)}})


def test_it_counts_from_when_it_is_made_until_its_end_but_not_inside_the_optimizers_step():
    weight = nn.Parameter(torch.ones(4, 5))

    class Multiplying(torch.optim.SGD):
        def step(self, closure=None):
            weight @ weight.T
            return super().step(closure)

    optimizer = Multiplying([weight], lr=0.1)
    inputs = torch.ones(3, 4)
    inputs @ weight
    count = FlopCount(optimizer)
    inputs @ weight
    optimizer.step()
    inputs @ weight
    assert count.end() == count.end() == 2 * (2 * 3 * 4 * 5)
    inputs @ weight
    optimizer.step()
    assert count.flops == 2 * (2 * 3 * 4 * 5)


def test_a_compiled_part_makes_a_model_compiled():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert not is_compiled(model)
    assert not is_compiled(None)
    model[1].compile(backend="eager")
    assert is_compiled(model)
    assert is_compiled(torch.compile(nn.Linear(1, 1), backend="eager"))
