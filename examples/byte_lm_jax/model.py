"""The GPT over bytes of examples/byte_lm as a flax nnx module: the same numbers from the same weights."""

import math
from functools import partial

import jax
import numpy as np
from flax import nnx
from jax import Array

# torch's epsilon, which is ten times flax's, and its variance, which takes the mean off before it squares.
LayerNorm = partial(nnx.LayerNorm, epsilon=1e-5, use_fast_variance=False)


class Block(nnx.Module):  # type: ignore[misc]
    """Causal attention, then a feed-forward network with squared ReLU, each added to the residual stream."""

    def __init__(self, *, layers: int, width: int, heads: int, dropout: float, rngs: nnx.Rngs) -> None:
        matrix = partial(nnx.Linear, use_bias=False, rngs=rngs)
        normal = nnx.initializers.normal(0.02)
        # Two branches a layer add to the residual stream; scaled so that its variance does not grow with depth.
        adds_to_residual = nnx.initializers.normal(0.02 / math.sqrt(2 * layers))
        self.heads = heads
        self.attention_norm = LayerNorm(width, rngs=rngs)
        self.queries_keys_values = matrix(width, 3 * width, kernel_init=normal)
        self.mix = matrix(width, width, kernel_init=adds_to_residual)
        self.feed_forward_norm = LayerNorm(width, rngs=rngs)
        self.expand = matrix(width, 4 * width, kernel_init=normal)
        self.contract = matrix(4 * width, width, kernel_init=adds_to_residual)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        """Map x (batch, length, width) to the same shape; cos and sin are (length, 1, width / heads / 2)."""
        batch, length, width = x.shape
        projected = self.queries_keys_values(self.attention_norm(x))
        qkv = projected.reshape(batch, length, 3, self.heads, width // self.heads)
        queries, keys = (rotate(qkv[:, :, part], cos, sin) for part in (0, 1))
        attended = jax.nn.dot_product_attention(queries, keys, qkv[:, :, 2], is_causal=True)
        x = x + self.dropout(self.mix(attended.reshape(batch, length, width)))
        expanded = jax.nn.relu(self.expand(self.feed_forward_norm(x)))
        return x + self.dropout(self.contract(expanded * expanded))


class ByteGPT(nnx.Module):  # type: ignore[misc]
    """Next-byte language model; it begins in training mode, where dropout is at work.

    Args:
        seed: of the first weights and of dropout.

    Raises:
        ValueError: a size is not positive, width does not divide into heads of even size, or dropout is not in [0, 1).
    """

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        vocabulary: int = 256,
        seed: int = 0,
    ) -> None:
        sizes = {"layers": layers, "width": width, "heads": heads, "context": context, "vocabulary": vocabulary}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"ByteGPT({name}={size}): must be at least 1")
        if width % (2 * heads):  # rotary positions turn pairs of features
            rule = f"heads need equal, even sizes; choose a multiple of {2 * heads} as width"
            raise ValueError(f"ByteGPT(width={width}, heads={heads}): {rule}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"ByteGPT(dropout={dropout}): must be at least 0 and below 1")
        rngs, normal = nnx.Rngs(seed), nnx.initializers.normal(0.02)
        self.context, self.vocabulary, self.head_features = context, vocabulary, width // heads
        self.embedding = nnx.Embed(vocabulary, width, embedding_init=normal, rngs=rngs)
        self.blocks = nnx.List(
            Block(layers=layers, width=width, heads=heads, dropout=dropout, rngs=rngs) for _ in range(layers)
        )
        self.norm = LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, kernel_init=normal, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Score the byte that follows each position: integers (batch, length) to logits (batch, length, vocabulary).

        A token outside the vocabulary makes NaN of all that sees it: compiled code raises nothing.

        Raises:
            ValueError: tokens are not of two dimensions, or longer than context.
        """
        if tokens.ndim != 2 or tokens.shape[1] > self.context:
            rule = f"needs (batch, length), length at most {self.context}; cut the tokens or raise the model's context"
            raise ValueError(f"ByteGPT(tokens of shape {tuple(tokens.shape)}): {rule}")
        cos, sin = rotation(tokens.shape[1], self.head_features)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def generate(self, prompt: bytes, length: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Continue the prompt; returns the length new bytes, each drawn given at most the last `context` bytes.

        Temperature 0 takes the likeliest byte. The seed decides the sample.

        Raises:
            ValueError: the prompt is empty or not of the vocabulary, or length or temperature is negative.
        """
        if not prompt:
            raise ValueError("ByteGPT.generate(prompt=b''): needs at least 1 byte to continue; b'\\n' starts a line")
        if max(prompt) >= self.vocabulary:
            rule = f"has bytes past the vocabulary of {self.vocabulary}; leave them out, or use a model with all 256"
            raise ValueError(f"ByteGPT.generate(prompt={prompt!r}): {rule}")
        if length < 0 or not temperature >= 0.0:  # written so that NaN is refused too
            raise ValueError(f"ByteGPT.generate(length={length}, temperature={temperature}): must not be negative")
        writer = nnx.merge(*nnx.split(self))  # the same arrays in another module, whose mode is its own
        writer.eval()
        graph, weights = nnx.split(writer)
        text, key = bytearray(prompt), jax.random.key(seed)
        window = np.zeros((1, self.context), np.int32)  # always as wide, or each length would be compiled again
        for _ in range(length):
            recent = text[-self.context :]
            window[0, : len(recent)] = recent  # what lies behind is not seen from the last byte
            logits = _logits_at(graph, weights, window, len(recent) - 1)[:256]  # tokens past 255 are no bytes
            if temperature == 0.0:
                text.append(int(logits.argmax()))  # one host sync a byte
            else:
                key, draw = jax.random.split(key)
                text.append(int(jax.random.categorical(draw, logits / temperature)))
        return bytes(text[len(prompt) :])


def rotation(length: int, features: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the angles that each position turns its features by, float32 (length, 1, features / 2).

    By NumPy, so that compiled code holds them as constants: they are no state, and no checkpoint has them.
    """
    half = features // 2
    frequencies = np.float32(10_000.0) ** (-np.arange(half, dtype=np.float32) / np.float32(half))
    angles = np.outer(np.arange(length, dtype=np.float32), frequencies)[:, None]
    return np.cos(angles), np.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary position embedding (Su et al. 2021) of x (..., length, heads, features); cos, sin as of `rotation`."""
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    first, second = jax.numpy.split(x, 2, axis=-1)
    return jax.numpy.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)


def _score(graph: nnx.GraphDef, weights: nnx.State, tokens: Array, position: int) -> Array:
    return nnx.merge(graph, weights)(tokens)[0, position]


_logits_at = jax.jit(_score, static_argnums=0)  # compiled once a shape of the model, not once a call of generate
