"""Random number generators of the whole process: seeding, saving, restoring, and deriving seeds."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine.errors import CheckpointError, ConfigurationError

__all__ = ["capture", "derive", "restore", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seeds python, numpy's global generator and torch on every device.

    Raises:
        ConfigurationError: the seed is no whole number from 0 up to, but not including, 2**63.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ConfigurationError(f"seed_everything(seed={seed!r}): needs a whole number, at least 0 and below 2**63")
    random.seed(seed)
    # numpy takes 32 bits at a time, and torch's CPU generator looks at the lowest 32 bits alone: 2**32 would be seed 0.
    # Smaller seeds stay what each library makes of them.
    np.random.seed(seed if seed < 2**32 else [seed % 2**32, seed >> 32])
    torch.manual_seed(seed if seed < 2**32 else derive(seed))


def capture() -> dict[str, Any]:
    """The state of python's, numpy's, torch's CPU generator and of each CUDA device's.

    Plain containers, numbers, strings and tensors, so `torch.load(weights_only=True)` reads them back. CUDA's list is
    empty as long as this process has not used CUDA: asking would start it on a machine that trains on the CPU.
    """
    version, numbers, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    if numpy["bit_generator"] != "MT19937":
        raise ConfigurationError(
            f"capture(numpy={numpy['bit_generator']!r}): only numpy's default global generator, MT19937, can be saved; "
            "keep another one in a numpy.random.Generator of your own"
        )
    return {
        "python": {"version": version, "state": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "state": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore(state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Puts every generator back to what `capture` saw, or none where the state does not fit.

    Args:
        strict: more CUDA devices in the state than this process has are an error; else those it has are restored.

    Raises:
        CheckpointError: the state lacks a generator, or devices are missing.
    """
    lacking = [name for name in ("python", "numpy", "torch", "cuda") if name not in state]
    if lacking:
        raise CheckpointError(
            f"restore(state): lacks {', '.join(lacking)}; holds {', '.join(map(str, state)) or 'nothing'}"
        )
    saved, present = len(state["cuda"]), torch.cuda.device_count()
    if strict and saved > present:
        raise CheckpointError(
            f"restore(state): holds {saved} CUDA generators, and this process sees {present} CUDA devices; "
            "give it as many, or pass strict=False and go on with other random numbers"
        )
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    keys = numpy["state"].cpu().numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"].cpu())  # .cpu(): a checkpoint may have been loaded onto another device
    for device, generator in enumerate(state["cuda"][:present]):
        torch.cuda.set_rng_state(generator.cpu(), device)


def derive(*parts: int) -> int:
    """A seed of 63 bits from (seed, epoch, ...), the same in each process and on each machine.

    Its lowest 32 bits, all that torch's CPU generator looks at, depend on every part as well.

    Raises:
        TypeError: a part is no whole number.
    """
    text = ",".join(str(operator.index(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
