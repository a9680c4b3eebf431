"""Digests in the log show a difference at the update at which it arises."""

from __future__ import annotations

import random
import zlib
from collections import UserDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsetrain.engine import ConfigurationError, Events, Every
from pulsetrain.engine.recording import EventLog
from pulsetrain.handlers import EventRecorder, Fingerprints
from pulsetrain.handlers.recorder.fingerprints import BatchFingerprint, FingerprintEvents, StateFingerprint
from tests.support.engines import make_engine
from tests.support.models import trainer


def record(folder: Path, disturb: Any = None, **options: Any) -> EventLog:
    torch.manual_seed(0)
    fingerprints = Fingerprints(Every(updates=1), batches=True, **options)
    recorder = EventRecorder(folder)
    run = trainer({"max_epochs": 1, "optimizer": "adamw", "seed": 3}, handlers=[fingerprints, recorder])
    if disturb is not None:
        disturb(run)
    run.train()
    return EventLog(folder)


def taken(log: EventLog, event: str) -> list[dict[str, int]]:
    return [each.payload for each in log.read(event=event)]


def test_two_equal_runs_have_equal_fingerprints_and_one_for_each_update_and_batch(tmp_path: Path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    for event in ("state_fingerprinted", "batch_fingerprinted"):
        assert taken(a, event) == taken(b, event)
        assert len(taken(a, event)) == 10
        assert len({str(each) for each in taken(a, event)}) == 10  # all are different


@pytest.mark.parametrize("part", ["weights", "buffers", "optimizer", "rng"])
def test_a_change_shows_in_its_own_part_at_its_own_update(part: str, tmp_path: Path):
    def disturb(run: Any) -> None:
        @run.on(Events.OPTIMIZER_STEP_COMPLETED(once=4))
        def change(engine: Any) -> None:
            with torch.no_grad():
                if part == "weights":
                    engine.model[0].bias[0] += 1e-6
                elif part == "buffers":
                    engine.model[1].running_var[0] += 1e-6
                elif part == "rng":
                    random.random()
                else:
                    next(iter(engine.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-9

    a = taken(record(tmp_path / "a"), "state_fingerprinted")
    b = taken(record(tmp_path / "b", disturb), "state_fingerprinted")
    assert a[:3] == b[:3]
    assert {name for name in a[3] if a[3][name] != b[3][name]} == {part}


def test_a_batch_in_another_order_has_another_fingerprint(tmp_path: Path):
    def swap(run: Any) -> None:
        run.train_loader = [(x.flip(0), y) for x, y in run.train_loader]

    def keep(run: Any) -> None:
        run.train_loader = [(x, y) for x, y in run.train_loader]

    a = taken(record(tmp_path / "a", keep), "batch_fingerprinted")
    b = taken(record(tmp_path / "b", swap), "batch_fingerprinted")
    assert all(x != y for x, y in zip(a, b, strict=True))


def test_an_engine_without_a_model_is_refused():
    engine = make_engine()
    with pytest.raises(ConfigurationError, match="pass model="):
        Fingerprints().attach(engine)


@dataclass(slots=True)
class Sample:
    image: Any
    label: Any = 0
    unset: Any = field(init=False)


class Thing:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Opaque:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Other(Opaque):
    __slots__ = ()


def state_of(*buffers: torch.Tensor) -> int:
    """The digest of a model with these buffers."""
    found: list[StateFingerprint] = []
    engine, model = make_engine(), torch.nn.Module()
    for index, buffer in enumerate(buffers):
        model.register_buffer(f"b{index}", buffer)
    Fingerprints(Every(iterations=1), model=model).attach(engine)
    engine.add_event_handler(FingerprintEvents.STATE_FINGERPRINTED, lambda engine, event: found.append(event.payload))
    engine.run([0], max_epochs=1)
    assert (found[0].buffers.shape, found[0].buffers.dtype) == ((), torch.int64)
    return int(found[0].buffers)


def batch_of(batch: Any) -> int:
    found: list[BatchFingerprint] = []
    engine = make_engine()
    Fingerprints(batches=True, model=torch.nn.Module()).attach(engine)
    engine.add_event_handler(FingerprintEvents.BATCH_FINGERPRINTED, lambda engine, event: found.append(event.payload))
    engine.run([batch], max_epochs=1)
    return found[0].batch


DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_change_of_any_value_of_any_type_shows(dtype: torch.dtype):
    def digests(*values: float) -> tuple[int, int]:
        tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
        return state_of(tensor), batch_of(tensor)

    given = [(0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 1), (1, 1, 0, 0)]
    if dtype != torch.bool:
        given += [(7, 7, 7, 7), (7, 7, 1, 1), (1, 1, 1, 2)]
    for side in zip(*[digests(*values) for values in given], strict=True):
        assert len(set(side)) == len(given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2,), (4,), (1 << 20,), (3, 5)])
def test_equal_values_that_all_change_alike_show(shape: tuple[int, ...], dtype: torch.dtype):
    digests = [state_of(torch.full(shape, value, dtype=dtype)) for value in (0.0, 1.0, 1.5, 2.0, 7.0, -1.0)]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("column", range(4))
def test_a_column_of_equal_values_that_all_change_alike_shows(column: int):
    tensor = torch.ones(1 << 18, 4)
    before = state_of(tensor)
    tensor[:, column] = 7.0
    assert state_of(tensor) != before


def test_small_whole_numbers_do_not_cancel_each_other():
    digests = [state_of(torch.tensor([value, 5])) for value in range(200)]
    assert len(set(digests)) == len(digests)


def test_the_position_of_a_tensor_counts():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    assert state_of(a, b) != state_of(b, a)
    assert batch_of([a, b]) != batch_of([a.flip(0), b])


def test_only_values_count_not_how_they_lie_in_memory():
    lying = torch.arange(15.0).reshape(5, 3)
    standing = lying.t().contiguous().t()
    inside = torch.arange(-1.0, 15.0)[1:].reshape(5, 3)
    assert state_of(lying) == state_of(standing) == state_of(inside)
    assert batch_of(lying) == batch_of(standing) == batch_of(inside)


def test_a_large_tensor_is_digested_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.handlers.recorder.fingerprints._CHUNK", 4)
    tensor = torch.arange(21.0)
    before = state_of(tensor)
    tensor[-1] += 1
    assert state_of(tensor) != before


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((2, 2)),
        lambda x: x.to_sparse_bsc((2, 2)),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: x[0, 0],
        lambda x: x.requires_grad_(),
    ],
    ids=["dense", "strides", "coo", "csr", "csc", "bsr", "bsc", "conjugate", "negative", "one value", "gradient"],
)
def test_every_layout_has_a_digest_of_its_values(make: Any):
    one, two = torch.eye(4), torch.eye(4) * 2
    for digest in (state_of, batch_of):
        assert digest(make(one.clone())) == digest(make(one.clone()))
        assert digest(make(one.clone())) != digest(make(two.clone()))


