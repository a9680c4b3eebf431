"""Every payload has a plain form, at a bounded cost."""

from __future__ import annotations

import math
import time
from collections import UserDict
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log.records import encode
from pulsetrain.handlers.metric_values.event_values import (
    MAX_VALUES,
    EventValues,
    PlainTypes,
    are_numbers,
    encode_plain,
    summary,
)

HERE = __name__


class Text(str):
    def __str__(self) -> str:
        return self

    def isascii(self) -> bool:
        raise RuntimeError("no")


class Number(int):
    pass


class Colour(IntEnum):
    RED = 3


class NoClass:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no")


class NamelessKind(type):
    @property
    def __module__(cls) -> str:
        raise RuntimeError("no")


class Nameless(metaclass=NamelessKind):
    pass


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@dataclass
class Holder:
    value: Any


@dataclass
class Row:
    count: int
    share: float
    name: str
    known: bool


@dataclass
class Unset:
    count: int = field(init=False)


@dataclass
class Table(dict):  # type: ignore[type-arg]
    count: int = 1


@dataclass
class Shade:
    depth: int


class Shades(Shade, Enum):
    DARK = 3


def plain(value: Any) -> Any:
    values, place = EventValues(), dict[str, Any]()
    values.put(place, "a", value)
    values.settle()
    msgspec.json.encode(place)
    return place["a"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Text("a"), "a"),
        ({Text("a"): Text("b\udcff")}, {"a": "b\\udcff"}),
        (Fraction(1, 4), 0.25),
        (Fraction(10**400), {"__type__": "fractions.Fraction"}),
        (Number(3), 3),
        (Colour.RED, "RED"),
        (MuteError(), {"__type__": f"{HERE}.MuteError"}),
        (ValueError(Text("a")), {"__type__": "ValueError", "message": "a"}),
        (UserDict(a=1), {"a": 1}),
        (True, True),
        (np.True_, True),
        (torch.tensor(True), True),
        (torch.tensor([[False]]), False),
        (torch.tensor([True, False]), {"__type__": "torch.Tensor", "shape": [2], "dtype": "torch.bool"}),
        (torch.tensor(True, device="meta"), {"__type__": "torch.Tensor", "shape": [], "dtype": "torch.bool"}),
        (torch.tensor(1j), {"__type__": "torch.Tensor", "shape": [], "dtype": "torch.complex64"}),
        (1j, {"__type__": "complex"}),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, str(2**63)),
        (np.uint64(2**63), str(2**63)),
        (torch.tensor(2**63 + 1, dtype=torch.uint64), str(2**63 + 1)),
        (torch.tensor(5, dtype=torch.uint64), 5),
        ({10, 9, 2}, [2, 9, 10]),
        (frozenset({0.5, -1}), [-1, 0.5]),
        ({"b", "a"}, ["a", "b"]),
        ({1, "a"}, ["a", 1]),  # by their repr: "'a'" is less than "1"
    ],
)
def test_the_plain_form(value: Any, expected: Any) -> None:
    found = plain(value)
    assert found == expected
    assert type(found) is type(expected)


def test_what_fails_when_its_class_is_asked_for_is_summarised() -> None:
    told = {"__type__": f"{HERE}.NoClass"}
    assert plain(NoClass()) == told
    assert plain([1, NoClass()]) == [1, told]
    assert plain(Holder(NoClass())) == {"value": told}
    assert plain(Nameless()) == {"__type__": "object"}


def test_sets_of_what_has_no_total_order_come_in_one_order() -> None:
    one, two = frozenset({1}), frozenset({2})
    assert plain({one, two}) == plain({two, one}) == [[1], [2]]


def test_a_list_that_holds_itself_many_times_costs_next_to_nothing() -> None:
    wide: list[Any] = []
    wide.extend([wide] * 12)
    holder = Holder(None)
    holder.value = [holder] * 12
    start = time.process_time()
    texts = [msgspec.json.encode(plain(value)) for value in (wide, holder)]
    assert time.process_time() - start < 2  # of each 12**8 values, hours
    assert max(map(len, texts)) < 100 * MAX_VALUES


