"""A small GPT over bytes: decoder-only, pre-norm, rotary positions, no biases in the matrices."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention, then a feed-forward network with squared ReLU, each added to the residual stream."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (batch, length, width) to the same shape; cos and sin are (length, width / heads / 2)."""
        projected: Tensor = self.queries_keys_values(self.attention_norm(x))
        qkv = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (3, batch, heads, length, features)
        queries, keys = rotate(qkv[:2], cos, sin)  # both in one call: half the small kernels
        attended = F.scaled_dot_product_attention(queries, keys, qkv[2], is_causal=True)
        mixed: Tensor = self.dropout(self.mix(attended.transpose(1, 2).flatten(2)))
        x = x + mixed
        fed_forward: Tensor = self.dropout(self.contract(F.relu(self.expand(self.feed_forward_norm(x))).square()))
        return x + fed_forward


class ByteGPT(nn.Module):
    """Next-byte language model.

    Raises:
        ValueError: a size is not positive, width does not divide into heads of even size, or dropout is not in [0, 1).
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        dropout: float = 0.0,
        vocabulary: int = 256,
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
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width=width, heads=heads, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)  # a function of the sizes: not worth saving
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Two branches a layer add to the residual stream; scaled so that its variance does not grow with depth.
                adds_to_residual = name.endswith(("mix.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds_to_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the byte that follows each position: int64 (batch, length) to logits (batch, length, vocabulary).

        Raises:
            ValueError: tokens are not of two dimensions, or longer than context.
        """
        if tokens.dim() != 2 or tokens.shape[1] > self.context:
            rule = f"needs (batch, length), length at most {self.context}; cut the tokens or raise the model's context"
            raise ValueError(f"ByteGPT.forward(tokens of shape {tuple(tokens.shape)}): {rule}")
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float = 0.8, generator: torch.Generator | None = None
    ) -> bytes:
        """Continue the prompt; returns the length new bytes, each drawn given at most the last `context` bytes.

        Temperature 0 takes the likeliest byte. The generator is a CPU one, whatever device holds the model.

        Raises:
            ValueError: the prompt is empty, or length or temperature is negative.
        """
        if not prompt:
            raise ValueError("ByteGPT.generate(prompt=b''): needs at least 1 byte to continue; b'\\n' starts a line")
        if length < 0 or not temperature >= 0.0:  # written so that NaN is refused too
            raise ValueError(f"ByteGPT.generate(length={length}, temperature={temperature}): must not be negative")
        text, was_training = bytearray(prompt), self.training
        self.eval()
        try:
            for _ in range(length):
                window = torch.tensor([list(text[-self.context :])], device=self.head.weight.device)
                logits = self(window)[0, -1, :256].float().cpu()  # one host sync a byte; tokens past 255 are no bytes
                if temperature == 0.0:
                    text.append(int(logits.argmax()))
                else:
                    text.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
        finally:
            self.train(was_training)
        return bytes(text[len(prompt) :])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (..., length, features); cos, sin (length, features / 2)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
