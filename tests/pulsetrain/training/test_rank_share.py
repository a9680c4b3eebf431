"""How much of a global batch is a rank's, as far as one process shows it."""

from types import SimpleNamespace

import pytest
import torch

from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.ranks import DataRank, Ranks
from pulsetrain.engine.step.protocols import TrainingBatch
from pulsetrain.training.rank_share import RankShare


def shares_of(sizes):
    data = SimpleNamespace(share=lambda iteration: None, rank=DataRank(0, 1), agreed=None)
    share_of, found = RankShare(ControlGroup(Ranks()), data), []
    for iteration, size in enumerate(sizes):
        batch = TrainingBatch(torch.zeros(4), torch.zeros(4), 4, 0, torch.tensor(size))
        found.append(share_of.of(batch, iteration))
        assert found[-1].totals.size == pytest.approx(size)
    return [(share.expected, share.weight) for share in found]


def test_a_batch_is_weighed_by_the_size_of_the_last_one():
    assert shares_of([50.0, 100.0, 25.0]) == [(50.0, 1.0), (50.0, 2.0), (100.0, 0.25)]


def test_a_batch_in_which_next_to_nothing_counts_is_not_what_others_are_weighed_by():
    assert shares_of([50.0, 1e-9, 100.0])[2] == (50.0, 2.0)
    assert shares_of([1e-9, 100.0])[1] == (100.0, 1.0)
