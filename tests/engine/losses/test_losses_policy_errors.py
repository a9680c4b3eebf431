"""PPO's and GRPO's losses: options, masks and shapes that are refused."""

import math

import numpy
import pytest
import torch

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.losses import clip_fraction, grpo_loss, kl_estimate, ppo_policy_loss, ppo_value_loss
from tests.support.formulas import arrays_of
from tests.support.losses import LIBRARIES

EVERY = ["torch", *LIBRARIES]

LOSSES = {
    "ppo_policy_loss": lambda **options: ppo_policy_loss(*torch.zeros(3, 2, 3), **options),
    "ppo_value_loss": lambda **options: ppo_value_loss(*torch.zeros(3, 2, 3), **options),
    "clip_fraction": lambda **options: clip_fraction(*torch.zeros(2, 2, 3), **{"clip_range": 0.2, **options}),
    "grpo_loss": lambda **options: grpo_loss(
        *torch.zeros(2, 2, 3), torch.zeros(2), **{"mask": torch.ones(2, 3, dtype=torch.bool), **options}
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan, "a"])
def test_impossible_ranges_are_refused(name, value):
    arguments = ["clip_range"] if name == "ppo_value_loss" else ["clip_range", "clip_range_high"]
    for argument in arguments:
        with pytest.raises(ConfigurationError, match=rf"{name}\({argument}={value!r}\): needs a number of at least 0"):
            LOSSES[name](**{argument: value})


@pytest.mark.parametrize("name", LOSSES)
def test_a_mask_that_does_not_fit_is_refused(name):
    with pytest.raises(
        ValueError, match=rf"{name}\(.* of shape \(2, 3\), mask of shape \(2, 1\)\): needs equal shapes"
    ):
        LOSSES[name](mask=torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(TypeError, match=rf"{name}\(mask of int64\): needs booleans; pass mask != 0"):
        LOSSES[name](mask=torch.ones(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": "token"}, r"normalization='token'\): unknown; .*did you mean 'token_mean'\?"),
        ({"normalization": "dr_grpo"}, r"normalization='dr_grpo'\): needs max_length, the longest possible reply"),
        ({"normalization": "dr_grpo", "max_length": 0}, r"max_length=0\): needs a number of tokens, at least 1"),
        ({"kl_coef": -1.0}, r"kl_coef=-1.0\): needs a number of at least 0"),
        ({"kl_coef": math.inf}, r"kl_coef=inf\): needs a number of at least 0"),
        ({"kl_coef": 0.1}, r"kl_coef=0.1\): needs reference_log_probs"),
    ],
)
def test_impossible_options_of_grpo_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=rf"grpo_loss\({message}"):
        LOSSES["grpo_loss"](**options)


@pytest.mark.parametrize("library", EVERY)
def test_shapes_that_do_not_fit_are_refused(library):
    rows, turned, replies, mask = arrays_of(
        library, numpy.zeros((2, 3)), numpy.zeros((3, 2)), numpy.zeros(2), numpy.full((2, 3), True)
    )
    equal = r"of shape \(2, 3\), {} of shape \(3, 2\)\): needs equal shapes"
    with pytest.raises(ValueError, match="ppo_policy_loss.*" + equal.format("old_log_probs")):
        ppo_policy_loss(rows, turned, rows)
    with pytest.raises(ValueError, match="ppo_value_loss.*" + equal.format("old_values")):
        ppo_value_loss(rows, turned, rows)
    with pytest.raises(ValueError, match="ppo_value_loss.*" + equal.format("returns")):
        ppo_value_loss(rows, rows, turned)
    with pytest.raises(ValueError, match="kl_estimate.*" + equal.format("other_log_probs")):
        kl_estimate(rows, turned)
    with pytest.raises(ValueError, match="clip_fraction.*" + equal.format("old_log_probs")):
        clip_fraction(rows, turned, 0.2)
    with pytest.raises(ValueError, match="grpo_loss.*" + equal.format("old_log_probs")):
        grpo_loss(rows, turned, replies, mask)
    with pytest.raises(ValueError, match="grpo_loss.*" + equal.format("reference_log_probs")):
        grpo_loss(rows, rows, replies, mask, reference_log_probs=turned)
    for log_probs, advantages in ((rows, rows), (rows, turned[:, 0]), (replies, replies)):
        with pytest.raises(ValueError, match=r"needs log_probs \(batch, length\) and advantages \(batch,\)"):
            grpo_loss(log_probs, log_probs, advantages, mask)
    with pytest.raises(ConfigurationError, match=r"kl_estimate\(estimator='k4'\): unknown; choose one of k1, k2, k3"):
        kl_estimate(rows, rows, "k4")
