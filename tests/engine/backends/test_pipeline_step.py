"""What each micro-batch of a pipeline adds to the loss of its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pulsetrain.engine.backends.micro_batches import MicroBatches
from pulsetrain.engine.backends.pipeline_step import PipelineStep
from pulsetrain.engine.step.protocols import TrainingBatch


class Constant:
    """A strategy whose loss is 1, in the type of the outputs."""

    def compute_loss(self, outputs: Tensor, batch: TrainingBatch) -> Tensor:
        return outputs.new_ones(())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("counts", [(1001, 2002), (70_000, 210_000)], ids=str)
def test_counts_that_half_precision_does_not_have_weigh_exactly(counts: tuple[int, int], dtype: torch.dtype) -> None:
    rows = torch.zeros(2, 1, dtype=dtype)
    batches = [TrainingBatch(rows, rows, samples=2, weight=torch.tensor(count)) for count in counts]
    step = PipelineStep([((rows,), {})] * 2, 2)
    step.learn(MicroBatches(batches), Constant(), 1.0)  # type: ignore[arg-type]
    step.outputs = dict.fromkeys(range(2), rows)
    for at, count in enumerate(counts):
        expected = torch.tensor(count / sum(counts), dtype=torch.float64).to(dtype)
        found = step.loss(at)
        assert found.dtype == dtype
        assert found == expected
