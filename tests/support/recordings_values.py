"""Values of every kind that a step or event may contain, each with its form in the log."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st

from pulsetrain.engine import EventEnum

MAX_DEPTH = 8
OBSERVED = {
    "started", "completed", "terminate", "interrupt", "exception_raised", "preempted", "handler_failed",
    "checkpoint_saved", "checkpoint_loaded", "get_batch_started", "get_batch_completed", "posted",
}  # fmt: skip
SAMPLED = {"get_batch_started", "get_batch_completed", "iteration_started", "iteration_completed"}


class Case:
    """A value, and its form in the log at this depth.

    Args:
        on_device: it is a tensor or holds one: its value comes later.
    """

    def __init__(self, value: Any, plain: Callable[[int], Any], on_device: bool = False) -> None:
        self.value, self.plain, self.on_device = value, plain, on_device

    def __repr__(self) -> str:
        return f"<{self.plain(0)!r}>"  # not every value can be printed


def is_now(value: Any, plain: Any) -> Case:
    return Case(value, lambda depth: plain)


def summary(name: str, **more: Any) -> dict[str, Any]:
    return {"__type__": name, **more}


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(each):04x}" if 0xD800 <= ord(each) < 0xE000 else each for each in text)


def number(value: float) -> float | str:
    return "NaN" if math.isnan(value) else value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


class Colour(Enum):
    RED = 1


@dataclass(frozen=True, slots=True)
class Pair:
    left: Any
    right: Any


class Packed(msgspec.Struct):
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Row:
    """A payload that is annotated with numbers and text only."""

    count: int
    share: float
    name: str
    known: bool


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attribute")


class HostileMapping(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("no items")


@dataclass
class Broken:
    value: Any = field(init=False)  # which nobody sets


HERE = __name__


def cycle(kind: type) -> Case:
    value: Any = kind()
    if kind is list:
        value.append(value)
    else:
        value["self"] = value

    def plain(depth: int) -> Any:
        if depth >= MAX_DEPTH:
            return summary(kind.__name__)
        return [plain(depth + 1)] if kind is list else {"self": plain(depth + 1)}

    return Case(value, plain)


def tower(height: int) -> Case:
    value: Any = []
    for _ in range(height):
        value = [value]

    def plain(depth: int, left: int = height) -> Any:
        if depth >= MAX_DEPTH:
            return summary("list")
        return [plain(depth + 1, left - 1)] if left else []

    return Case(value, plain)


def tensor(value: torch.Tensor) -> Case:
    if value.numel() == 1 and value.dtype != torch.complex64 and not value.is_meta:
        plain = value.detach().reshape(()).tolist()
        return Case(value, lambda depth: number(plain) if isinstance(plain, float) else plain, True)
    return is_now(value, summary("torch.Tensor", shape=list(value.shape), dtype=str(value.dtype)))


floats = st.floats() | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324])
SHAPES: list[tuple[int, ...]] = [(), (1,), (1, 1), (0,), (2, 3)]
texts = st.text(max_size=6) | st.text(st.sampled_from('a"\\\n\0\ud800\udcffé€😀'), max_size=6)
whole = st.integers(-(2**63), 2**63 - 1)
numbers = st.one_of(
    floats.map(lambda x: is_now(x, number(x))),
    whole.map(lambda x: is_now(x, x)),
    st.integers(2**64, 2**80).map(lambda x: is_now(x, str(x))),
    st.floats(width=32).map(lambda x: is_now(np.float32(x), number(float(np.float32(x))))),
    floats.map(lambda x: is_now(np.float64(x), number(x))),
    st.integers(-128, 127).map(lambda x: is_now(np.int8(x), x)),
)
tensors = st.one_of(
    st.builds(lambda x, shape: tensor(torch.full(shape, x, dtype=torch.float64)), floats, st.sampled_from(SHAPES)),
    st.floats(-1e30, 1e30).map(lambda x: tensor(torch.tensor(x, dtype=torch.bfloat16, requires_grad=True))),
    whole.map(lambda x: tensor(torch.tensor(x))),
    st.sampled_from([True, 1j]).map(lambda x: tensor(torch.tensor(x))),
    st.just(tensor(torch.ones((), device="meta"))),
)
scalar_tensors = tensors.filter(lambda case: case.on_device and case.value.dtype != torch.bool)
arrays = st.sampled_from([np.ones(3), np.zeros((2, 0)), np.array([1])]).map(
    lambda x: is_now(x, summary("numpy.ndarray", shape=list(x.shape), dtype=str(x.dtype)))
)
others = st.sampled_from(
    [
        is_now(None, None),
        is_now(True, True),
        is_now(Colour.RED, "RED"),
        is_now(Path("a/b"), "a/b"),
        is_now(b"bytes", summary("bytes")),
        is_now(object(), summary("object")),
        is_now(int, summary("int")),
        is_now(1 + 2j, summary("complex")),
        is_now(10**5000, summary("int")),  # Python does not print it
        is_now(range(3), summary("range")),
        is_now({3, 1, 2}, [1, 2, 3]),
        is_now(ValueError("too \ud800"), summary("ValueError", message="too \\ud800")),
        is_now(HostileError(), summary(f"{HERE}.HostileError")),
        is_now(Hostile(), summary(f"{HERE}.Hostile")),
        is_now({Hostile()}, None),
        is_now(HostileMapping(a=1), None),
        is_now(Broken(), None),
        cycle(list),
        cycle(dict),
        tower(7),
        tower(3000),
    ]
).map(
    # what fails within is summarised as a whole
    lambda case: is_now(case.value, summary(_name(case.value))) if _fails(case.value) else case
)


def _fails(value: Any) -> bool:
    return type(value) in (HostileMapping, Broken) or (type(value) is set and any(type(x) is Hostile for x in value))


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def as_list(kind: Callable[[list[Any]], Any], inner: list[Case]) -> Case:
    value = kind([each.value for each in inner])

    def plain(depth: int) -> Any:
        return summary(_name(value)) if depth >= MAX_DEPTH else [each.plain(depth + 1) for each in inner]

    return Case(value, plain, any(each.on_device for each in inner))


def as_mapping(kind: Callable[[dict[Any, Any]], Any], inner: dict[Any, Case]) -> Case:
    value = kind({key: case.value for key, case in inner.items()})

    def plain(depth: int) -> Any:
        if depth >= MAX_DEPTH:
            return summary(_name(value))
        return {escaped(str(key)): each.plain(depth + 1) for key, each in inner.items()}

    return Case(value, plain, any(each.on_device for each in inner.values()))


def _measured(inner: dict[Any, Case]) -> dict[Any, Case]:
    """Fields that are measured."""
    first = next(iter(inner.values()), None)
    return inner if first is None else {**inner, "seconds": first, "tokens_per_second": first}


keys = st.one_of(texts, st.sampled_from([None, Path("p"), Colour.RED, "ord", "seq", "observed", "event", "c"]))
leaves = st.one_of(numbers, tensors, arrays, others, texts.map(lambda x: is_now(x, escaped(x))))


def unlike(inner: dict[Any, Case]) -> bool:
    return len({escaped(str(key)) for key in inner}) == len(inner)


def nested(inner: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    mappings = st.dictionaries(keys, inner, max_size=3).filter(unlike)
    two = st.fixed_dictionaries({"left": inner, "right": inner})
    return st.one_of(
        st.builds(as_list, st.sampled_from([list, tuple]), st.lists(inner, max_size=3)),
        mappings.map(lambda x: as_mapping(dict, x)),
        mappings.map(lambda x: as_mapping(dict, _measured(x))),
        two.map(lambda x: as_mapping(lambda fields: Pair(**fields), x)),
        two.map(lambda x: as_mapping(lambda fields: Packed(**fields), x)),
    )


cases = st.recursive(leaves, nested, max_leaves=8)
rows = st.builds(Row, whole, floats, texts, st.booleans())


class Custom(EventEnum):
    HAPPENED = "happened", Pair
    LISTED = "listed", list
    MAPPED = "mapped", dict
    COUNTED = "counted", Row
    WEIGHED = "weighed", float
    TICKED = "ticked"
    POSTED = "posted", Pair


def customs() -> st.SearchStrategy[tuple[Custom, Case]]:
    mappings = st.dictionaries(keys, cases, max_size=3).filter(unlike)
    return st.one_of(
        st.tuples(
            st.sampled_from([Custom.HAPPENED, Custom.POSTED]),
            st.builds(lambda x, y: as_mapping(lambda fields: Pair(**fields), {"left": x, "right": y}), cases, cases),
        ),
        st.tuples(st.just(Custom.LISTED), st.lists(cases, max_size=3).map(lambda x: as_list(list, x))),
        st.tuples(st.just(Custom.MAPPED), mappings.map(lambda x: as_mapping(dict, x))),
        st.tuples(
            st.just(Custom.COUNTED),
            rows.map(
                lambda row: is_now(
                    row,
                    {"count": row.count, "share": number(row.share), "name": escaped(row.name), "known": row.known},
                )
            ),
        ),
        st.tuples(st.just(Custom.WEIGHED), floats.map(lambda x: is_now(x, number(x)))),
        st.just((Custom.TICKED, is_now(None, None))),
    )


def _output(inner: dict[str, Case], *, scalars: set[str]) -> Case:
    kept = {escaped(name): case for name, case in inner.items() if name in scalars}
    return Case(
        {name: case.value for name, case in inner.items()},
        lambda depth: {name: case.plain(0) for name, case in kept.items()} or None,
        any(case.on_device for case in kept.values()),
    )


single = (numbers | scalar_tensors).map(lambda x: Case(x.value, lambda depth: {"loss": x.plain(0)}, x.on_device))
left_out = st.one_of(
    arrays, st.just(is_now([1, 2], None)), st.just(is_now({"a": {"b": 1}}, None)), st.just(is_now(None, None))
)
outputs = st.one_of(
    single,
    left_out.map(lambda x: is_now(x.value, None)),
    st.builds(
        lambda inside, outside: _output({**inside, **outside}, scalars=set(inside)),
        st.dictionaries(texts, numbers | scalar_tensors, max_size=3).filter(unlike),
        st.dictionaries(st.sampled_from(["?x", "?y"]), left_out, max_size=2),
    ),
    st.builds(
        lambda loss, more: Case(
            SimpleNamespace(loss=loss.value, metrics={"!": more.value}),
            lambda depth: {"loss": loss.plain(0), "!": more.plain(0)},
            loss.on_device or more.on_device,
        ),
        numbers | scalar_tensors,
        numbers | scalar_tensors,
    ),
)
metric_values = st.dictionaries(st.text("abc/é", min_size=1, max_size=3), numbers | tensors | arrays, max_size=2)
