"""The rows of a rollout: how they are collected, ordered, measured and released."""

import weakref

import pytest
import torch
from torch import nn

from pulsetrain.engine import Events, Every, GRPOStrategy
from pulsetrain.engine.rollouts import TextRollouts
from pulsetrain.handlers import Checkpointer
from tests.support import formulas
from tests.support.models import Tokens, trainer
from tests.support.rollouts import PROMPTS, VOCABULARY, Reward, texts
from tests.support.runs_backends import saved
from tests.support.runs_strategies import differences


def greedy_sampler(prompts, count, **options):
    return [[(sum(prompt) + number) % VOCABULARY, 1] for number, prompt in enumerate(prompts)]


class Rude:
    """A reward and a sampler that use the lists that they are given as their own."""

    def __init__(self):
        self.reward = Reward()

    def judge(self, prompts, completions):
        found = self.reward([list(each) for each in prompts], [list(each) for each in completions])
        for prompt, completion in zip(prompts, completions, strict=True):
            prompt.extend(completion)
            completion.clear()
        prompts.clear()
        return found

    def sample(self, prompts, count, **options):
        found = greedy_sampler(prompts, count)
        for prompt in prompts:
            prompt.append(5)
        prompts.clear()
        return found


def test_rewards_and_samplers_receive_copies_of_the_lists():
    rude = Rude()
    runs = [
        texts(GRPOStrategy(2), updates=3, prompts_per_rollout=5, sampler=sampler, reward=reward)
        for sampler, reward in ((greedy_sampler, Reward()), (rude.sample, rude.judge))
    ]
    for run, _, _ in runs:
        run.train()
    for polite, other in zip(*(recorded.batches for _, recorded, _ in runs), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in polite.items())
    assert runs[1][0].train_loader.prompts == PROMPTS
    assert torch.equal(runs[0][0].model.table.weight, runs[1][0].model.table.weight)


def test_a_rollout_whose_reward_failed_is_started_again_with_its_prompts():
    asked = []

    def failing(prompts, completions):
        asked.append(prompts)
        if len(asked) == 2:
            raise KeyError("no score")
        return [1.0, 2.0] * 2

    run, _, _ = texts(GRPOStrategy(2), updates=3, prompts_per_rollout=2, reward=failing)
    with pytest.raises(KeyError, match="no score"):
        run.train()
    run.train()
    whole, _, reward = texts(GRPOStrategy(2), updates=3, prompts_per_rollout=2)
    whole.train()
    assert [asked[0], *asked[2:]] == reward.prompts
    assert asked[1] == asked[2]
    assert run.train_loader.rollouts == 3


def test_a_rollout_that_is_done_is_in_no_checkpoint_and_a_resume_there_is_exact(tmp_path):
    def run(folder):
        torch.manual_seed(0)
        rollouts = TextRollouts(PROMPTS, Reward(), max_new_tokens=4, prompts_per_rollout=5)
        return trainer(
            {"max_updates": 8, "learning_rate": 0.5, "seed": 3}, model=Tokens(VOCABULARY), train_loader=rollouts,
            strategy=GRPOStrategy(2, 0.1, minibatch_epochs=2, minibatch_size=5),
            handlers=[Checkpointer(tmp_path / folder, every=Every(iterations=1), keep_last=100)],
        )  # fmt: skip

    whole, held = run("whole"), []
    whole.on(Events.ITERATION_COMPLETED)(lambda: held.append(whole.train_loader.state_dict()["rows"] is not None))
    whole.train()
    assert held == [True, True, True, False] * 2
    for cut in (3, 4):
        again = run(f"again {cut}")
        again.train(resume=saved(tmp_path / "whole", cut))
        assert differences(again, whole) == set()


