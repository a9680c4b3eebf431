"""What convolutions allocate for themselves, against the count of torch's allocator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pulsetrain.engine.memory.estimate import peak_allocated
from pulsetrain.engine.memory.kernels import workspace

# channels in whole blocks: how wide these are depends on the processor
CASES = {
    "3 x 3": (lambda: nn.Conv2d(64, 64, 3, padding=1), (16, 64, 32, 32)),
    "stride 2": (lambda: nn.Conv2d(32, 64, 3, padding=1, stride=2), (16, 32, 64, 64)),
    "1 x 1": (lambda: nn.Conv2d(64, 64, 1), (16, 64, 32, 32)),
    "depthwise": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64), (16, 64, 32, 32)),
    "images": (lambda: nn.Conv2d(3, 32, 3, padding=1), (16, 3, 64, 64)),
    "large weight": (lambda: nn.Conv2d(256, 256, 3, padding=1), (2, 256, 8, 8)),
    "one dimension": (lambda: nn.Conv1d(32, 64, 3, padding=1), (16, 32, 1024)),
}
CONVOLUTION, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def arguments_of(layer: nn.Module, inputs: torch.Tensor) -> list[object]:
    sizes = [list(each) for each in (layer.stride, layer.padding, layer.dilation)]
    return [inputs, layer.weight.detach(), None, *sizes, False, [0] * len(sizes[0]), layer.groups]


@pytest.mark.parametrize("case", CASES)
def test_forward(case: str) -> None:
    make, shape = CASES[case]
    arguments = arguments_of(make(), torch.randn(shape))
    outputs = CONVOLUTION(*arguments)
    beside = peak_allocated(lambda: CONVOLUTION(*arguments)) - outputs.nbytes
    assert workspace(CONVOLUTION, arguments, outputs) == pytest.approx(beside, rel=0.05)


@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)], ids=["both", "weight", "inputs"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "images"])
def test_backward(case: str, wanted: tuple[bool, bool]) -> None:
    make, shape = CASES[case]
    inputs, weight, _, *options = arguments_of(make(), torch.randn(shape))
    gradient = torch.ones_like(CONVOLUTION(inputs, weight, None, *options))
    arguments = [gradient, inputs, weight, None, *options, [*wanted, False]]
    outputs = BACKWARD(*arguments)
    size = sum(each.nbytes for each in outputs if each is not None)
    assert size + workspace(BACKWARD, arguments, outputs) == pytest.approx(
        peak_allocated(lambda: BACKWARD(*arguments)), rel=0.06
    )


def test_channels_last_need_no_copies_of_images() -> None:
    layer = nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)
    arguments = arguments_of(layer, torch.randn(16, 64, 32, 32).to(memory_format=torch.channels_last))
    assert workspace(CONVOLUTION, arguments, CONVOLUTION(*arguments)) == 0


def test_other_operations_are_not_known_to_need_anything() -> None:
    product = torch.ops.aten.mm.default
    assert workspace(product, [torch.ones(2, 2)] * 2, torch.ones(2, 2)) == 0
