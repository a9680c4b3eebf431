"""Checks of arguments name the place, the argument, the value and the rule."""

import math

import pytest

from pulsetrain.engine.argument_checks import check_bool, check_number, check_whole_number
from pulsetrain.engine.errors import ConfigurationError


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, math.nan])
def test_a_whole_number_is_an_integer_from_the_smallest_allowed(value):
    with pytest.raises(
        ConfigurationError, match=r"Alert\(patience=.*\): needs a whole number of at least 1$"
    ) as raised:
        check_whole_number("Alert", "patience", value)
    assert repr(value) in str(raised.value)


def test_a_whole_number_may_have_an_upper_bound():
    check_whole_number("SampleText", "seed", 2**63 - 1, at_least=0, below=2**63)
    with pytest.raises(ConfigurationError, match=rf"at least 0 and below {2**63}"):
        check_whole_number("SampleText", "seed", 2**63, at_least=0, below=2**63)


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan, True, "1", None])
def test_a_number_is_finite_and_in_its_range(value):
    check_number("Alert", "timeout", 0)
    with pytest.raises(ConfigurationError, match=r"Alert\(timeout=.*\): needs a finite number of at least 0$"):
        check_number("Alert", "timeout", value)


def test_a_number_may_have_an_upper_bound():
    with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau\(factor=1\.0\): .*at least 0 and below 1$"):
        check_number("ReduceLROnPlateau", "factor", 1.0, below=1.0)


@pytest.mark.parametrize("value", [1, 0, "True", None])
def test_a_bool_is_true_or_false(value):
    with pytest.raises(ConfigurationError, match=r"Profiler\(memory=.*\): needs True or False"):
        check_bool("Profiler", "memory", value)