@pytest.mark.parametrize("learns", [True, False], ids=["learnt from", "left out"])
def test_a_rollout_is_freed_before_the_next_is_collected(learns):
    rows, alive = [], []

    def looking(prompts, completions):
        alive.append([each() is not None for each in rows])
        return [float(number % 3) for number, _ in enumerate(prompts)]

    run, _, _ = texts(GRPOStrategy(2, minibatch_size=5), updates=4, prompts_per_rollout=5, reward=looking)
    run.on(Events.ROLLOUT_COMPLETED)(lambda: rows.extend(weakref.ref(each) for each in run.train_loader._rows.values()))
    if learns:
        run.train()
    else:  # no iteration follows its last batch: only the next rollout ends it
        batches = iter(run.train_loader)
        for _ in range(3):
            next(batches)
    assert len(alive) == 2
    assert alive[1] == [False] * 4


def test_rows_come_in_another_order_in_each_epoch():
    strategy = GRPOStrategy(2, minibatch_epochs=3, minibatch_size=2)
    run, recorded, _ = texts(strategy, updates=15, prompts_per_rollout=5)
    run.train()
    rows = [batch["log_probs"].tolist() for batch in recorded.batches]
    orders = [str(rows[at : at + 5]) for at in (0, 5, 10)]
    assert len(recorded.rollouts) == 1
    assert len(set(orders)) == 3


class Watched(Tokens):
    """Keeps whether it was in training mode each time that nothing was learnt."""

    def __init__(self):
        super().__init__(VOCABULARY)
        self.dropout, self.modes = nn.Dropout(0.5), []

    def forward(self, tokens):
        if not torch.is_grad_enabled():
            self.modes.append(self.dropout.training)
        return self.dropout(self.table(tokens))


def test_the_policy_acts_and_is_measured_without_dropout():
    model = Watched()
    run, _, _ = texts(GRPOStrategy(2, target_kl=1e9), model=model, updates=2, prompts_per_rollout=5)
    counts = {}
    run.on(Events.ROLLOUT_COMPLETED)(lambda: counts.update(acted=len(model.modes)))
    run.on(Events.POLICY_UPDATED)(lambda: counts.update(measured=len(model.modes)))
    modes = []
    run.on(Events.ITERATION_STARTED)(lambda: modes.append(model.training))
    run.train()
    assert counts["measured"] > counts["acted"] > 0
    assert modes == [True, True]
    # Observed asks once before each batch, as the model then is
    assert sum(model.modes) == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_texts_are_drawn_in_the_precision_that_is_learnt_in(precision):
    seen = []

    def sampler(prompts, count, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        return greedy_sampler(prompts, count)

    run, _, _ = texts(GRPOStrategy(2), sampler=sampler, prompts_per_rollout=5, config={"precision": precision})
    run.train()
    assert seen == [precision == "bf16"]


def test_metrics_of_texts_are_means_over_generated_tokens():
    completions = [[2, 0], [1, 1, 1, 1], [0], [4, 4, 0], [3], [5, 1, 0], [0, 2], [1], [4, 5, 5, 2], [3, 3]]
    strategy = GRPOStrategy(2, minibatch_size=5, temperature=0.8)
    run, recorded, _ = texts(
        strategy, updates=2, prompts_per_rollout=5, sampler=lambda prompts, count, **options: completions
    )
    weights, batches = [], []
    run.on(Events.POLICY_UPDATED)(
        lambda: (
            weights.append(run.model.table.weight.detach().double().numpy().copy())
            or batches.append(recorded.batches[:])
        )
    )
    run.train()
    kls, entropies = [], []
    for batch in batches[0]:
        tokens, mask = batch["input_ids"].numpy(), batch["completion_mask"].numpy()[:, 1:]
        logits = weights[0][tokens[:, :-1]] / 0.8
        now = formulas.log_probs_of(logits, tokens[:, 1:])
        kls.extend(formulas.kl_k3(batch["log_probs"].double().numpy(), now)[mask])
        entropies.extend(formulas.entropies(logits)[mask])
    assert len(kls) == sum(map(len, completions))
    (update,) = recorded.updates
    assert update.metrics["policy/kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-4)
    assert update.metrics["policy/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
