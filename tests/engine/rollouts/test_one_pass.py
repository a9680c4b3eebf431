"""A GRPO rollout that is used once is trained on with one forward pass, and gives the same numbers as before."""

from typing import ClassVar

import pytest
import torch

from pulsetrain.engine import Events, Every, GRPOStrategy, TorchBackend
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.rollouts import TextRollouts
from pulsetrain.handlers import Checkpointer
from tests.support.models import Tokens, trainer
from tests.support.rollouts import PROMPTS, VOCABULARY, Reward, texts
from tests.support.runs_backends import saved
from tests.support.runs_strategies import differences


def sampler(prompts, count, **options):
    return [
        [(sum(prompt) + number) % VOCABULARY, *([1, 4] if number % 3 else [])] for number, prompt in enumerate(prompts)
    ]


class Counted(Tokens):
    """Counts its forward passes; a copy of it, the reference, counts into the same list."""

    passes: ClassVar[list[str]] = []

    def __init__(self):
        super().__init__(VOCABULARY)
        self.kind = "policy"

    def __deepcopy__(self, memo):
        other = Counted()
        other.load_state_dict(self.state_dict())
        other.kind = "reference"
        return other

    def forward(self, tokens):
        if len(tokens) > 1:  # the sizes of the two vocabularies are compared once, with one row
            self.passes.append(self.kind)
        return super().forward(tokens)


def passes_of(strategy, updates=3, **options):
    """The forward passes of a run whose texts are given, in order."""
    Counted.passes.clear()
    torch.manual_seed(0)
    rollouts = TextRollouts(PROMPTS, Reward(), max_new_tokens=4, prompts_per_rollout=5, sampler=sampler)
    settings = {"max_updates": updates, "learning_rate": 0.5, "seed": 3}
    trainer(settings, model=Counted(), train_loader=rollouts, strategy=strategy, **options).train()
    return list(Counted.passes)


def test_an_update_takes_one_forward_pass():
    assert passes_of(GRPOStrategy(2)) == ["policy"] * 3


@pytest.mark.parametrize(
    "options",
    [{"ratio": "sequence"}, {"objective": "cispo"}, {"advantages": "gdpo"}, {"advantages": "rloo", "ratio": "product"}],
    ids=str,
)
def test_so_does_every_member_of_the_family(options):
    assert passes_of(GRPOStrategy(2, entropy_coef=0.1, **options)) == ["policy"] * 3


def test_a_reference_takes_one_more():
    assert passes_of(GRPOStrategy(2, kl_coef=0.1)) == ["reference", "policy"] * 3


@pytest.mark.parametrize(
    ("options", "passes"),
    [({"target_kl": 9.0}, 3 * 3), ({"minibatch_epochs": 3}, 1 + 3 + 1), ({"minibatch_size": 5}, 2 * (2 + 2 + 2) - 3)],
    ids=str,
)
def test_rows_that_are_measured_or_used_again_are_scored_first(options, passes):
    assert len(passes_of(GRPOStrategy(2, **options))) == passes


def test_a_backend_of_values_computes_the_passes_separately():
    assert len(passes_of(GRPOStrategy(2), backend=TorchBackend("cpu", functional=True))) > 3


class Reading(GRPOStrategy):
    """A strategy of a user that reads the log-probabilities of the policy that acted."""

    def compute_loss(self, outputs, batch):
        assert batch.targets["log_probs"].shape == batch.targets["mask"].shape
        return super().compute_loss(outputs, batch)


def test_a_subclass_that_computes_its_own_loss_gets_the_log_probabilities():
    assert len(passes_of(Reading(2))) == 9


def learnt(strategy, **options):
    """Losses, gradient norms and weights of four updates."""
    run, recorded, _ = texts(strategy, updates=4, prompts_per_rollout=5, sampler=sampler, **options)
    found = []
    run.on(Events.GRADIENTS_READY)(lambda: found.append(run.model.table.weight.grad.clone()))
    run.on(Events.ITERATION_COMPLETED)(lambda: found.append(run.state.output["loss"]))
    run.train()
    return run, recorded, [*found, run.model.table.weight.detach()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_coef": 0.2},
        {"temperature": 0.7, "normalization": "token_mean", "scale_rewards": "batch"},
        {"kl_coef": 0.1, "temperature": 1.4, "normalization": "dr_grpo", "max_length": 4, "clip_range_high": 0.3},
        {"ratio": "sequence", "entropy_coef": 0.1},
        {"objective": "cispo", "normalization": "token_mean", "kl_coef": 0.1},
        {"advantages": "rloo", "ratio": "product", "temperature": 0.8},
        {"advantages": "gdpo", "entropy_coef": 0.2},
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_separate_passes(options):
    _, _, together = learnt(GRPOStrategy(2, **options))
    _, _, apart = learnt(GRPOStrategy(2, target_kl=1e9, **options))
    assert len(together) == len(apart) == 9
    for mine, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_its_metrics_are_those_of_the_policy_that_acted():
    run, recorded, _ = learnt(GRPOStrategy(2, kl_coef=0.2))
    apart, separate, _ = learnt(GRPOStrategy(2, kl_coef=0.2, target_kl=1e9))
    for update, before, rollout in zip(recorded.updates, recorded.metrics, separate.rollouts, strict=True):
        assert update.metrics["policy/kl"] == update.metrics["policy/clip_fraction"] == 0.0
        assert update.metrics["policy/entropy"] == pytest.approx(before["entropy"], abs=1e-6)
        expected = rollout.metrics["rollout/reference_kl"]
        assert update.metrics["rollout/reference_kl"] == pytest.approx(expected, abs=1e-6)
    assert run.history.keys() == apart.history.keys()
    assert run.history["rollout/reference_kl"] == pytest.approx(apart.history["rollout/reference_kl"], abs=1e-6)


def started(folder, accumulate=1, **options):
    torch.manual_seed(0)
    rollouts = TextRollouts(PROMPTS, Reward(), max_new_tokens=4, prompts_per_rollout=5)
    settings = {"max_iterations": 6, "learning_rate": 0.5, "seed": 3, "accumulate": accumulate}
    return trainer(
        settings, model=Tokens(VOCABULARY), train_loader=rollouts, strategy=GRPOStrategy(2, 0.1, **options),
        handlers=[Checkpointer(folder, every=Every(iterations=1), keep_last=100)],
    )  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resume_is_exact(accumulate, tmp_path):
    whole = started(tmp_path / "whole", accumulate)
    whole.train()
    for cut in (2, 3):
        again = started(tmp_path / f"again {cut}", accumulate)
        again.train(resume=saved(tmp_path / "whole", cut))
        assert differences(again, whole) == set()


def test_rows_without_log_probabilities_are_not_used_twice(tmp_path):
    run = started(tmp_path / "run")
    run.train_loader.rollouts = 1
    state = run.train_loader.state_dict() | {"rows": {"input_ids": torch.ones(10, 4)}}
    run.train_loader.load_state_dict(state)
    other = started(tmp_path / "other", minibatch_epochs=2)
    with pytest.raises(CheckpointError, match=r"^TextRollouts: .* was to be used once"):
        other.train_loader.load_state_dict(state)
