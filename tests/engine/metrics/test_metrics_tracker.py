"""Histories of metrics: names, device values, provisional values, threads; and how values are read and named."""

import math
import sys
from array import array
from threading import Barrier, Thread

import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError
from pulsetrain.engine.metrics import MetricTracker, canonical, to_host


def tracker_of(**histories):
    tracker = MetricTracker()
    for name, values in histories.items():
        for value in values:
            tracker.update({name.replace("__", "/"): value})
    return tracker


# ------------------------------------------------------------------------------------------- histories


def test_values_are_stored_under_their_names_in_order():
    tracker = MetricTracker()
    tracker.update({"train/loss": 2.0, "val/loss": 3})
    tracker.update({"train/loss": torch.tensor(1.5)})
    tracker.update({"train/loss": torch.tensor([1]), "learning_rate": 0.1})
    assert tracker.get_history() == {"train/loss": [2.0, 1.5, 1.0], "val/loss": [3.0], "learning_rate": [0.1]}
    assert tracker.get_history("train/loss") == [2.0, 1.5, 1.0]
    assert tracker.get_latest() == {"train/loss": 1.0, "val/loss": 3.0, "learning_rate": 0.1}
    assert tracker.get_latest("val/loss") == 3.0
    assert all(type(value) is float for value in tracker.get_history("train/loss"))


def test_what_was_read_is_a_copy():
    tracker = tracker_of(loss=[1.0])
    tracker.get_history("loss").append(9.0)
    tracker.get_history()["loss"].append(9.0)
    tracker.state_dict()["loss"].append(9.0)
    assert tracker["loss"] == [1.0]


def test_it_is_a_mapping_from_names_to_histories():
    tracker = tracker_of(train__loss=[2.0, 1.0], val__loss=[3.0])
    assert tracker == {"train/loss": [2.0, 1.0], "val/loss": [3.0]}
    assert dict(tracker) == {"train/loss": [2.0, 1.0], "val/loss": [3.0]}
    assert (len(tracker), list(tracker), tracker["train/loss"]) == (2, ["train/loss", "val/loss"], [2.0, 1.0])
    assert ["train/loss" in tracker, "train_loss" in tracker, "loss" in tracker, 7 in tracker] == [
        True,
        True,
        False,
        False,
    ]
    assert (tracker.get("val/loss"), tracker.get("nothing"), tracker.get("nothing", [])) == ([3.0], None, [])


def test_names_may_be_asked_for_in_their_underscore_form():
    tracker = tracker_of(val__loss=[3.0, 2.0])
    assert (tracker["val_loss"], tracker.get_latest("val_loss"), tracker.get_best("val_loss")) == ([3.0, 2.0], 2.0, 2.0)


@pytest.mark.parametrize("ask", ["get_history", "get_latest", "get_best", "__getitem__"])
def test_an_unknown_name_is_answered_with_those_that_exist(ask):
    tracker = tracker_of(val__loss=[3.0], train__loss=[1.0])
    message = r"^metric='val/los': this metric does not exist; there are: train/loss, val/loss; did you mean 'val/loss'"
    with pytest.raises(MetricNotFoundError, match=message) as caught:
        getattr(tracker, ask)("val/los")
    assert isinstance(caught.value, KeyError)  # what a mapping promises
    with pytest.raises(MetricNotFoundError, match="there are: none at all"):
        getattr(MetricTracker(), ask)("val/loss")


@pytest.mark.parametrize(
    ("values", "smallest", "largest"),
    [
        ([2.0, 1.0, 3.0], 1.0, 3.0),
        ([math.nan, 2.0, math.nan, 1.0], 1.0, 2.0),
        ([-math.inf, math.inf, 0.0], -math.inf, math.inf),
    ],
)
def test_the_best_value_is_never_nan(values, smallest, largest):
    tracker = tracker_of(loss=values)
    assert (tracker.get_best("loss"), tracker.get_best("loss", mode="max")) == (smallest, largest)


def test_the_best_of_a_history_is_that_of_the_metric():
    values = [0.5, 0.75, 0.25]
    tracker = tracker_of(val__accuracy=values, val__loss=values, val__top5=values)
    assert (tracker.get_best("val/accuracy"), tracker.get_best("val/loss")) == (0.75, 0.25)
    with pytest.raises(ConfigurationError, match=r"MetricTracker\.get_best\(mode=None\)"):
        tracker.get_best("val/top5")


