"""Accumulation: how many batches an update takes, and what each weighs in it."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.step.accumulation import Accumulate, Accumulation


def windows(rule, sizes, tokens=None):
    """The batches of each update, in their weights after the correction."""
    accumulation, done, update, weights = Accumulation(rule), [], 0, []
    for index, size in enumerate(sizes):
        count = tokens[index] if tokens else 0
        weights.append(accumulation.weigh(size, count, update))
        if accumulation.add(size, count, update):
            correction = accumulation.close()
            done.append([weight * correction for weight in weights])
            update, weights = update + 1, []
    return done


def test_one_batch_an_update_weighs_one():
    assert windows(Accumulate(batches=1), [4, 8, 3]) == [[1.0], [1.0], [1.0]]


def test_equal_batches_weigh_exactly_the_same_without_any_correction():
    for size in (1, 3, 7, 8, 12_345):
        accumulation = Accumulation(Accumulate(batches=3))
        for _ in range(3):
            assert accumulation.weigh(size, 0, 0) == 1 / 3
            accumulation.add(size, 0, 0)
        assert accumulation.close() == 1.0


def test_a_batch_weighs_as_much_of_the_update_as_it_is_of_the_window():
    assert windows(Accumulate(batches=2), [6, 2, 1, 3]) == [
        pytest.approx([0.75, 0.25], rel=1e-15),
        pytest.approx([0.25, 0.75], rel=1e-15),
    ]


def test_the_batches_left_over_wait():
    assert len(windows(Accumulate(batches=3), [4] * 8)) == 2


def test_tokens_are_counted_until_they_are_together():
    tokens = [10, 10, 10, 25, 30, 5]
    done = windows(Accumulate(tokens=30), tokens, tokens)
    assert done == [pytest.approx([1 / 3] * 3), pytest.approx([25 / 55, 30 / 55])]


def test_a_batch_of_more_tokens_than_asked_for_is_an_update_of_its_own():
    assert windows(Accumulate(tokens=8), [10, 9], [10, 9]) == [pytest.approx([1.0])] * 2


def test_tokens_without_a_count_of_tokens_are_refused_at_the_first_batch():
    with pytest.raises(ConfigurationError, match=r"Accumulate\(tokens=8\): the strategy counts no tokens"):
        Accumulation(Accumulate(tokens=8)).weigh(4, 0, 0)


def test_a_schedule_changes_the_number_of_batches_at_its_updates():
    done = windows(Accumulate(schedule={0: 1, 2: 3, 3: 2}), [4] * 11)
    assert [len(window) for window in done] == [1, 1, 3, 2, 2, 2]


@pytest.mark.parametrize(
    "rule",
    [
        Accumulate(batches=1),
        Accumulate(batches=4),
        Accumulate(schedule={0: 1, 2: 3, 5: 2}),
        Accumulate(schedule={0: 5}),
        Accumulate(tokens=30),
    ],
    ids=repr,
)
def test_the_forecast_is_what_happens(rule):
    for batches in range(40):
        made = len(windows(rule, [8] * batches, [8] * batches))
        assert rule.updates_in(batches, 8) == made
        needed = rule.batches_in(made, 8)
        assert needed <= batches
        assert len(windows(rule, [8] * needed, [8] * needed)) == made
        assert made == 0 or len(windows(rule, [8] * (needed - 1), [8] * (needed - 1))) == made - 1


def test_what_depends_on_unknown_token_counts_is_unknown():
    assert Accumulate(tokens=30).updates_in(10) is None
    assert Accumulate(tokens=30).batches_in(10) is None


@pytest.mark.parametrize("rule", [Accumulate(batches=3), Accumulate(tokens=20), Accumulate(schedule={0: 2, 1: 4})])
def test_a_state_taken_anywhere_continues_exactly(rule):
    sizes = [3, 5, 2, 8, 1, 9, 4, 4, 7, 6]
    whole = windows(rule, sizes, sizes)
    accumulation, done, update, weights = Accumulation(rule), [], 0, []
    for size in sizes:
        fresh = Accumulation(rule)
        fresh.load_state_dict(json.loads(json.dumps(accumulation.state_dict())))
        accumulation = fresh
        weights.append(accumulation.weigh(size, size, update))
        if accumulation.add(size, size, update):
            correction = accumulation.close()
            done.append([weight * correction for weight in weights])
            update, weights = update + 1, []
    assert done == whole


def test_a_batch_counts_once_its_gradients_are_there():
    accumulation = Accumulation(Accumulate(batches=2))
    assert accumulation.weigh(4, 0, 0) == accumulation.weigh(4, 0, 0) == 0.5  # the first attempt failed
    assert not accumulation.add(4, 0, 0)
    accumulation.weigh(4, 0, 0)
    assert accumulation.add(4, 0, 0)
    assert accumulation.close() == 1.0


@pytest.mark.parametrize(
    "before", [Accumulate(batches=4), Accumulate(tokens=100), Accumulate(schedule={0: 3})], ids=repr
)
@pytest.mark.parametrize(
    ("after", "more"), [(Accumulate(batches=1), 1), (Accumulate(batches=3), 1), (Accumulate(tokens=20), 2)], ids=repr
)
def test_a_window_begun_under_another_rule_is_finished_and_weighed_right(before, after, more):
    begun = Accumulation(before)
    sizes, weights = [6, 2, 8, 4][: 2 + more], []
    for size in sizes[:2]:
        weights.append(begun.weigh(size, size, 0))
        assert not begun.add(size, size, 0)
    resumed = Accumulation(after)
    resumed.load_state_dict(begun.state_dict())
    done = [(weights.append(resumed.weigh(size, size, 0)), resumed.add(size, size, 0))[1] for size in sizes[2:]]
    assert done == [False] * (more - 1) + [True]
    correction = resumed.close()
    assert [weight * correction for weight in weights] == pytest.approx([size / sum(sizes) for size in sizes])
    assert len(windows(after, [4] * 8, [4] * 8)) == len(_from(resumed, [4] * 8))  # and the windows after it are plain


def _from(accumulation, sizes):
    done = []
    for size in sizes:
        accumulation.weigh(size, size, 1)
        if accumulation.add(size, size, 1):
            done.append(accumulation.close())
    return done


def test_sizes_on_a_device_are_weighed_without_a_look_at_them():
    counts = [torch.tensor(3), torch.tensor(0), torch.tensor(5)]
    with CountReads() as reads:
        accumulation, weights = Accumulation(Accumulate(batches=3)), []
        for count in counts:
            weights.append(accumulation.weigh(count, 0, 0))
            done = accumulation.add(count, 0, 0)
        correction = accumulation.close()
    assert done
    assert reads.count == 0
    assert [(weight * correction).item() for weight in weights] == pytest.approx([3 / 8, 0, 5 / 8])


@pytest.mark.parametrize("rule", [Accumulate(batches=3), Accumulate(tokens=21)], ids=repr)
def test_counts_on_a_device_are_weighed_as_exactly_as_numbers(rule):
    sizes = [7, 3, 11]
    (weights,) = windows(rule, [torch.tensor(size) for size in sizes], sizes)
    assert [weight.item() for weight in weights] == pytest.approx([size / 21 for size in sizes], rel=1e-15, abs=0)


@pytest.mark.parametrize("as_size", [float, torch.tensor])
def test_batches_after_one_in_which_next_to_nothing_counts_weigh_little(as_size):
    accumulation = Accumulation(Accumulate(batches=2))
    weights = []
    for size in (1e-9, 100.0):
        weights.append(float(accumulation.weigh(as_size(size), 0, 0)))
        accumulation.add(as_size(size), 0, 0)
    correction = float(accumulation.close())
    assert max(weights) <= 100
    assert [weight * correction for weight in weights] == pytest.approx([1e-11, 1.0])


class CountReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"Accumulate\(\): needs exactly one"),
        ({"batches": 2, "tokens": 3}, r"Accumulate\(batches=2, tokens=3\): needs exactly one"),
        ({"batches": 0}, r"Accumulate\(batches=0\): needs a whole number of at least 1"),
        ({"batches": True}, r"Accumulate\(batches=True\): needs a whole number"),
        ({"tokens": 1.5}, r"Accumulate\(tokens=1.5\): needs a whole number"),
        ({"schedule": {5: 2}}, r"Accumulate\(schedule={5: 2}\): needs a mapping .* begins at update 0"),
        ({"schedule": [1, 2]}, r"Accumulate\(schedule=\[1, 2\]\): needs a mapping"),
        ({"schedule": {0: 1, 10: 0}}, r"10: 0 is not a pair"),
        ({"schedule": {0: 1, "10": 2}}, r"'10': 2 is not a pair"),
    ],
)
def test_a_bad_rule_is_refused_by_argument_and_value(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Accumulate(**arguments)


def test_batches_in_which_nothing_counts_leave_gradients_of_0_as_they_are():
    waiting = Accumulation(Accumulate(batches=2))
    nothing = torch.tensor(0)
    weights = []
    for _ in range(2):
        weights.append(waiting.weigh(nothing, 4, 0))
        waiting.add(nothing, 4, 0)
    assert [weight.item() for weight in weights] == [0.0, 0.0]
    assert torch.tensor(0.0) * waiting.close() == 0.0
