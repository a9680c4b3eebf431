"""States to save, states of earlier versions, and manifests for modified checkpoints."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from pulsetrain.engine.checkpoint.manifest import seal, unseal

STATE = {"weights": torch.arange(5.0), "step": 3, "nested": {"rates": [0.1, float("inf")]}}


def relabel(path: Path, **labels: Any) -> None:
    """Change labels of the manifest and seal it again; None removes a label."""
    manifest = {**unseal((path / "manifest.json").read_bytes()), **labels}
    (path / "manifest.json").write_bytes(seal({name: value for name, value in manifest.items() if value is not None}))


def vouch(path: Path) -> None:
    """Update the manifest to match the present state file."""
    name = state_file(path).name
    state = (path / name).read_bytes()
    relabel(path, files={name: {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}})


def state_file(path: Path) -> Path:
    """The file with a checkpoint's state, in either format."""
    (file,) = path.glob("state.*")
    return file


# ----------------------------------------------------------------------------------------------------- earlier versions


def downgraded(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A state of format 5 converted to format 3 or 4."""
    made_with, stepper, reporter = state["made_with"], state["stepper"], state["reporter"]
    older = {
        "format": number,
        **{name: made_with[name] for name in ("environment", "settings", "data")},
        "optimizer_type": made_with["optimizer"],
        **{name: state[name] for name in ("model", "optimizer", "backend", "counters", "strategy", "rng")},
        "accumulation": {**stepper["accumulation"], "gradients": stepper["gradients"]},
        "learning_rates": stepper["learning_rates"],
        "grad_norm": stepper["grad_norm"],
        "position": state["data"],
        **state["validation"],
        **{name: reporter[name] for name in ("announced_skips", "history", "losses")},
        "handlers": {key: entry["state"] for key, entry in state["handlers"].items()},
        "handler_settings": {key: entry["settings"] for key, entry in state["handlers"].items()},
    }
    if reporter["named_losses"]:  # a run with one optimizer has none
        older |= {"named_losses": reporter["named_losses"], "grad_norms": stepper["grad_norms"]}
    if number == 3:
        for name in ("strategy", "handler_settings", "data"):
            del older[name]
    return older


# ------------------------------------------------------------------------------------------------ values for hypothesis


KEYS = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.tuples)
LEAVES = KEYS | st.floats() | st.binary(min_size=1) | st.integers(-(1 << 2039) + 1, (1 << 2039) - 1)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
    ),
)

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors with any bits, shape and dtype; some are permuted or strided views."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    step = draw(st.sampled_from((1, 2)))
    count = torch.Size([*shape, step]).numel() * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    empty = torch.empty(0, dtype=dtype)
    tensor = (torch.frombuffer(content, dtype=dtype) if content else empty).reshape(*shape, step)[..., 0]
    return tensor.permute(draw(st.permutations(range(len(shape))))) if shape else tensor


TENSORS = _tensors()


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same types throughout, in the same order, and are bit for bit the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8).numpy().tobytes()
