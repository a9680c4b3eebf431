"""GPT models of Megatron-Core: described by numbers, and built once the groups of processes exist."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pulsetrain.engine.argument_checks import check_bool, check_choice, check_number, check_whole_number
from pulsetrain.engine.errors import ConfigurationError, refused

__all__ = ["MegatronGPT", "build_gpt", "megatron_llama", "without_advice"]

_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}
_POSITIONS = {"learned": "learned_absolute", "rotary": "rope"}
_DTYPES = ("float32", "float64", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class MegatronGPT:
    """A GPT of Megatron-Core, as `MegatronBackend` builds it: a description, since a part of it depends on the process.

    Args:
        layers: transformer layers.
        hidden: width; a multiple of the heads.
        heads: attention heads; a multiple of the groups.
        vocabulary: tokens.
        context: the most tokens of a row.
        groups: heads of keys and values, each shared by as many heads of queries; None: as many as heads.
        feed_forward: width of the inner layer; None: four times `hidden`.
        gated: SwiGLU in place of GELU.
        norm: "layer" or "rms".
        norm_epsilon: added to the variance.
        positions: "learned" or "rotary".
        rotary_base: of the wavelengths of rotary positions.
        bias: whether linear layers have one.
        tied: whether the embedding of tokens is the output layer, too.
        dropout: of the embedding and of what each sublayer adds; the same numbers are drawn in all processes of a copy.
        attention_dropout: of the attention's weights; refused where heads are split over processes.
        dtype: of the weights: "float32", "float64" or "bfloat16".

    Raises:
        ConfigurationError: a number is out of range, or two do not fit.

    >>> MegatronGPT(layers=2, hidden=32, heads=4, vocabulary=64, context=16).inner
    128
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    context: int
    groups: int | None = None
    feed_forward: int | None = None
    gated: bool = False
    norm: str = "layer"
    norm_epsilon: float = 1e-5
    positions: str = "learned"
    rotary_base: int = 10000
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "context", "rotary_base"):
            check_whole_number("MegatronGPT", name, getattr(self, name))
        for name in ("groups", "feed_forward"):
            check_whole_number("MegatronGPT", name, getattr(self, name), or_none=True)
        for name in ("gated", "bias", "tied"):
            check_bool("MegatronGPT", name, getattr(self, name))
        for name in ("dropout", "attention_dropout", "norm_epsilon"):
            check_number("MegatronGPT", name, getattr(self, name), below=1.0)
        check_choice("MegatronGPT", "norm", self.norm, _NORMS)
        check_choice("MegatronGPT", "positions", self.positions, _POSITIONS)
        check_choice("MegatronGPT", "dtype", self.dtype, _DTYPES)
        if self.hidden % self.heads:
            raise refused(self, "needs a multiple of {heads}", "hidden", "heads")
        if self.heads % self.key_value_heads:
            raise refused(self, "needs a multiple of {groups}", "heads", "groups")
        if self.positions == "rotary" and self.hidden // self.heads % 2:
            raise refused(self, "rotary positions need an even width of each of the {heads}", "hidden", "heads")

    @property
    def inner(self) -> int:
        """Width of the inner layer."""
        return self.feed_forward or 4 * self.hidden

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.groups or self.heads

    @property
    def vocab_size(self) -> int:
        """The vocabulary, by the name that strategies read."""
        return self.vocabulary

    def check_split(self, tensor: int) -> None:
        """Refuse a number of processes that cannot share the layers out.

        Raises:
            ConfigurationError: heads, groups, inner layer or vocabulary are not a multiple of it.
        """
        widths = {
            "heads": self.heads,
            "groups": self.key_value_heads,
            "feed_forward": self.inner,
            "vocabulary": self.vocabulary,
        }
        for name, width in widths.items():
            if width % tensor:
                raise ConfigurationError(
                    f"{width} {'tokens' if name == 'vocabulary' else name} cannot be split over tensor={tensor} "
                    "processes; choose a multiple, or another number of processes",
                    "MegatronGPT",
                    **{name: width},
                )
        if tensor > 1 and self.attention_dropout:
            raise ConfigurationError(
                "processes that hold different heads would drop the same positions; set it to 0",
                "MegatronGPT",
                attention_dropout=self.attention_dropout,
            )


