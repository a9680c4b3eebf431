"""What kernels allocate for themselves, where it is known: convolutions on the CPU, and cuBLAS."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["PRODUCTS", "UNKNOWN", "blas_workspace", "workspace"]

UNKNOWN = (torch.ops.aten.mkldnn_rnn_layer.default,)  # an LSTM on the CPU keeps a workspace for the backward pass
PRODUCTS = frozenset({
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default,
})  # fmt: skip
_WITH_LARGE_WORKSPACES = (9, 10, 12)  # Hopper and Blackwell: their major compute capabilities

# oneDNN computes over blocks of 16 channels: tensors are copied into such blocks first, the result is copied back.
# Compared with torch's allocator, torch 2.13 and AVX-512, bytes beside the outputs, actual / by these formulas:
#   32 to 64 channels, 3x3, stride 2, 16 x 64 x 64    forward 8462336 / 8462336    backward 16703488 / 16703488
#   64 to 64 channels, 3x3, 16 x 32 x 32              forward 4341760 / 4341760    backward  8388864 / 8388608
#   20 to 50 channels, 3x3, 16 x 32 x 32              forward 4194304 / 4194304    backward  6329768 / 6291456
#   1 to 6 channels, 5x5, 64 x 28 x 28                forward 2359296 / 2359296    backward  5394856 / 5369256
# With 3 channels and a kernel of 7, the second formula is up to half too high.
_BLOCK = 16
_FEW = 4  # so many channels are read as they are


def blas_workspace(capability: int, setting: str | None = None) -> int:
    """The bytes that torch keeps for cuBLAS from the first matrix product on, for each thread that computes one.

    One thread computes the forward pass, another one the backward pass. Compared with the count of CUDA's allocator on
    an H200: a GPT needed 68153344 bytes more than its tensors, of which these are 2 * 33554432.

    Args:
        capability: the major one of the device.
        setting: of the variable CUBLAS_WORKSPACE_CONFIG; by default that of the environment.

    >>> blas_workspace(9, ""), blas_workspace(8, ""), blas_workspace(9, ":4096:8")
    (33554432, 8519680, 33554432)
    """
    chosen = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "") if setting is None else setting
    parts = re.findall(r":(\d+):(\d+)", chosen)
    if not parts:
        parts = [(4096, 8)] if capability in _WITH_LARGE_WORKSPACES else [(4096, 2), (16, 8)]
    return sum(1024 * int(size) * int(count) for size, count in parts)


def workspace(operation: object, arguments: Sequence[Any], outputs: object) -> int:
    """The bytes that an operation allocates beside its outputs, and frees before it returns.

    >>> images, weight = torch.ones(2, 32, 8, 8), torch.ones(64, 32, 3, 3)
    >>> arguments = images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    >>> convolution = torch.ops.aten.convolution.default
    >>> workspace(convolution, arguments, convolution(*arguments)) == images.nbytes + weight.nbytes
    True
    """
    if operation is torch.ops.aten.convolution.default and isinstance(outputs, Tensor):
        images: Tensor = arguments[0]
        weight: Tensor = arguments[1]
        if _is_blocked(images):
            read = _blocked(images) if images.shape[1] > _FEW else 0
            whole = max(read + weight.nbytes + _blocked(outputs), _blocked(outputs) + outputs.nbytes)
            return whole - outputs.nbytes
    elif operation is torch.ops.aten.convolution_backward.default:
        gradient: Tensor = arguments[0]
        images, weight, strides, wanted = arguments[1], arguments[2], arguments[4], arguments[10]
        if _is_blocked(images):
            read = _blocked(images) if images.shape[1] > _FEW else 0
            in_blocks = _blocked(gradient) + weight.nbytes
            outputs = (images.nbytes if wanted[0] else 0) + (weight.nbytes if wanted[1] else 0)
            whole = outputs
            if wanted[1]:  # the gradient of the weight, which is computed last
                whole = outputs + max(read + _blocked(gradient), weight.nbytes)
            if wanted[0]:
                whole = max(whole, _blocked(images) + in_blocks, 3 * images.nbytes if max(strides) > 1 else 0)
            return whole - outputs
    return 0


def _is_blocked(images: Tensor) -> bool:
    """Whether a convolution of these copies them: on the CPU, in a type that oneDNN computes in, channels not last."""
    return (
        images.device.type == "cpu"
        and images.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and images.is_contiguous()
        and torch.backends.mkldnn.is_available()
    )


def _blocked(images: Tensor) -> int:
    """The bytes of (batch, channels, ...) with the channels filled up to whole blocks."""
    channels = images.shape[1]
    return images.nbytes // channels * (-(-channels // _BLOCK) * _BLOCK)