def test_the_best_of_nothing_but_nan_is_nan():
    assert math.isnan(tracker_of(loss=[math.nan, math.nan]).get_best("loss"))


def test_another_mode_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"MetricTracker.get_best\(mode='least'\): unknown; choose one of max, min"
    ):
        tracker_of(loss=[1.0]).get_best("loss", mode="least")


def test_its_repr_shows_names_and_latest_values():
    tracker = tracker_of(train__loss=[2.0, torch.tensor(0.123456789)], learning_rate=[3e-4])
    assert repr(tracker) == "MetricTracker(train/loss=0.123457, learning_rate=0.0003)"
    assert repr(MetricTracker()) == "MetricTracker()"


def test_reset_forgets_names_and_values():
    tracker = tracker_of(loss=[torch.tensor(1.0)])
    tracker.update({"loss": 2.0}, provisional=True)
    tracker.reset()
    assert (tracker.get_history(), tracker.state_dict(), len(tracker)) == ({}, {}, 0)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("3", TypeError, r"MetricTracker.update\(bad='3'\): needs a number or a tensor of one element"),
        (None, TypeError, r"MetricTracker.update\(bad=None\)"),
        (1j, TypeError, r"MetricTracker.update\(bad=1j\)"),
        (torch.ones(2), ValueError, r"MetricTracker.update\('bad' of shape \(2,\)\): needs one number; pass its mean"),
    ],
)
def test_what_is_not_a_number_is_refused_and_nothing_beside_it_is_kept(value, error, message):
    tracker = MetricTracker()
    with pytest.raises(error, match=message):
        tracker.update({"good": 1.0, "bad": value})
    assert len(tracker) == 0


# ------------------------------------------------------------------------------------------- on a device


def test_values_on_a_device_are_left_there_until_they_are_read():
    # a meta tensor has no values: whatever would wait for its device fails on it
    tracker = MetricTracker()
    for _ in range(2500):
        tracker.update({"loss": torch.ones((), device="meta")})
    tracker.update({"loss": torch.ones((), device="meta")}, provisional=True)
    tracker.update({"loss": torch.ones((), device="meta")}, provisional=True)
    tracker.keep_provisional()
    assert ("loss" in tracker, len(tracker), list(tracker)) == (True, 1, ["loss"])
    with pytest.raises(NotImplementedError):
        tracker.get_latest("loss")


def test_all_values_of_one_dtype_come_in_one_copy(monkeypatch):
    tracker, copies, tolist = MetricTracker(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: copies.append(len(tensor)) or tolist(tensor))
    for step in range(2500):  # more than are kept apart
        tracker.update({"loss": torch.tensor(step / 4), "count": torch.tensor(step), "rate": step / 8})
    tracker.update({"loss": torch.tensor(-1.0)}, provisional=True)
    assert tracker.get_history() == {
        "loss": [*(step / 4 for step in range(2500)), -1.0],
        "count": list(range(2500)),
        "rate": [step / 8 for step in range(2500)],
    }
    assert copies == [2501, 2500]
    assert tracker.get_latest() == {"loss": -1.0, "count": 2499.0, "rate": 2499 / 8}
    assert copies == [2501, 2500]  # nothing new to bring


