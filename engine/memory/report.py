"""The memory of a run in words: sizes, tables, and the activations by block."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from pulsetrain.engine.memory.estimate import MemoryUse
from pulsetrain.engine.memory.live_tensors import COMPONENTS

__all__ = ["by_block", "kept_lines", "size_text", "use_as_dict", "use_table"]

_ROWS = 12  # of modules


def size_text(size: int) -> str:
    """A size in words.

    >>> size_text(1_500), size_text(58_519_832), size_text(1_342_252_977_508)
    ('1.50 kB', '58.5 MB', '1,342 GB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            value = size / factor
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{size} B"


def use_table(name: str, use: MemoryUse) -> Iterator[str]:
    """The components at the peak of each phase."""
    yield f"{name:<14}" + "".join(f"{phase:>12}" for phase in use.phases)
    for component in COMPONENTS:
        sizes = [at.get(component, 0) for at in use.phases.values()]
        if any(sizes):
            yield f"{component:<14}" + "".join(f"{size_text(size):>12}" for size in sizes)
    yield f"{'together':<14}" + "".join(f"{size_text(sum(at.values())):>12}" for at in use.phases.values())


def kept_lines(use: MemoryUse) -> Iterator[str]:
    """What the forward pass leaves for the backward pass, by block."""
    yield f"kept from the forward pass: {size_text(sum(use.saved.values()))} of activations"
    groups = list(by_block(use.saved).items())
    for name, (blocks, size) in groups[:_ROWS]:
        each = f", {size_text(size // blocks)} in each of {blocks}" if blocks > 1 else ""
        yield f"  {name:<32}{size_text(size):>10}{each}"
    if len(groups) > _ROWS:
        rest = sum(size for _, (_, size) in groups[_ROWS:])
        yield f"  {f'{len(groups) - _ROWS} others':<32}{size_text(rest):>10}"


def by_block(saved: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Modules grouped by the blocks that they are in, the largest first: how many blocks, and their bytes.

    >>> by_block({"blocks.0.norm": 1, "blocks.1.norm": 2, "blocks.1.mix": 3, "head": 5})
    {'blocks.*': (2, 6), 'head': (1, 5)}
    """
    sizes: dict[str, int] = defaultdict(int)
    blocks: dict[str, set[str]] = defaultdict(set)
    for path, size in saved.items():
        found = re.match(r"((?:\D*\.)?)(\d+)(?:\.|$)", path)
        name = f"{found[1]}*" if found else path or "(the model itself)"
        sizes[name] += size
        blocks[name].add(found[2] if found else "")
    return {name: (len(blocks[name]), sizes[name]) for name in sorted(sizes, key=lambda name: -sizes[name])}


def use_as_dict(use: MemoryUse) -> dict[str, object]:
    """An estimate or a measurement as plain values."""
    return {
        "peak": use.peak,
        "peak_phase": use.peak_phase,
        "components": use.components,
        "phases": {phase: dict(at) for phase, at in use.phases.items()},
        "saved": dict(use.saved),
        "allocated": use.allocated,
        "assumed": use.assumed,
        "unknown": list(use.unknown),
    }
