"""What rollouts give to a user's functions and take from them, what they leave behind, and in which mode they ask."""

import math
import types
import weakref

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from pulsetrain.engine import Events, Every, GRPOStrategy, PPOStrategy
from pulsetrain.engine.errors import ConfigurationError, MetricNotFoundError
from pulsetrain.engine.rollouts import EnvironmentRollouts, TextRollouts
from pulsetrain.handlers import Checkpointer
from pulsetrain.handlers.metric_values.best_value import judged_name, warn_if_never_reported
from tests.engine.rollouts.test_rollouts import PROMPTS, VOCABULARY, Reward, Valued, texts
from tests.engine.rollouts.test_rollouts_environment import Counting, Policy
from tests.engine.strategies.test_strategies_bad_input import assert_refused
from tests.support import strategy_formulas as formulas
from tests.support.on_backends import saved
from tests.support.on_strategies import differences
from tests.support.small import Tokens, trainer


def refusal(make, error=ConfigurationError):
    with pytest.raises(error) as caught:
        make()
    return str(caught.value)


def steps(environment=Counting, model=None, updates=2):
    rollouts = EnvironmentRollouts(environment, 2, 4)
    strategy = PPOStrategy(minibatch_epochs=1)
    return trainer({"max_updates": updates}, model=model or Policy(), train_loader=rollouts, strategy=strategy)


# ------------------------------------------------------------------------------------- what others do with their lists


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


def test_lists_that_a_reward_and_a_sampler_change_are_their_own():
    rude = Rude()
    runs = [
        texts(GRPOStrategy(2), updates=3, prompts_per_rollout=5, sampler=sampler, reward=reward)
        for sampler, reward in ((greedy_sampler, Reward()), (rude.sample, rude.judge))
    ]
    for run, _, _ in runs:
        run.train()
    for polite, other in zip(*(heard.batches for _, heard, _ in runs), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in polite.items())
    assert runs[1][0].train_loader.prompts == PROMPTS
    assert torch.equal(runs[0][0].model.table.weight, runs[1][0].model.table.weight)


def test_a_rollout_whose_reward_failed_is_begun_again_with_its_prompts():
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


# ------------------------------------------------------------------------------------------------------- environments


def test_each_environment_is_one_of_its_own():
    one = Counting()
    told = refusal(lambda: EnvironmentRollouts(lambda: one, 2))
    assert told.startswith("EnvironmentRollouts(environment=...): the function gives the same environment again")
    assert EnvironmentRollouts(lambda: one, 1).environments == 1
    told = refusal(lambda: EnvironmentRollouts(Counting, 2, options={"goal": 3}))
    assert told.startswith("EnvironmentRollouts(options={'goal': 3}): are for gymnasium.make")
    told = refusal(lambda: EnvironmentRollouts(lambda: 3, 2), TypeError)
    assert told.startswith("EnvironmentRollouts: int has no action_space, observation_space, reset, step; needs an env")


def test_a_step_of_four_things_is_refused():
    class Old(Counting):
        def step(self, action):
            return super().step(action)[:4]

    told = ["EnvironmentRollouts: the environment's step() gave 4 things; needs (observation, reward, terminated, "]
    assert_refused(steps(Old), TypeError, told)


def test_an_observation_that_is_no_number_names_its_environment():
    class Lost(Counting):
        def _seen(self):
            seen = super()._seen()
            if self.number % 2 == 0 and self.step_number == 2:
                seen[0] = math.nan
            return seen

    Counting.made = 0
    told = ["EnvironmentRollouts: environment 1 gave an observation that is not finite: [nan, 2.0]"]
    assert_refused(steps(Lost), ValueError, told)


@pytest.mark.parametrize("episodes", [0, -1, 1.5, True])
def test_an_evaluation_needs_an_episode(episodes):
    told = refusal(lambda: steps().train_loader.evaluate(episodes), ValueError)
    assert told == f"EnvironmentRollouts.evaluate(episodes={episodes!r}): needs a whole number of at least 1"


class Closing(Counting):
    """Knows which have been closed, and fails where it is told to."""

    closed, fails = [], False

    def step(self, action):
        if Closing.fails:
            raise OSError("the simulator went")
        return super().step(action)

    def close(self):
        Closing.closed.append(self.number)


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_closes_its_environment(monkeypatch, fails):
    monkeypatch.setattr(Closing, "closed", [])
    run = steps(Closing)
    monkeypatch.setattr(Closing, "fails", fails)
    if fails:
        with pytest.raises(OSError, match="the simulator went"):
            run.train_loader.evaluate(1)
    else:
        run.train_loader.evaluate(1)
    assert Closing.closed == [Counting.made], "the newest, and none of those of the rollouts"
    assert run.model.training