def megatron_llama(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    context: int,
    feed_forward: int,
    groups: int | None = None,
    norm_epsilon: float = 1e-6,
    rotary_base: int = 10000,
    tied: bool = False,
    dtype: str = "float32",
) -> MegatronGPT:
    """A description of Llama's architecture: RMSNorm, rotary positions, SwiGLU, no bias.

    >>> megatron_llama(layers=1, hidden=8, heads=2, vocabulary=16, context=8, feed_forward=24).norm
    'rms'
    """
    return MegatronGPT(
        layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, context=context, feed_forward=feed_forward,
        groups=groups, norm_epsilon=norm_epsilon, rotary_base=rotary_base, tied=tied, dtype=dtype, gated=True,
        norm="rms", positions="rotary", bias=False,
    )  # fmt: skip


@contextmanager
def without_advice() -> Iterator[None]:
    """Leave out Megatron's warnings, which recommend kernels for GPUs and concern its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build_gpt(description: MegatronGPT, tensor: int, *, sequence_parallel: bool = False) -> nn.Module:
    """Megatron's GPTModel on the CPU, with this process's part of each weight, drawn from torch's generator.

    Its parallel groups have to exist. All weights are drawn as a whole, so they do not depend on the processes.
    """
    with without_advice():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=description.layers,
            hidden_size=description.hidden,
            num_attention_heads=description.heads,
            num_query_groups=description.key_value_heads,
            ffn_hidden_size=description.inner,
            gated_linear_unit=description.gated,
            activation_func=F.silu if description.gated else F.gelu,
            normalization=_NORMS[description.norm],
            layernorm_epsilon=description.norm_epsilon,
            add_bias_linear=description.bias,
            hidden_dropout=description.dropout,
            attention_dropout=description.attention_dropout,
            tensor_model_parallel_size=tensor,
            sequence_parallel=sequence_parallel,
            use_cpu_initialization=True,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            # fused kernels, which need a GPU
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            apply_rope_fusion=False,
        )
        layer = get_gpt_layer_local_spec()
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
        layer.submodules.self_attention.submodules.core_attention = _Attention
        made: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[layer] * description.layers, layer_norm=_Norm
            ),
            vocab_size=description.vocabulary,
            max_sequence_length=description.context,
            position_embedding_type=_POSITIONS[description.positions],
            share_embeddings_and_output_weights=description.tied,
        )
        linear_with_grad_accumulation_and_async_allreduce.warned = True  # of a variable that CUDA reads
    if description.positions == "rotary":  # Megatron's moves its frequencies to a GPU
        made.rotary_pos_emb = _Rotary(description.hidden // description.heads, description.rotary_base)
    return made.to(getattr(torch, description.dtype))


class _Norm:
    """Torch's normalisation, where Megatron's layer specifications want a class."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> Any:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        made = kind(hidden_size, eps=eps)
        for each in made.parameters():
            each.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as Megatron's have it
        return made


class _Attention(nn.Module):
    """The core of an attention layer, by torch's scaled_dot_product_attention."""

    def __init__(self, config: Any, **_: object) -> None:
        super().__init__()
        self.dropout = config.attention_dropout

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: object
    ) -> Tensor:
        """From tensors of shape (length, batch, heads, width) to one of shape (length, batch, heads * width).

        Args:
            attention_mask: which positions may be seen, shape (batch, 1, length, length); None: all up to one's own.
        """
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=attention_mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


class _Rotary(nn.Module):
    """The angles of rotary positions, by the interface of Megatron's RotaryEmbedding."""

    def __init__(self, width: int, base: int) -> None:
        super().__init__()
        self.width, self.base = width, base
        self.device = torch.device("cpu")

    def get_rotary_seq_len(self, context: object, decoder: Any, hidden: Tensor, config: Any, *_: object) -> int:
        """The length of the whole row, of which sequence parallelism gives each process a part."""
        self.device = hidden.device
        return len(hidden) * (config.tensor_model_parallel_size if config.sequence_parallel else 1)

    def forward(self, length: int, **_: object) -> Tensor:
        """The angles, shape (length, 1, 1, width)."""
        steps = torch.arange(0, self.width, 2, dtype=torch.float32, device=self.device) / self.width
        frequencies = 1.0 / self.base**steps
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device=self.device), frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