def test_empty_tensors_count_for_nothing():
    assert state_of(torch.zeros(0)) == state_of() == 0
    assert state_of(torch.zeros(0), torch.ones(1)) != 0
    assert batch_of(torch.zeros(0)) == 0


def test_where_the_values_of_a_sparse_tensor_stand_shows():
    a = torch.sparse_coo_tensor([[0, 1]], [1.0, 1.0], (4,), check_invariants=True)
    b = torch.sparse_coo_tensor([[0, 2]], [1.0, 1.0], (4,), check_invariants=True)
    again = torch.sparse_coo_tensor([[1, 0]], [1.0, 1.0], (4,), check_invariants=True)
    assert state_of(a) == state_of(again) != state_of(b)
    assert batch_of(a) == batch_of(again) != batch_of(b)


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        (np.ones(3), np.zeros(3)),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3)),
        (np.array(["a", 1], dtype=object), np.array(["a", 2], dtype=object)),
        (np.array("2024-01-01", dtype="datetime64[s]"), np.array("2024-01-02", dtype="datetime64[s]")),
        (np.float32(1), np.float32(2)),
        ([1, 2], [1, 3]),
        ([1, 2], [2, 1]),
        ((1.5, True), (1.5, False)),
        (1j, 2j),
        (None, 0),
        ("a", "b"),
        (["ab", "c"], ["a", "bc"]),
        (["\udcff"], ["\udcfe"]),
        (b"a", b"b"),
        (bytearray(b"a"), bytearray(b"b")),
        (range(3), range(4)),
        (deque([1]), deque([2])),
        (Path("a"), Path("b")),
        ({1, 2}, {1, 3}),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (UserDict(a=1), UserDict(a=2)),
        (Sample(torch.ones(2)), Sample(torch.zeros(2))),
        (Sample(1, "a"), Sample(1, "b")),
        (Thing(x=torch.ones(2)), Thing(x=torch.zeros(2))),
        (Thing(x=Thing(y=[1])), Thing(x=Thing(y=[2]))),
        (Thing(x=1), Thing(y=1)),
        (Opaque(1), Other(1)),
        (Opaque, Other),
    ],
)
def test_whatever_is_in_a_batch_counts(batch: Any, other: Any):
    assert batch_of(batch) == batch_of(batch)
    assert batch_of(batch) != batch_of(other)
    assert batch_of([batch]) != batch_of([other])


def test_an_unknown_object_counts_by_its_type():
    assert batch_of(Opaque(1)) == batch_of(Opaque(2))


def test_a_tensors_part_is_the_crc_32_of_its_bytes():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert batch_of(values.t()) == zlib.crc32(values.t().contiguous().numpy().tobytes())
    assert batch_of([values, values]) == zlib.crc32(values.numpy().tobytes() * 2)


def test_what_holds_itself_and_what_is_very_deep_come_to_an_end():
    around: list[Any] = [1]
    around.extend([around] * 12)
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    thing = Thing(x=1)
    thing.self = thing
    for batch in (around, deep, thing):
        assert batch_of(batch) == batch_of(batch)