def test_a_payload_has_room_for_many_values_and_the_next_has_it_again() -> None:
    values, place = EventValues(), dict[str, Any]()
    for name in ("a", "b"):
        values.put(place, name, list(range(MAX_VALUES)))
        assert place[name] == list(range(MAX_VALUES))
    values.put(place, "c", [list(range(MAX_VALUES // 2)), [0.5] * MAX_VALUES, 7])
    assert place["c"] == [list(range(MAX_VALUES // 2)), {"__type__": "list"}, 7]


def test_measured_values_on_a_device_come_where_measured_values_belong() -> None:
    def seconds(value: float) -> torch.Tensor:
        return torch.tensor(value)

    payload = {
        "seconds": seconds(1.5),
        "loss": torch.tensor(0.5),
        "part": {"seconds": seconds(2.5), "loss": torch.tensor(0.25)},
        "parts": {"tokens_per_second": {"a": seconds(3.5)}},
    }
    values, logged = EventValues(), LoggedEvent()
    values.put_payload(logged, payload)
    values.settle()
    assert logged.payload == {"loss": 0.5, "part": {"loss": 0.25}, "parts": {}}
    assert logged.observed == {
        "seconds": 1.5,
        "part": {"seconds": 2.5},
        "parts": {"tokens_per_second": {"a": 3.5}},
    }


@pytest.mark.parametrize(
    ("payload", "left", "observed"),
    [
        ({"seconds": torch.tensor(1.5)}, None, {"seconds": 1.5}),
        ({"a": 1}, {"a": 1}, None),
        (torch.tensor(1.5), 1.5, None),
        ([{"seconds": 1.5}], [{"seconds": 1.5}], None),
        ({}, {}, None),
    ],
)
def test_payloads_are_split_in_what_must_be_reproduced_and_what_is_measured(
    payload: Any, left: Any, observed: Any
) -> None:
    values, logged = EventValues(), LoggedEvent()
    values.put_payload(logged, payload)
    values.settle()
    assert (logged.payload, logged.observed) == (left, observed)


def test_names_of_scalars_are_plain_text() -> None:
    named = EventValues().of_scalars({Text("a"): 1.0, "\udcff": math.nan})
    assert named == {"a": 1.0, "\\udcff": "NaN"}
    assert [type(name) for name in named] == [str, str]


@pytest.mark.parametrize(
    ("payload", "is_plain"),
    [
        (Row(1, 0.5, "a", True), True),
        (Row(2**63 - 1, -0.0, "", False), True),
        (Row(-(2**63), 1, "a", 1), True),  # still a number
        (Row(2**63, 0.5, "a", True), False),
        (Row(-(2**63) - 1, 0.5, "a", True), False),
        (Row(1, math.nan, "a", True), False),
        (Row(1, -math.inf, "a", True), False),
        (Row(math.nan, 0.5, "a", True), False),  # type: ignore[arg-type]
        (Row(Colour.RED, 0.5, "a", True), False),
        (Row(Number(1), 0.5, "a", True), False),
        (Row(1, np.float64(0.5), "a", True), False),
        (Row(1, 0.5, Text("a"), True), False),
        (Row(1, 0.5, b"a", True), False),  # type: ignore[arg-type]
        (Row(1, 0.5, "a", np.True_), False),  # type: ignore[arg-type]
        (Row(1, 0.5, "a", None), False),  # type: ignore[arg-type]
        (Row(torch.tensor(1), 0.5, "a", True), False),  # type: ignore[arg-type]
        (Unset(), False),
        (Table(), False),
        (Shades.DARK, False),
        (Holder(1), True),
        (Holder(b"a"), False),
        (Holder([1.0]), False),
        (1.0, False),
    ],
)
def test_a_payload_is_written_in_one_step_where_all_its_values_are_plain(payload: Any, is_plain: bool) -> None:
    types = PlainTypes()
    for _ in range(2):
        line = in_one_step(payload) if types.fits(payload) else None
        assert line == (in_general(payload) if is_plain else None)


def in_one_step(payload: object, output: Any = None) -> bytes | None:
    try:
        line = encode_plain(LoggedEvent(ord=0, engine="a", payload=payload, output=output))
    except Exception:
        return None
    return line if line.isascii() else None


def in_general(payload: object, output: Any = None) -> bytes:
    logged, values = LoggedEvent(ord=0, engine="a"), EventValues()
    if payload is not None:
        values.put_payload(logged, payload)
    if output is not None:
        logged.output = values.of_scalars(output)
    values.settle()
    return encode(logged)


@dataclass(frozen=True)
class Measured:
    norm: Tensor
    rates: tuple[float, ...] = ()
    text: str = ""


@pytest.mark.parametrize(
    "payload",
    [
        Measured(torch.tensor(0.1)),
        Measured(torch.tensor(0.1, dtype=torch.bfloat16), (0.5, 1e-300), "a"),
        Measured(torch.tensor(0.1, dtype=torch.float64, requires_grad=True)),
        Measured(0.5),  # type: ignore[arg-type]
    ],
)
def test_scalar_tensors_on_the_host_are_read_at_once(payload: Measured) -> None:
    assert PlainTypes().fits(payload)
    assert in_one_step(payload) == in_general(payload)


@pytest.mark.parametrize(
    "payload",
    [
        Measured(torch.tensor([0.1])),
        Measured(torch.tensor(1)),
        Measured(torch.tensor(math.nan)),
        Measured(torch.tensor(0.1, device="meta")),
        Measured(torch.tensor(0.1), (0.5, math.inf)),
        Measured(torch.tensor(0.1), (1, 2)),
        Measured(torch.tensor(0.1), [0.5]),  # type: ignore[arg-type]
        Measured(nn.Parameter(torch.tensor(0.1))),
    ],
)
def test_other_values_take_the_general_way(payload: Measured) -> None:
    assert not PlainTypes().fits(payload) or in_one_step(payload) is None


@pytest.mark.parametrize(
    ("output", "is_plain"),
    [
        ({"loss": 0.5, "norm": torch.tensor(0.1, dtype=torch.float16)}, True),
        ({"loss": torch.tensor(0.5, requires_grad=True)}, True),
        ({"loss": torch.tensor(-math.inf)}, False),
        ({"loss": math.nan}, False),
        ({"loss": torch.tensor([0.5])}, False),
        ({"loss": torch.tensor(True)}, False),
        ({"loss": torch.tensor(3)}, False),
        ({"loss": torch.tensor(0.5, device="meta")}, False),
        ({"loss": 1}, False),
        ({"loss": True}, False),
        ({"loss": np.float64(0.5)}, False),
        ({Text("loss"): 0.5}, False),
        ({"l\u00f6ss": 0.5}, False),
        ({1: 0.5}, False),
    ],
)
def test_an_output_is_written_in_one_step_where_all_its_values_are_plain(output: Any, is_plain: bool) -> None:
    line = in_one_step(None, output) if are_numbers(output) else None
    assert (line is not None) == is_plain
    if is_plain:
        assert line == in_general(None, output)


def test_a_summary_names_classes_themselves() -> None:
    assert summary(int) == {"__type__": "int"}
    assert summary(Holder) == {"__type__": f"{HERE}.Holder"}
    assert summary(ValueError) == {"__type__": "ValueError"}
