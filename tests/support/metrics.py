"""Scores and labels for metrics, and a counter of transfers to the host."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, CLASSES = 37, 7
GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.rand(ROWS, 5, CLASSES, generator=GENERATOR).argsort(-1).float()  # no two equal; exact in any precision
SURE = torch.rand(ROWS, 5, generator=GENERATOR) < 0.5  # these are right, others by chance
LABELS = torch.where(SURE, SCORES.argmax(-1), torch.randint(CLASSES, (ROWS, 5), generator=GENERATOR))
PADDED = LABELS.masked_fill(torch.rand(ROWS, 5, generator=GENERATOR) < 0.3, -100)
VALUES = torch.randn(ROWS, generator=GENERATOR)
WEIGHTS = torch.rand(ROWS, generator=GENERATOR)


class Reads(TorchDispatchMode):
    """How often a tensor's value is brought to the host, which waits for its device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))
