"""Cross entropy over a large vocabulary, a chunk of classes at a time, so that memory never holds the logits twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["chunked_cross_entropy"]


def chunked_cross_entropy(
    logits: Tensor, targets: Tensor, chunk_size: int, label_smoothing: float, ignore_index: int, z_loss: float
) -> Tensor:
    """`cross_entropy` for arguments that are already checked; float32 at least, whatever the dtype of the logits."""
    options = chunk_size, label_smoothing, ignore_index, z_loss
    loss: Tensor = _ChunkedCrossEntropy.apply(logits, targets, *options)[0]  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """For each target `s - (1 - e) x[target] - e mean(x) + z s ** 2`, with s = logsumexp(x) and label smoothing e.

    It saves s and the logits, which the caller holds anyway; the backward pass recomputes the softmax.
    """

    @staticmethod
    def forward(
        logits: Tensor, targets: Tensor, chunk_size: int, label_smoothing: float, ignore_index: int, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_sum = torch.full(targets.shape, -torch.inf, dtype=dtype, device=logits.device)
        total = torch.zeros_like(log_sum)
        for chunk in logits.split(chunk_size, -1):
            wide = chunk.to(dtype)
            log_sum = torch.logaddexp(log_sum, wide.logsumexp(-1))
            if label_smoothing:
                total += wide.sum(-1)
        counted = targets != ignore_index
        at_target = logits.gather(-1, torch.where(counted, targets, 0).unsqueeze(-1)).squeeze(-1)
        nats = log_sum - (1 - label_smoothing) * at_target.to(dtype)
        if label_smoothing:
            nats -= total * (label_smoothing / logits.shape[-1])
        if z_loss:
            nats += z_loss * log_sum.square()
        return torch.where(counted, nats, 0.0).sum() / counted.sum(), log_sum

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, targets, *ctx.options = inputs
        ctx.save_for_backward(logits, targets, output[1])

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradient = _Gradient.apply(grad_loss, *ctx.saved_tensors, *ctx.options)  # type: ignore[no-untyped-call]
        return gradient, None, None, None, None, None


class _Gradient(torch.autograd.Function):
    """The gradient, a chunk at a time; a separate function, so that a second derivative fails instead of giving 0."""

    @staticmethod
    def forward(
        grad_loss: Tensor,
        logits: Tensor,
        targets: Tensor,
        log_sum: Tensor,
        chunk_size: int,
        label_smoothing: float,
        ignore_index: int,
        z_loss: float,
    ) -> Tensor:
        classes = logits.shape[-1]
        counted = targets != ignore_index
        scale = torch.where(counted, grad_loss / counted.sum(), 0.0).unsqueeze(-1)
        log_sum = log_sum.unsqueeze(-1)
        gradient = torch.empty_like(logits)
        for start in range(0, classes, chunk_size):
            chunk = logits[..., start : start + chunk_size]
            part = (chunk - log_sum).exp_()
            if z_loss:
                part *= 1 + 2 * z_loss * log_sum
            if label_smoothing:
                part -= label_smoothing / classes
            # before rounding to the dtype of the logits: bf16 has no value between 0.996 and 1
            index = targets - start
            inside = (index >= 0) & (index < chunk.shape[-1])
            share = inside.to(part.dtype) * (label_smoothing - 1)
            part.scatter_add_(-1, index.clamp(0, chunk.shape[-1] - 1).unsqueeze(-1), share.unsqueeze(-1))
            gradient[..., start : start + chunk_size] = part.mul_(scale)
        return gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.chunk_size = inputs[4]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            f"cross_entropy(chunk_size={ctx.chunk_size}): has no second derivative; leave chunk_size out to get one"
        )
