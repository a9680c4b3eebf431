"""Averages of weights: torch's own numbers, and a model that stays bit for bit unchanged."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from pulsetrain.engine.errors import CheckpointError, ConfigurationError
from pulsetrain.engine.step.averaging import WeightAverage
from tests.support.models_averaged import RULES, Mixed, averaged, same, snapshot, train


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Mixed()


# --------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("rule", list(RULES))
def test_the_average_equals_torchs_averaged_model_bit_for_bit(rule, model):
    theirs = AveragedModel(model, multi_avg_fn=RULES[rule])
    mine = WeightAverage(model, RULES[rule])
    for number in range(50):
        train(model)
        theirs.update_parameters(model)
        mine.update()
        assert mine.number_averaged == int(theirs.n_averaged) == number + 1
        with mine.applied():
            assert same(snapshot(model), theirs.module.state_dict())


def test_one_weight_follows_the_formula():
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, get_ema_multi_avg_fn(0.5))
    for value in (8.0, 4.0, 0.0):
        nn.init.constant_(model.weight, value)
        average.update()
    with average.applied():  # 8, then (8 + 4) / 2 = 6, then (6 + 0) / 2 = 3
        assert model.weight.item() == 3.0


def test_equal_averages_in_float64_are_means_of_float64():
    model = nn.Linear(1, 1, bias=False).double()
    average = WeightAverage(model, get_swa_multi_avg_fn())
    for value in (1.0, 2.0, 6.0):
        nn.init.constant_(model.weight, value)
        average.update()
    with average.applied():
        assert model.weight.item() == pytest.approx(3.0, abs=1e-15)  # weights of float32 would be off by 4e-8


def test_the_rule_is_given_the_number_of_averages_as_a_number_of_the_host(model):
    numbers = []
    average = WeightAverage(model, lambda averaged, current, number: numbers.append(number))
    for _ in range(3):
        average.update()
    assert numbers == [1, 1, 2, 2]  # once for each dtype
    assert all(type(number) is int for number in numbers)


def test_parameters_of_whole_numbers_are_copied():
    model = nn.Module()
    model.index = nn.Parameter(torch.tensor([0, 1]), requires_grad=False)
    average = WeightAverage(model, get_swa_multi_avg_fn())  # on whole numbers, torch's rule fails
    for _ in range(3):
        average.update()
        model.index.data.add_(5)
    with average.applied():
        assert model.index.tolist() == [10, 11]
    assert model.index.tolist() == [15, 16]


@pytest.mark.parametrize("rule", list(RULES))
def test_an_update_reads_no_value_so_it_does_not_wait_for_the_device(rule):
    model = Mixed().to("meta")  # a device whose tensors have no values: reading one fails
    average = WeightAverage(model, RULES[rule])
    for _ in range(3):
        average.update()
    with pytest.raises(RuntimeError, match="meta"):
        model.first.bias[0].item()


# ------------------------------------------------------------------------------------- in the model for a while


def test_applied_puts_the_average_in_and_the_models_own_weights_back_in_the_same_tensors(model):
    average = averaged(model)
    before = snapshot(model)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.first.parameters(), lr=1.0)
    with average.applied():
        assert not same(snapshot(model), before)
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places
        assert optimizer.param_groups[0]["params"][0] is model.first.weight is model.second.weight
    assert same(snapshot(model), before)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places


@pytest.mark.slow
def test_a_compiled_model_computes_with_the_averaged_weights():
    model = nn.Linear(2, 1)
    average = WeightAverage(model, RULES["ema"])
    average.update()
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(1, 2)
    expected = model(x).detach()
    nn.init.zeros_(model.weight)
    assert not torch.equal(compiled(x), expected)
    with average.applied():
        assert torch.equal(compiled(x), expected)


def test_the_model_is_restored_even_after_an_exception(model):
    average = averaged(model)
    before = snapshot(model)

    def change_and_fail():
        train(model)  # a model in training mode moves its statistics
        model.norm.running_mean = torch.zeros(4)  # another tensor in the buffer's place
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), average.applied():
        change_and_fail()
    assert same(snapshot(model), before)


def test_what_happens_inside_leaves_the_average_alone(model):
    average = averaged(model)
    before = average.state_dict()["weights"]
    with average.applied():
        train(model)
    assert same(average.state_dict()["weights"], before)


def test_a_block_inside_another_changes_nothing(model):
    average = averaged(model)
    before = snapshot(model)
    with average.applied():
        once = snapshot(model)
        with average.applied():
            assert same(snapshot(model), once)
        assert same(snapshot(model), once)
    assert same(snapshot(model), before)


def test_two_averages_of_one_model_nest(model):
    outer, inner = averaged(model), averaged(model, "swa")
    before = snapshot(model)
    with outer.applied():
        between = snapshot(model)
        with inner.applied():
            assert not same(snapshot(model), between)
        assert same(snapshot(model), between)
    assert same(snapshot(model), before)


def test_before_the_first_update_nothing_changes_and_nothing_is_kept(model):
    average = WeightAverage(model, RULES["ema"])
    before = snapshot(model)
    with average.applied():
        assert same(snapshot(model), before)
        train(model)
        after = snapshot(model)
    assert same(snapshot(model), after)  # as without the block
    assert average.state_dict()["weights"] == {}
    with pytest.raises(RuntimeError, match=r"copy_to\(\): nothing has been averaged yet"):
        average.copy_to(Mixed())


@pytest.mark.parametrize(
    "call",
    [
        lambda average: average.update(),
        lambda average: average.state_dict(),
        lambda average: average.load_state_dict({}),
        lambda average: average.copy_to(average.model),
    ],
)
def test_what_would_take_the_average_for_the_models_own_weights_is_refused_inside(call, model):
    average = averaged(model)
    with average.applied(), pytest.raises(RuntimeError, match=r"WeightAverage\.\w+\(\): .*outside of applied"):
        call(average)
    average.update()
    assert average.number_averaged == 4


def test_buffers_kept_inside_stay_until_the_next_update(model):
    average = averaged(model)
    own = model.norm.running_mean.clone()
    with average.applied():
        model.norm.running_mean.fill_(7.0)
        average.keep_buffers()
    assert average.buffers_kept
    assert torch.equal(model.norm.running_mean, own)
    with average.applied():
        assert model.norm.running_mean.tolist() == [7.0] * 4
    average.update()
    assert not average.buffers_kept
    with average.applied():
        assert torch.equal(model.norm.running_mean, own)
    with pytest.raises(RuntimeError, match="keep_buffers"):
        average.keep_buffers()


def test_buffers_that_the_model_does_not_save_are_its_own_whatever_their_shape(model):
    average = averaged(model)
    assert "mask" not in average.state_dict()["weights"]
    model.mask = torch.zeros(9)  # derived again, longer
    with average.applied():
        assert model.mask.tolist() == [0.0] * 9
    average.update()


# ------------------------------------------------------------------------------------------ copies and states


def test_copy_to_gives_another_model_the_average_for_good(model):
    average = averaged(model)
    other = Mixed()
    average.copy_to(other)
    with average.applied():
        assert same(snapshot(model), snapshot(other))
    assert other.second.weight is other.first.weight
    average.copy_to(model)
    assert same(snapshot(model), snapshot(other))


def test_the_state_goes_through_safe_loading_and_the_average_resumes_bit_for_bit(model):
    average = averaged(model)
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    again = WeightAverage(twin, RULES["ema"])
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.number_averaged == 3
    for one in (average, again):
        torch.manual_seed(1)
        train(one.model)
        one.update()
    assert same(average.state_dict()["weights"], again.state_dict()["weights"])


def test_a_state_is_a_copy_that_later_updates_leave_alone_and_that_loads_twice(model):
    average = averaged(model)
    state = average.state_dict()
    kept = copy.deepcopy(state)
    for _ in range(2):
        train(model)
        average.update()
        average.load_state_dict(state)
        assert average.number_averaged == 3
        assert same(average.state_dict()["weights"], kept["weights"])
    average.update()
    assert same(state["weights"], kept["weights"])


def test_the_state_before_the_first_update_restarts_the_average(model):
    first = WeightAverage(model, RULES["ema"]).state_dict()
    average = averaged(model)
    average.load_state_dict(first)
    assert average.number_averaged == 0
    own = snapshot(model)
    average.update()
    train(model)
    with average.applied():
        assert same(snapshot(model), own)


def test_a_state_that_does_not_fit_is_refused_with_both_sides_and_changes_nothing(model):
    average = averaged(model)
    other = WeightAverage(nn.ModuleDict({"first": nn.Linear(4, 3).half(), "third": nn.Linear(1, 1)}), RULES["ema"])
    other.update()
    before = average.state_dict()
    with pytest.raises(CheckpointError) as caught:
        average.load_state_dict(other.state_dict())
    text = str(caught.value)
    assert "missing: norm.weight (4,) float32" in text
    assert "unexpected: third.weight (1, 1) float32" in text
    assert "shape: first.weight is (3, 4) float16 in the checkpoint, (4, 4) float32 in the model" in text
    assert average.number_averaged == 3
    assert same(average.state_dict()["weights"], before["weights"])


def test_a_state_of_another_dtype_is_refused():
    model = nn.Linear(1, 1)
    average = WeightAverage(model, RULES["ema"])
    average.update()
    with pytest.raises(CheckpointError, match=r"dtype: bias is \(1,\) float32 in the checkpoint, \(1,\) bfloat16 in"):
        WeightAverage(nn.Linear(1, 1).bfloat16(), RULES["ema"]).load_state_dict(average.state_dict())


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("update", lambda average: average.update()),
        ("applied", lambda average: average.applied().__enter__()),
        ("copy_to", lambda average: average.copy_to(average.model)),
    ],
)
def test_a_model_that_has_changed_is_refused_by_name(method, call):
    model = nn.Sequential(nn.Linear(2, 2))
    average = WeightAverage(model, RULES["ema"])
    average.update()
    model.append(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=rf"{method}\(\): .*missing: 1.bias \(2,\) float32"):
        call(average)
    assert average.number_averaged == 1


def test_the_average_follows_a_model_that_is_moved():
    seen = []
    model = nn.Linear(2, 2)
    average = WeightAverage(model, lambda mine, current, number: seen.extend(mine))
    average.update()
    model.to("meta")  # the other device that every machine has
    average.update()
    assert {tensor.device.type for tensor in seen} == {"meta"}
