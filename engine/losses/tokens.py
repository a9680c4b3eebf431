"""Log-probabilities of tokens and their sums over replies, the inputs of preference and policy losses."""

from __future__ import annotations

import torch
from torch import Tensor

from pulsetrain.engine.arrays import (
    Array,
    at_least_float32,
    describe_array,
    is_floating,
    log_softmax,
    misshapen,
    namespace,
    on_host,
    take_last,
)
from pulsetrain.engine.class_indices import is_integral
from pulsetrain.engine.losses.checks import readable, reject
from pulsetrain.engine.losses.masks import check_mask, zero_outside

__all__ = ["entropy", "masked_sum_log_probs", "token_log_probs"]


def token_log_probs(logits: Array, tokens: Array) -> Array:
    """`log softmax(logits)[token]` for each token, in nats.

    >>> token_log_probs(torch.zeros(1, 2, 4), torch.tensor([[3, 0]]))  # -log 4 each
    tensor([[-1.3863, -1.3863]])

    Args:
        logits: shape (..., vocabulary), floating point; the logits at a position predict the token at that position.
        tokens: token ids, shape (...). Padding needs a valid token id too, any; a mask excludes it later.

    Returns:
        Shape (...), in float32 at least.

    Raises:
        ValueError: the shapes do not fit; on the CPU also: a token is outside the vocabulary. Where the values cannot
            be seen, inside `jax.jit` or on jax's accelerators, its log-probability is nan instead.
        TypeError: the tokens are not whole numbers, or the logits are.
    """
    place = "token_log_probs"
    xp = namespace(logits, tokens, place=place)
    if not logits.ndim or tokens.shape != logits.shape[:-1]:
        needs = f"needs logits (..., vocabulary) and tokens (...){_remedy(logits, tokens)}"
        raise misshapen(place, needs, logits=logits, tokens=tokens)
    if not is_integral(tokens):
        raise TypeError(f"{place}(tokens: {describe_array(tokens)}): needs whole numbers, the token ids")
    if not is_floating(logits):
        raise TypeError(f"{place}(logits: {describe_array(logits)}): needs floating point numbers")
    if isinstance(logits, Tensor):
        try:
            return take_last(log_softmax(at_least_float32(logits)), tokens.to(torch.int64))
        except (RuntimeError, IndexError):
            _check_vocabulary(place, logits, tokens)
            raise
    _check_vocabulary(place, logits, tokens)
    # inside jax.jit only nan can report a token outside the vocabulary: jax would use -1 as the last one
    known = (tokens >= 0) & (tokens < logits.shape[-1])
    log_probs = take_last(log_softmax(at_least_float32(logits)), xp.where(known, tokens, 0))
    return xp.where(known, log_probs, xp.nan)


def masked_sum_log_probs(log_probs: Array, mask: Array, average: bool = False) -> Array:
    """The sum of each row's log-probabilities where the mask is true.

    >>> log_probs, mask = torch.tensor([[-1.0, -3.0, -9.0]]), torch.tensor([[True, True, False]])
    >>> masked_sum_log_probs(log_probs, mask), masked_sum_log_probs(log_probs, mask, average=True)
    (tensor([-4.]), tensor([-2.]))

    Args:
        log_probs: shape (batch, length). Values outside the mask may be anything, even nan: neither they nor their
            gradients reach the result.
        mask: true where a token counts, shape (batch, length).
        average: divide by the number of tokens that count.

    Returns:
        Shape (batch,), in float32 at least; 0 for a row where the mask is nowhere true.

    Raises:
        ValueError: the shapes differ, or are ().
        TypeError: the mask is not boolean.
    """
    place = "masked_sum_log_probs"
    xp = namespace(log_probs, mask, place=place)
    check_mask(place, "log_probs", log_probs, mask)
    if not log_probs.ndim:
        raise ValueError(f"{place}(log_probs of shape ()): needs rows of tokens, shape (batch, length)")
    wide = at_least_float32(log_probs)
    total = xp.sum(zero_outside(wide, mask), axis=-1)
    if not average:
        return total
    count = xp.sum(xp.astype(mask, wide.dtype), axis=-1)
    return total / xp.where(count > 0, count, 1.0)


def entropy(logits: Array) -> Array:
    """Entropy of the softmax over the last dimension, in nats: `-sum(p log p)`; logits of -inf add nothing.

    >>> entropy(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))  # log 2 and 0
    tensor([0.6931, -0.0000])

    Args:
        logits: shape (..., vocabulary).

    Returns:
        Shape (...), in float32 at least.

    Raises:
        ValueError: the logits have no dimension.
        TypeError: they are not floating point numbers.
    """
    xp = namespace(logits, place="entropy")
    if not logits.ndim:
        raise ValueError("entropy(logits of shape ()): needs logits (..., vocabulary)")
    if not is_floating(logits):
        raise TypeError(f"entropy(logits: {describe_array(logits)}): needs floating point numbers")
    log_probs = log_softmax(at_least_float32(logits))
    finite = xp.where(log_probs == -xp.inf, 0.0, log_probs)  # 0 times -inf is nan
    return -xp.sum(xp.exp(log_probs) * finite, axis=-1)


def _remedy(logits: Array, tokens: Array) -> str:
    """What to pass instead, for common mistakes."""
    if not logits.ndim:
        return ""
    rows = tuple(logits.shape[:-1])
    if tuple(tokens.shape) == (*rows, 1):
        return "; pass tokens.squeeze(-1)"
    if rows and tuple(tokens.shape) == (*rows[:-1], rows[-1] + 1):
        return "; pass tokens[..., 1:], which the logits of all positions but the last predict"
    if tokens.ndim and tuple(tokens.shape[:-1]) == rows[:-1] and tokens.shape[-1] == rows[-1] - 1:
        return "; pass logits[..., :-1, :], since the token after the last position is unknown"
    return ""


def _check_vocabulary(place: str, logits: Array, tokens: Array) -> None:
    """Rejects ids outside 0 .. vocabulary - 1, if they can be read without waiting for an accelerator."""
    if on_host(tokens):
        ids, size = readable(tokens), logits.shape[-1]
        rule = f"needs ids from 0 to {size - 1}, as the logits have a vocabulary of {size}"
        remedy = "outside; give padding a token id, such as 0, and exclude it with a mask"
        reject(place, "tokens", ids, (ids < 0) | (ids >= size), rule, remedy)
