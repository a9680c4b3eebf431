"""Random number generators of the whole process: seeding, saving, restoring, and deriving seeds."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = ["Draws", "capture", "derive", "kept", "missing_devices", "restore", "seed_everything", "seeded"]

_DEVICES = ("cuda", "xpu", "mps")


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
    """The state of python's, numpy's, torch's CPU generator and of each CUDA, XPU and MPS device's.

    Plain containers, numbers, strings and tensors, so `torch.load(weights_only=True)` reads them back. The list of CUDA
    or XPU is empty as long as this process has not used it: asking would start it on a machine that trains on the CPU.
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
        "xpu": torch.xpu.get_rng_state_all() if torch.xpu.is_initialized() else [],
        "mps": [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else [],
    }


def missing_devices(state: Mapping[str, Any]) -> list[str]:
    """Of which devices this process sees fewer than `capture` saw generators, such as "cuda: 4 -> 2".

    Raises:
        CheckpointError: the state lacks a generator.
    """
    lacking = [name for name in ("python", "numpy", "torch", "cuda") if name not in state]
    if lacking:
        raise CheckpointError(
            f"restore(state): lacks {', '.join(lacking)}; holds {', '.join(map(str, state)) or 'nothing'}"
        )
    saved = {kind: len(state.get(kind, ())) for kind in _DEVICES}
    return [f"{kind}: {saved[kind]} -> {seen}" for kind in _DEVICES if saved[kind] > (seen := _count(kind))]


def restore(state: Mapping[str, Any]) -> None:
    """Puts the generators back to what `capture` saw; those of devices that this process does not see are left out.

    Raises:
        CheckpointError: the state lacks a generator; none was changed.
    """
    missing_devices(state)
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    keys = numpy["state"].cpu().numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    torch.set_rng_state(state["torch"].cpu())  # .cpu(): a checkpoint may have been loaded onto another device
    for kind in _DEVICES:
        for device, generator in zip(range(_count(kind)), state.get(kind, ()), strict=False):
            if kind == "mps":  # there is one
                torch.mps.set_rng_state(generator.cpu())
            else:
                getattr(torch, kind).set_rng_state(generator.cpu(), device)


def _count(kind: str) -> int:
    """How many of these devices this process sees."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    count: int = getattr(torch, kind).device_count()
    return count


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn inside, every generator is afterwards as it was."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


def derive(*parts: int) -> int:
    """A seed of 63 bits from (seed, epoch, ...), the same in each process and on each machine.

    Its lowest 32 bits, all that torch's CPU generator looks at, depend on every part as well.

    Raises:
        TypeError: a part is no whole number.
    """
    text = ",".join(str(operator.index(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


T = TypeVar("T")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's CPU generator seeded, and put back afterwards: 75 us, of which numpy takes 60.

    In a worker of a DataLoader nothing is put back: nobody else draws there, and each batch is seeded.
    """
    before = _host_state() if get_worker_info() is None else None
    _seed_host(seed)
    try:
        yield
    finally:
        if before is not None:
            _set_host_state(before)


class Draws:
    """A stream of random numbers of python, numpy and torch's CPU generator, beside the process's own.

    Args:
        seed: where it begins.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outer = _host_state()
        if self._state is None:
            _seed_host(self._seed)
        else:
            _set_host_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = _host_state()
        _set_host_state(self._outer)

    def around(self, source: Iterable[T], watched: int | None = None) -> Iterator[T]:
        """Iterate it, each item made within the stream; whoever takes the items draws outside of it.

        Args:
            watched: after so many items of which none drew anything, the rest is taken as it is: 150 us an item less.
        """
        with self:
            items, seeded = iter(source), _host_state()
        return self._each(items, seeded, watched)

    def _each(self, items: Iterator[T], seeded: tuple[Any, ...], watched: int | None) -> Iterator[T]:
        number, drew = 0, False
        while drew or watched is None or number <= watched:
            with self:
                try:
                    item = next(items)
                except StopIteration:
                    return
            if not drew and watched is not None:
                assert self._state is not None
                drew = not _same(self._state, seeded)
            number += 1
            yield item
        yield from items


def _seed_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])  # without the third numpy would draw what python does
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every accelerator as well


def _host_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _same(state: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    numpy = state[1]["state"], other[1]["state"]
    same_numpy = numpy[0]["pos"] == numpy[1]["pos"] and np.array_equal(numpy[0]["key"], numpy[1]["key"])
    return state[0] == other[0] and same_numpy and torch.equal(state[2], other[2])


def _set_host_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.default_generator.set_state(state[2])
