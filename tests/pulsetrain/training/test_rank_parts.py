"""The parts of validation sets that a rank keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from pulsetrain.engine.distributed.ranks import Ranks
from pulsetrain.training.rank_parts import RankParts


def test_the_part_of_a_set_is_made_once_and_goes_with_the_set():
    parts, model = RankParts(Ranks(0, 2)), nn.Identity()
    loader: Any = DataLoader(range(7), batch_size=2)
    part: Any = parts.of(loader, model, [])
    assert part is not loader
    assert parts.of(loader, model, []) is part
    gone = weakref.ref(part)
    del loader, part
    gc.collect()
    assert gone() is None