# ------------------------------------------------------------------------------------------------- what does not fit


def judge(prompts, completions):
    return [1.0] * len(prompts)


def made(**options):
    return TextRollouts(options.pop("prompts", [[1], [2]]), judge, max_new_tokens=3, **options)


@pytest.mark.parametrize("name", ["val", "returns"])
def test_nothing_is_validated_on_rollouts(name):
    given = made() if name == "val" else {name: made()}
    told = refusal(lambda: trainer({}, model=Tokens(), train_loader=made(), val_loader=given, strategy=GRPOStrategy(2)))
    assert told.startswith(
        f"Trainer(val_loader): {name!r} is TextRollouts, whose batches the policy makes for learning"
    )


@pytest.mark.parametrize("prompts", [["a text", "another"], [[1.0, 2.0]], [[1, "2"]], [1, 2], 3])
def test_prompts_are_token_numbers(prompts):
    told = refusal(lambda: made(prompts=prompts), TypeError)
    assert told.startswith("TextRollouts(prompts=")
    assert told.endswith("needs a list of token numbers for each prompt; encode texts with the model's tokenizer")


NUMBERS = [
    ("end_token", -1), ("end_token", True), ("end_token", 2.5), ("pad_token", -1), ("pad_token", None),
    ("pad_to", "x"), ("pad_to", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_tokens_and_lengths_are_whole_numbers(name, value):
    told = refusal(lambda: made(**{name: value}))
    assert told == f"TextRollouts({name}={value!r}): needs a whole number of at least 0"


def test_a_sampler_is_a_function():
    told = refusal(lambda: made(sampler=3), TypeError)
    assert told == "TextRollouts(sampler=3): needs a function of prompts and a number of tokens"


def test_a_text_is_no_longer_than_what_its_loss_is_divided_by():
    def run(length):
        strategy = GRPOStrategy(2, normalization="dr_grpo", max_length=length)
        return trainer({}, model=Tokens(), train_loader=made(), strategy=strategy)

    told = refusal(lambda: run(2))
    assert told == "GRPOStrategy(max_length=2): a text may have max_new_tokens=3; give as many at least"
    assert run(3).strategy.max_length == 3


def test_texts_that_pay_for_leaving_a_reference_have_one():
    def run(strategy):
        return trainer({}, model=Valued(), train_loader=made(), strategy=strategy)

    told = refusal(lambda: run(PPOStrategy(0.25, reference=None)))
    assert told.startswith(
        "PPOStrategy(kl_coef=0.25, reference=None): over texts it weighs the divergence from the ref"
    )
    assert run(PPOStrategy(0.0, reference=None)).strategy.kl_coef == 0.0
    steps_run = trainer({"max_updates": 1}, model=Policy(), train_loader=EnvironmentRollouts(Counting, 2, 4),
                        strategy=PPOStrategy(0.25, reference=None, minibatch_epochs=1))  # fmt: skip
    steps_run.train()  # there it is the divergence from who acted, which needs no reference


# ------------------------------------------------------------------------------------------------ what it leaves behind


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
def test_a_rollout_is_let_go_before_the_next_is_collected(learns):
    rows, alive = [], []

    def looking(prompts, completions):
        alive.append([each() is not None for each in rows])
        return [float(number % 3) for number, _ in enumerate(prompts)]

    run, _, _ = texts(GRPOStrategy(2, minibatch_size=5), updates=4, prompts_per_rollout=5, reward=looking)
    run.on(Events.ROLLOUT_COMPLETED)(lambda: rows.extend(weakref.ref(each) for each in run.train_loader._rows.values()))
    if learns:
        run.train()
    else:  # no iteration comes behind its last batch: nothing ends it but the next
        batches = iter(run.train_loader)
        for _ in range(3):
            next(batches)
    assert len(alive) == 2
    assert alive[1] == [False] * 4


def test_rows_come_in_another_order_in_each_epoch():
    strategy = GRPOStrategy(2, minibatch_epochs=3, minibatch_size=2)
    run, heard, _ = texts(strategy, updates=15, prompts_per_rollout=5)
    run.train()
    rows = [batch["log_probs"].tolist() for batch in heard.batches]
    orders = [str(rows[at : at + 5]) for at in (0, 5, 10)]
    assert len(heard.rollouts) == 1
    assert len(set(orders)) == 3


# ---------------------------------------------------------------------------------------------- in which mode it asks


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
    run, _, _ = texts(GRPOStrategy(2), model=model, updates=2, prompts_per_rollout=5)
    counts = {}
    run.on(Events.ROLLOUT_COMPLETED)(lambda: counts.update(acted=len(model.modes)))
    run.on(Events.POLICY_UPDATED)(lambda: counts.update(measured=len(model.modes)))
    modes = []
    run.on(Events.ITERATION_STARTED)(lambda: modes.append(model.training))
    run.train()
    assert counts["measured"] > counts["acted"] > 0
    assert modes == [True, True]
    # Heard asks once before each batch, as the model then is
    assert sum(model.modes) == 2


def test_an_evaluation_is_without_dropout():
    class Dropping(Policy):
        def __init__(self):
            super().__init__()
            self.dropout, self.modes = nn.Dropout(0.5), []

        def forward(self, observations):
            self.modes.append(self.dropout.training)
            logits, values = super().forward(observations)
            return self.dropout(logits), values

    run = steps(model=Dropping())
    run.train_loader.evaluate(1)
    assert run.model.modes
    assert not any(run.model.modes)
    assert run.model.training


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_texts_are_drawn_in_the_precision_that_is_learnt_in(precision):
    seen = []

    def sampler(prompts, count, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        return greedy_sampler(prompts, count)

    run, _, _ = texts(GRPOStrategy(2), sampler=sampler, prompts_per_rollout=5, config={"precision": precision})
    run.train()
    assert seen == [precision == "bf16"]


# ------------------------------------------------------------------------------------------------------- what is told


def test_what_is_told_of_texts_is_a_mean_over_generated_tokens():
    completions = [[2, 0], [1, 1, 1, 1], [0], [4, 4, 0], [3], [5, 1, 0], [0, 2], [1], [4, 5, 5, 2], [3, 3]]
    strategy = GRPOStrategy(2, minibatch_size=5, temperature=0.8)
    run, heard, _ = texts(
        strategy, updates=2, prompts_per_rollout=5, sampler=lambda prompts, count, **options: completions
    )
    weights, told = [], []
    run.on(Events.POLICY_UPDATED)(
        lambda: weights.append(run.model.table.weight.detach().double().numpy().copy()) or told.append(heard.batches[:])
    )
    run.train()
    kls, entropies = [], []
    for batch in told[0]:
        tokens, mask = batch["input_ids"].numpy(), batch["completion_mask"].numpy()[:, 1:]
        logits = weights[0][tokens[:, :-1]] / 0.8
        now = formulas.log_probs_of(logits, tokens[:, 1:])
        kls.extend(formulas.kl_k3(batch["log_probs"].double().numpy(), now)[mask])
        entropies.extend(formulas.entropies(logits)[mask])
    assert len(kls) == sum(map(len, completions))
    (update,) = heard.updates
    assert update.metrics["policy/kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-4)
    assert update.metrics["policy/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)


def validated(rollouts, metrics):
    state = types.SimpleNamespace(rollout_round=0, metrics=metrics)
    engine = types.SimpleNamespace(state=state, train_loader=types.SimpleNamespace(fires_rollouts=rollouts), name="run")
    payload = types.SimpleNamespace(metrics=metrics)
    return engine, types.SimpleNamespace(type=Events.VALIDATION_COMPLETED.value, payload=payload)


def test_a_validation_before_the_first_rollout_need_not_tell_of_one():
    metrics = {"val/loss": 1.0}
    assert judged_name("EarlyStopping", "rollout/return", *validated(True, metrics)) is None
    with pytest.raises(MetricNotFoundError, match="rollout/return"):
        judged_name("EarlyStopping", "rollout/return", *validated(False, metrics))


def test_a_run_without_rollouts_that_judged_nothing_ends_without_a_word():
    engine, _ = validated(False, {})
    with capture_logs() as logs:
        warn_if_never_reported("EarlyStopping", "val/loss", engine)
        engine.state.rollout_round = 1
        assert logs == []
        warn_if_never_reported("EarlyStopping", "val/loss", engine)
    assert [line["event"] for line in logs] == ["EarlyStopping has judged nothing"]