def test_a_read_that_was_interrupted_loses_nothing_and_brings_nothing_back(monkeypatch):
    tracker = tracker_of(loss=[torch.tensor(3.0)], rate=[torch.tensor(4)])
    tracker.update({"loss": torch.tensor(2.5)}, provisional=True)

    def interrupted(tensor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tracker.get_history()
    tracker.update({"loss": torch.tensor(2.0)})
    assert tracker.get_history() == {"loss": [3.0, 2.0], "rate": [4.0]}


def test_a_tensor_that_changes_later_does_not_change_the_history():
    tracker, value = MetricTracker(), torch.tensor(3.0, requires_grad=True)
    tracker.update({"loss": value})
    with torch.no_grad():
        value.zero_()
    assert tracker["loss"] == [3.0]


# ------------------------------------------------------------------------------------------- provisional values


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_provisional_value_is_undone_by_the_next_of_its_name(kind):
    tracker = tracker_of(loss=[kind(3.0)], other=[kind(7.0)])
    tracker.update({"loss": kind(2.5), "other": kind(6.5)}, provisional=True)
    assert tracker.get_history() == {"loss": [3.0, 2.5], "other": [7.0, 6.5]}
    tracker.update({"loss": kind(2.25)}, provisional=True)
    tracker.update({"loss": kind(2.0)})
    assert tracker.get_history() == {"loss": [3.0, 2.0], "other": [7.0, 6.5]}


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_provisional_value_is_not_part_of_the_state(kind):
    tracker = tracker_of(loss=[kind(3.0)])
    tracker.update({"loss": kind(2.5), "new": kind(1.0)}, provisional=True)
    assert tracker.state_dict() == {"loss": [3.0]}
    assert tracker.get_latest() == {"loss": 2.5, "new": 1.0}  # saving took nothing back


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_provisional_value_that_is_kept_is_like_any_other(kind):
    tracker = tracker_of(loss=[kind(3.0)])
    tracker.update({"loss": kind(2.5)}, provisional=True)
    tracker.keep_provisional()
    tracker.update({"loss": kind(2.0)})
    assert tracker.get_history() == tracker.state_dict() == {"loss": [3.0, 2.5, 2.0]}


# ------------------------------------------------------------------------------------------- states


def test_a_saved_state_continues_where_it_was():
    tracker = tracker_of(loss=[3.0, torch.tensor(0.1), math.inf], rate=[0.1])
    state = tracker.state_dict()
    assert state == {"loss": [3.0, torch.tensor(0.1).item(), math.inf], "rate": [0.1]}
    assert all(type(values) is list for values in state.values())
    other = tracker_of(forgotten=[1.0])
    other.update({"loss": 9.0}, provisional=True)
    other.load_state_dict(state)
    other.update({"loss": 2.0})
    assert other.get_history() == {"loss": [*state["loss"], 2.0], "rate": [0.1]}
    assert state["loss"][-1] == math.inf  # what was loaded is a copy


def test_a_value_takes_the_memory_of_one_float():
    tracker = tracker_of(loss=range(10_000))
    (row,) = tracker._values.values()
    assert type(row) is array
    assert sys.getsizeof(row) < 10_000 * 8 * 1.25


# ------------------------------------------------------------------------------------------- threads


def test_updates_of_many_threads_are_all_kept_while_others_read():
    tracker, start, seen = MetricTracker(), Barrier(8), []

    def work(number):
        start.wait()
        for step in range(1000):
            value = float(step) if step % 2 else torch.tensor(float(step))
            tracker.update({"all": value, f"of/{number}": value})
            if step % 100 == 99:
                seen.append(tracker.get_history("all"))
                tracker.state_dict()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a switch between any two steps of the interpreter
    try:
        threads = [Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(tracker["all"]) == sorted(list(range(1000)) * 8)
    assert [tracker[f"of/{number}"] for number in range(8)] == [list(range(1000))] * 8
    assert len(seen) == 80
    assert not any(math.isnan(value) for values in seen for value in values)  # none was read half done


# ------------------------------------------------------------------------------------------- reading and naming


def test_values_come_to_the_host_in_order_whatever_their_types():
    tensors = [torch.tensor(0.1), torch.tensor(7), torch.tensor(0.1, dtype=torch.float64), torch.tensor(3.0)]
    assert to_host(tensors) == [torch.tensor(0.1).item(), 7, 0.1, 3.0]


def test_both_spellings_of_a_metric_lead_to_its_full_name():
    known = ["val/loss", "val/top_k", "learning_rate"]
    assert [canonical(name, known) for name in ("val/loss", "val_loss", "val_top_k", "learning_rate")] == [
        "val/loss",
        "val/loss",
        "val/top_k",
        "learning_rate",
    ]


def test_a_name_that_may_be_two_metrics_is_refused():
    with pytest.raises(MetricNotFoundError, match="may be a/b_c or a_b/c"):
        canonical("a_b_c", ["a/b_c", "a_b/c"])


def test_the_error_for_an_unknown_name_begins_with_the_place_that_asked():
    with pytest.raises(MetricNotFoundError, match=r"Place\(metric='x'\): .* does not exist; there are: val/loss"):
        canonical("x", ["val/loss"], place="Place")
    with pytest.raises(MetricNotFoundError, match="none at all"):
        canonical("x", [])
