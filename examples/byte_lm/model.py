"""A small GPT over bytes: decoder-only, pre-norm, rotary positions, no biases in the matrices."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Draw = Callable[[list[int], Tensor], tuple[list[int], list[bool]]]
"""`draw(rows, logits)`: a token for each row, from logits (rows, vocabulary), and whether the row ends with it."""


class Cache:
    """The keys and values of the tokens read so far, so that each token is read only once; memory is allocated once."""

    def __init__(self, *, rows: int, columns: int, device: torch.device) -> None:
        self.columns = columns
        self.position_ids = torch.empty(rows, 0, dtype=torch.int64, device=device)  # of the tokens read so far
        self._memory: dict[Block, Tensor] = {}  # (2, rows, heads, columns, features)

    def add(self, block: "Block", keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new columns, (rows, heads, new columns, features); returns keys and values of all columns."""
        if block not in self._memory:
            self._memory[block] = keys.new_empty(2, *keys.shape[:2], self.columns, keys.shape[3])
        memory, read = self._memory[block], self.position_ids.shape[1]
        memory[0, :, :, read - keys.shape[2] : read] = keys
        memory[1, :, :, read - keys.shape[2] : read] = values
        return memory[0, :, :, :read], memory[1, :, :, :read]

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows."""
        kept = torch.tensor(rows, dtype=torch.int64, device=self.position_ids.device)
        self.position_ids = self.position_ids[kept]
        # index_select, not [:, kept]: it copies whole rows, which is four times as fast
        self._memory = {block: memory.index_select(1, kept) for block, memory in self._memory.items()}


class Block(nn.Module):
    """Causal attention, then a feed-forward network with squared ReLU, each added to the residual stream."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.features = width // heads  # of a head; how many of them are computed here depends on the processes
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Map x (batch, length, width) to the same shape; cos and sin are (length, width / heads / 2).

        With several documents in a row, they are (batch, 1, length, ...), and the mask (batch, 1, length, columns) says
        what each position attends to. Without a mask, it attends to itself and all earlier positions.
        """
        projected: Tensor = self.queries_keys_values(self.attention_norm(x))
        qkv = projected.unflatten(-1, (3, -1, self.features)).permute(2, 0, 3, 1, 4)  # (3, batch, heads, length, ...)
        queries, keys = rotate(qkv[:2], cos, sin)  # both in one call: half as many small kernels
        values = qkv[2]
        if cache is not None:
            keys, values = cache.add(self, keys, values)
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=mask is None)
        mixed: Tensor = self.dropout(self.mix(attended.transpose(1, 2).flatten(2)))
        x = x + mixed
        fed_forward: Tensor = self.dropout(self.contract(F.relu(self.expand(self.feed_forward_norm(x))).square()))
        return x + fed_forward


class ByteGPT(nn.Module):
    """Next-byte language model.

    Raises:
        ValueError: a size is not positive, width does not divide into heads of even size, or dropout is not in [0, 1).
    """

    pipeline_plan = "blocks"  # the layers that several processes can share out, see docs/model_parallel.md

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
        if width % (2 * heads):  # rotary positions rotate pairs of features
            rule = f"heads need equal, even sizes; choose a multiple of {2 * heads} as width"
            raise ValueError(f"ByteGPT(width={width}, heads={heads}): {rule}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"ByteGPT(dropout={dropout}): must be at least 0 and below 1")
        super().__init__()
        self.context, self.heads = context, heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width=width, heads=heads, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)  # depends only on the sizes: not worth saving
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Each layer adds two branches to the residual stream: scaled so that its variance stays the same.
                adds_to_residual = name.endswith(("mix.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds_to_residual else 0.02)

    @property
    def tensor_plan(self) -> dict[str, object]:
        """How several processes compute each layer together (`Topology(tensor=2)`)."""
        return {
            "embedding": "sequence_split",  # this and "sequence" count with sequence_parallel=True alone
            "blocks.*.*_norm": "sequence",
            "blocks.*.queries_keys_values": {"style": "colwise", "parts": 3, "units": self.heads},
            "blocks.*.mix": "rowwise",
            "blocks.*.expand": "colwise",
            "blocks.*.contract": "rowwise",
            "norm": "sequence",
            "head": {"style": "colwise", "gather": True},
        }

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Score the byte that follows each position: int64 (batch, length) to logits (batch, length, vocabulary).

        Args:
            position_ids: each token's position in its document, (batch, length), from 0 and below context. A document
                begins wherever a position is not the previous one plus 1, and does not attend to other documents in
                its row. With None, each row is one document.
            cache: the tokens read before; input_ids follow them and are added to it. It needs position_ids.

        Raises:
            ValueError: input_ids do not have two dimensions or exceed the context, or position_ids do not fit them.
        """
        shape = tuple(input_ids.shape)
        if len(shape) != 2 or shape[1] > self.context:
            rule = f"needs (batch, length), length at most {self.context}; cut the tokens or raise the model's context"
            raise ValueError(f"ByteGPT.forward(input_ids of shape {shape}): {rule}")
        given = None if position_ids is None else tuple(position_ids.shape)
        if given != shape and (given is not None or cache is not None):
            rule = f"needs {shape}, as input_ids; give each token its position in its document"
            raise ValueError(f"ByteGPT.forward(position_ids of shape {given}): {rule}")
        cos, sin, mask = self.cos[: shape[1]], self.sin[: shape[1]], None
        if position_ids is not None:
            cos, sin = self.cos[position_ids][:, None], self.sin[position_ids][:, None]  # the same for each head
            if cache is not None:
                position_ids = cache.position_ids = torch.cat((cache.position_ids, position_ids), dim=1)
            mask = within_documents(position_ids, shape[1])[:, None]
        x: Tensor = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, cos, sin, mask, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float = 0.8, generator: torch.Generator | None = None
    ) -> bytes:
        """Continue the prompt; returns `length` new bytes, each sampled given at most the last `context` bytes.

        Temperature 0 takes the likeliest byte. The generator is a CPU generator, whatever the model's device.

        Raises:
            ValueError: the prompt is empty, or length or temperature is negative.
        """
        if not prompt:
            raise ValueError("ByteGPT.generate(prompt=b''): needs at least 1 byte to continue; b'\\n' starts a line")
        if length < 0 or not temperature >= 0.0:  # written so that NaN is rejected, too
            raise ValueError(f"ByteGPT.generate(length={length}, temperature={temperature}): must not be negative")
        text, was_training = bytearray(prompt), self.training
        self.eval()
        try:
            for _ in range(length):
                window = torch.tensor([list(text[-self.context :])], device=self.head.weight.device)
                logits = self(window)[0, -1, :256].float().cpu()  # a host sync per byte; tokens above 255 are not bytes
                if temperature == 0.0:
                    text.append(int(logits.argmax()))
                else:
                    text.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
        finally:
            self.train(was_training)
        return bytes(text[len(prompt) :])

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        end_token: int | None = None,
        generator: torch.Generator | None = None,
        draw: Draw | None = None,
    ) -> list[list[int]]:
        """Continue all prompts at once; returns what follows each, without the prompt.

        A row ends with end_token, after max_new_tokens, or when the tokens read to sample its last token fill the
        context. Temperature 0 takes the likeliest token. The generator is a CPU generator. With `draw`, that chooses
        the tokens and ends the rows in place of temperature, end_token and generator.

        Raises:
            ValueError: a prompt is empty, longer than context or outside the vocabulary, or a number is invalid.
        """
        if max_new_tokens < 0 or not temperature >= 0.0:
            numbers = f"max_new_tokens={max_new_tokens}, temperature={temperature}"
            raise ValueError(f"ByteGPT.sample({numbers}): must not be negative")
        vocabulary, device = self.head.out_features, self.head.weight.device
        if end_token is not None and not 0 <= end_token < vocabulary:
            rule = f"needs one of the {vocabulary} tokens, or None to end with max_new_tokens"
            raise ValueError(f"ByteGPT.sample(end_token={end_token}): {rule}")
        for row, prompt in enumerate(prompts):
            unknown = [token for token in prompt if not 0 <= token < vocabulary]
            if unknown or not 1 <= len(prompt) <= self.context:
                given = f"{len(prompt)} tokens, unknown among them {unknown[:4]}"
                rule = f"needs 1 to {self.context}, each at least 0 and below {vocabulary}; cut it or leave it out"
                raise ValueError(f"ByteGPT.sample(prompts[{row}] of {given}): {rule}")
        replies: list[list[int]] = [[] for _ in prompts]
        if not prompts or max_new_tokens == 0:
            return replies
        limits = [min(max_new_tokens, self.context + 1 - len(prompt)) for prompt in prompts]
        rows = list(range(len(prompts)))  # rows that have not ended
        # All prompts end in the same column, where the replies begin. The tokens that pad them on the left all have
        # position 0: each is a document of its own, to which no prompt attends.
        longest = max(map(len, prompts))
        padding = [[0] * (longest - len(prompt)) for prompt in prompts]
        tokens = torch.tensor([[*pad, *prompt] for pad, prompt in zip(padding, prompts, strict=True)], device=device)
        position_ids = torch.tensor([[*pad, *range(longest - len(pad))] for pad in padding], device=device)
        cache = Cache(rows=len(rows), columns=longest + max(limits) - 1, device=device)
        was_training = self.training
        self.eval()
        try:
            while rows:
                logits = self(tokens, position_ids, cache)[:, -1]
                chosen, ended = draw(rows, logits) if draw else drawn_of(logits, temperature, end_token, generator)
                for row, token in zip(rows, chosen, strict=True):
                    replies[row].append(token)
                ended = [over or len(replies[row]) == limits[row] for row, over in zip(rows, ended, strict=True)]
                if any(ended):
                    going = [index for index, has_ended in enumerate(ended) if not has_ended]
                    rows, chosen = [rows[index] for index in going], [chosen[index] for index in going]
                    cache.keep(going)
                tokens, position_ids = torch.tensor(chosen, device=device)[:, None], cache.position_ids[:, -1:] + 1
        finally:
            self.train(was_training)
        return replies


def drawn_of(
    logits: Tensor, temperature: float, end_token: int | None, generator: torch.Generator | None
) -> tuple[list[int], list[bool]]:
    """Draw a token for each row of logits (rows, vocabulary); also returns which of them are the end token."""
    logits = logits.float().cpu()  # one host sync per column
    if temperature == 0.0:
        chosen = logits.argmax(-1).tolist()
    else:
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0].tolist()
    return chosen, [token == end_token for token in chosen]


def within_documents(position_ids: Tensor, length: int) -> Tensor:
    """The columns that each of the last `length` of (batch, columns) attends to: bool (batch, length, columns).

    A column attends to itself and to earlier columns of the same document.
    """
    document = F.pad((position_ids.diff(dim=1) != 1).cumsum(1), (1, 0))
    column = torch.arange(position_ids.shape[1], device=position_ids.device)
    is_same = document[:, -length:, None] == document[:, None]
    return is_same & (column[-length:, None] >= column)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of x (..., length, features); cos, sin (length, features / 2)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
