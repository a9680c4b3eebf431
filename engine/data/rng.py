"""The random number generators of the process: seeding, saving, restoring, and deriving seeds."""

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

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.data import numpy_stream
from pulsetrain.engine.data.numpy_stream import NumpyStream
from pulsetrain.engine.errors import CheckpointError, ConfigurationError

__all__ = [
    "Draws",
    "capture",
    "current_seed",
    "derive",
    "missing_devices",
    "preserve_rng",
    "restore",
    "seed_everything",
    "seed_step",
    "seeded",
]

_DEVICES = ("cuda", "xpu", "mps")
_asked_for: dict[int, int] = {}  # seed that torch was given -> large one with which seed_everything was called


def seed_everything(seed: int) -> None:
    """Seeds python, numpy's global generator and torch on every device.

    >>> seed_everything(7)
    >>> round(random.random(), 4), round(torch.rand(()).item(), 4)
    (0.3238, 0.5349)

    Raises:
        ConfigurationError: the seed is not a whole number in the range 0 <= seed < 2**63.
    """
    check_whole_number("seed_everything", "seed", seed, at_least=0, below=2**63)
    random.seed(seed)
    # numpy accepts 32 bits at a time, and torch's CPU generator uses only the lowest 32 bits: 2**32 would equal seed 0.
    # Smaller seeds are passed to each library unchanged.
    np.random.seed(seed if seed < 2**32 else [seed % 2**32, seed >> 32])
    torch_seed = seed
    if seed >= 2**32:
        torch_seed = derive(seed)
        _asked_for[torch_seed] = seed
    torch.manual_seed(torch_seed)


def seed_step(seed: int) -> None:
    """Seeds python, numpy's global generator, and torch's on the host and on an accelerator in use, for one step.

    It takes 30 us where `seed_everything` takes 400, most of which torch spends on looking for devices.

    >>> seed_step(7)
    >>> round(torch.rand(()).item(), 4)
    0.5349

    Args:
        seed: as `derive` returns it.
    """
    random.seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def current_seed() -> int:
    """The seed of the last `torch.manual_seed` or `seed_everything`; without one, torch draws it for each process.

    >>> _ = torch.manual_seed(7)
    >>> current_seed()
    7
    """
    seed = torch.initial_seed()
    return _asked_for.get(seed, seed % 2**63)  # below 2**63, as seed_everything needs it


def capture() -> dict[str, Any]:
    """The states of python's, numpy's and torch's CPU generators and of each CUDA, XPU and MPS device.

    The values are plain containers, numbers, strings and tensors, so `torch.load(weights_only=True)` reads them back.
    The list for CUDA or XPU is empty until this process has used the device: asking would initialise it, which costs
    time and memory on a machine that trains on the CPU.

    >>> state = capture()
    >>> first = random.random(), torch.rand(())
    >>> restore(state)
    >>> first == (random.random(), torch.rand(()))
    True
    """
    version, numbers, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] != "MT19937":
        raise ConfigurationError(
            "only numpy's default global generator, MT19937, can be saved; use a numpy.random.Generator for any other",
            "capture",
            numpy=numpy["bit_generator"],
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
    """The device kinds with fewer devices now than the state has generators for, such as "cuda: 4 -> 2".

    >>> missing_devices({**capture(), "mps": [], "cuda": [torch.get_rng_state()] * 4096})[0].split(" -> ")[0]
    'cuda: 4096'

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
    """Restores the generators from the result of `capture`; states of devices that are missing here are skipped.

    Raises:
        CheckpointError: the state lacks a generator; no generator was changed.
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
    """The number of devices of this kind that the process sees."""
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return int(getattr(torch, kind).device_count())


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restores every generator on exit, whatever was drawn inside.

    >>> seed_everything(0)
    >>> with preserve_rng():
    ...     first = torch.rand(3)
    >>> torch.equal(first, torch.rand(3))
    True
    """
    before = capture()
    try:
        yield
    finally:
        restore(before)


def derive(*parts: int) -> int:
    """A 63-bit seed from (seed, epoch, ...), the same in every process and on every machine.

    Its lowest 32 bits depend on every part, since torch's CPU generator uses no others.

    >>> derive(0, 1), derive(0, 2)
    (2024819301478721300, 9046782042526953026)

    Raises:
        TypeError: a part is not a whole number.
    """
    text = ",".join(str(operator.index(part)) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


T = TypeVar("T")

_HostState = tuple[tuple[Any, ...], NumpyStream, torch.Tensor]
"""The states of python's and torch's CPU generators, and numpy's generator while another one is in its place."""

_spare: list[np.random.MT19937] = []  # of `seeded`, as many as were ever nested


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds python's, numpy's and torch's CPU generators, and restores them on exit; takes about 40 us.

    In a DataLoader worker nothing is restored: every batch there is seeded, and nothing else draws.

    >>> with seeded(3):
    ...     first = torch.rand(2)
    >>> with seeded(3):
    ...     print(torch.equal(first, torch.rand(2)))
    True
    """
    if get_worker_info() is not None:
        _seed_host(seed)
        yield
        return
    before = _host_state()
    spare = _spare.pop() if _spare else np.random.MT19937(0)
    try:
        numpy_stream.use(NumpyStream(spare))
        _seed_host(seed)
        yield
    finally:
        _set_host_state(before)
        _spare.append(spare)


class Draws:
    """A separate stream of random numbers for python, numpy and torch's CPU generator.

    >>> draws = Draws(seed=3)
    >>> with draws:
    ...     first = random.random()
    >>> with draws:  # continues the stream
    ...     second = random.random()
    >>> with Draws(seed=3):
    ...     print((first, second) == (random.random(), random.random()))
    True

    Args:
        seed: the seed at which the stream starts.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: _HostState | None = None
        self._outer: _HostState | None = None

    def __enter__(self) -> None:
        self._outer = _host_state()
        if self._state is None:
            numpy_stream.use(NumpyStream(np.random.MT19937(0)))
            _seed_host(self._seed)
        else:
            _set_host_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = _host_state()
        assert self._outer is not None
        _set_host_state(self._outer)

    def around(self, source: Iterable[T]) -> Iterator[T]:
        """Iterates the source; each item is made inside the stream, and the consumer draws outside of it.

        It takes 40 us an item, also of a source that draws nothing: it may draw later.
        """
        with self:
            items = iter(source)
        return self._each(items)

    def _each(self, items: Iterator[T]) -> Iterator[T]:
        while True:
            with self:
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


def _seed_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])  # without the third number, numpy would draw the same as python
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds every accelerator as well


def _host_state() -> _HostState:
    return random.getstate(), numpy_stream.current(), torch.default_generator.get_state()


def _set_host_state(state: _HostState) -> None:
    random.setstate(state[0])
    numpy_stream.use(state[1])
    torch.default_generator.set_state(state[2])
