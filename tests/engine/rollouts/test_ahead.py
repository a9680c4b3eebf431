"""Texts that are drawn while the policy learns: by which weights, with which importance weights, and on resume."""

import signal
import threading

import pytest
import torch

from pulsetrain.engine import Events, Every, GRPOStrategy, PPOStrategy, TorchBackend
from pulsetrain.engine.data import rng
from pulsetrain.engine.rollouts import ConversationRollouts, Sampling, ServerSampler, TextRollouts
from pulsetrain.engine.rollouts.ahead import Ahead
from pulsetrain.engine.rollouts.completions import Completion
from pulsetrain.engine.rollouts.sampling import sampler_of
from pulsetrain.handlers import Checkpointer
from tests.support.models import Tokens, trainer
from tests.support.models_language import refusal
from tests.support.rollouts import PROMPTS, VOCABULARY, Reward, Valued, texts
from tests.support.runs_backends import saved
from tests.support.runs_strategies import differences
from tests.support.text_servers import text_server

BACKGROUND = pytest.mark.parametrize("background", [True, False], ids=["thread", "foreground"])


def strategy_of(kind):
    options = {"minibatch_epochs": 2, "minibatch_size": 5}
    return GRPOStrategy(2, 0.1, **options) if kind == "grpo" else PPOStrategy(0.1, gamma=1.0, **options)


def ahead(strategy=None, background=True, updates=12, staleness=1, **options):
    options = {"prompts_per_rollout": 5, "end_token": 0, "background": background, **options}
    return texts(strategy or strategy_of("grpo"), updates=updates, staleness=staleness, **options)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_thread_draws_what_the_foreground_draws(kind):
    runs = [ahead(strategy_of(kind), background, sampling=Sampling(top_p=0.9)) for background in (True, False)]
    for run, _, _ in runs:
        run.train()
    (mine, recorded, reward), (theirs, others, paid) = runs
    assert reward.completions == paid.completions
    for one, other in zip(recorded.batches, others.batches, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert all(torch.equal(value, theirs.model.state_dict()[name]) for name, value in mine.model.state_dict().items())
    assert [each.metrics for each in recorded.rollouts] == [each.metrics for each in others.rollouts]


@BACKGROUND
@pytest.mark.parametrize(("staleness", "ages"), [(1, [0.0, 4.0, 4.0, 4.0, 4.0]), (3, [0.0, 4.0, 8.0, 12.0, 12.0])])
def test_texts_are_drawn_by_the_weights_of_so_many_rollouts_before(background, staleness, ages):
    run, recorded, reward = ahead(background=background, staleness=staleness, updates=20)
    policies = []
    run.on(Events.ROLLOUT_STARTED)(lambda: policies.append(run.model.table.weight.detach().clone()))
    run.train()
    assert len(policies) == 5
    assert not torch.equal(policies[0], policies[1])
    for number, (prompts, completions) in enumerate(zip(reward.prompts, reward.completions, strict=True)):
        seeds = [rng.derive(3, number + 1, row, 0) for row in range(len(prompts))]
        table = policies[max(number - staleness, 0)]
        sampler = sampler_of(lambda tokens, table=table: table[tokens], lambda tokens: tokens)
        expected = sampler(prompts, 4, end_token=0, seeds=seeds)
        assert completions == expected
    assert [each.metrics["rollout/staleness"] for each in recorded.rollouts] == ages, "in updates"


@BACKGROUND
@pytest.mark.parametrize("sampling", [None, Sampling(min_p=0.3)], ids=["all tokens", "min_p"])
def test_a_text_is_weighted_by_how_much_likelier_it_has_become(background, sampling):
    run, recorded, reward = ahead(background=background, sampling=sampling, importance_cap=1e9)
    policies = []
    run.on(Events.ROLLOUT_STARTED)(lambda: policies.append(run.model.table.weight.detach().double()))
    run.train()
    restrict = (sampling or Sampling()).restrict
    for number in range(3):
        now, then = policies[number].log_softmax(-1), restrict(policies[max(number - 1, 0)]).log_softmax(-1)
        ratios = []
        for prompt, completion in zip(reward.prompts[number], reward.completions[number], strict=True):
            text = torch.tensor([prompt[-1], *completion])
            ratios.append(float((now[text[:-1], text[1:]] - then[text[:-1], text[1:]]).sum().exp()))
        metrics = recorded.rollouts[number].metrics
        assert metrics["rollout/sampler_ratio"] == pytest.approx(sum(ratios) / 10, rel=1e-4)
    assert metrics["rollout/sampler_ratio"] != pytest.approx(1.0, abs=1e-3)


def test_the_texts_are_drawn_in_a_thread_while_the_policy_learns():
    threads, learning = set(), []

    class Watched(Tokens):
        def forward(self, tokens):
            if not torch.is_grad_enabled() and threading.current_thread() is not threading.main_thread():
                threads.add(threading.current_thread().name)
                assert not self.training
                learning.append(self)
            return super().forward(tokens)

    model = Watched(VOCABULARY)
    run, _, _ = ahead(model=model)
    run.train()
    assert len(threads) == 1
    assert all(each is not model for each in learning), "by a copy, whose weights do not change meanwhile"


@BACKGROUND
@pytest.mark.parametrize(("kind", "staleness"), [("grpo", 1), ("ppo", 1), ("grpo", 2)])
def test_a_run_resumes_anywhere_bit_for_bit(kind, staleness, background, tmp_path):
    def run(folder, background):
        torch.manual_seed(0)
        rollouts = TextRollouts(
            PROMPTS, Reward(), max_new_tokens=4, prompts_per_rollout=5, end_token=0, staleness=staleness,
            background=background,
        )  # fmt: skip
        return trainer(
            {"max_updates": 12, "learning_rate": 0.5, "seed": 3}, train_loader=rollouts, strategy=strategy_of(kind),
            model=Tokens(VOCABULARY) if kind == "grpo" else Valued(),
            handlers=[Checkpointer(tmp_path / folder, every=Every(iterations=1), keep_last=100)],
        )  # fmt: skip

    whole = run("whole", background)
    whole.train()
    for cut in (1, 4, 6, 8):
        again = run(f"again {cut}", cut == 6)  # the other form, too
        again.train(resume=saved(tmp_path / "whole", cut))
        assert differences(again, whole) - {"handlers/TextRollouts/settings"} == set()  # `background`, if it differs


@BACKGROUND
def test_a_rollout_whose_reward_failed_is_started_again_with_its_texts(background):
    seen = []

    def failing(prompts, completions):
        seen.append(completions)
        if len(seen) == 2:
            raise KeyError("no score")
        return [float(sum(each) % 5) for each in completions]

    run, _, _ = ahead(background=background, reward=failing)
    with pytest.raises(KeyError, match="no score"):
        run.train()
    run.train()
    whole, _, reward = ahead(background=background)
    whole.train()
    assert seen[1] == seen[2]
    assert [seen[0], *seen[2:]] == reward.completions


def test_an_error_of_the_thread_reaches_the_caller_and_the_next_call_draws_once_more():
    drawn = []

    def draw(number):
        drawn.append(number)
        if len(drawn) == 1:
            raise RuntimeError("out of memory")
        return [Completion([number])]

    texts_ahead = Ahead(lambda number: None, draw, background=True)
    texts_ahead.begin(3, update=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        texts_ahead.texts(3, update=2)
    assert texts_ahead.texts(3, update=5) == ([Completion([3])], 0)
    assert texts_ahead.texts(3, update=6) == ([Completion([3])], 1), "kept until the next ones are asked for"
    assert drawn == [3, 3]


def test_what_would_change_while_it_is_drawn_from_is_refused():
    def refused(arguments=None, **options):
        rollouts = TextRollouts(PROMPTS, Reward(), max_new_tokens=3, staleness=1, **options)
        arguments = {"model": Tokens(VOCABULARY), "strategy": GRPOStrategy(2), **(arguments or {})}
        return refusal(lambda: trainer({}, train_loader=rollouts, **arguments))

    message = refused(sampler=lambda prompts, count, **options: [[1]] * len(prompts))
    assert message.startswith("TextRollouts(staleness=1): the sampler may read weights while they change; give it a")
    message = refused({"backend": TorchBackend("cpu", functional=True)})
    assert message.startswith("TextRollouts(staleness=1): needs one process, and a backend that updates the model in")

    class Writing(Tokens):
        def sample(self, prompts, max_new_tokens, *, temperature, end_token):
            return [[1]] * len(prompts)

    assert "the sample() of Writing does not take draw=" in refused({"model": Writing(VOCABULARY)})
    for value in (-1, True, 0.5):
        message = refusal(lambda value=value: TextRollouts(PROMPTS, Reward(), staleness=value))
        assert message == f"TextRollouts(staleness={value!r}): needs a whole number of at least 0"
    message = refusal(lambda: ConversationRollouts(PROMPTS, Reward, max_length=90, staleness=1))
    assert message.startswith("ConversationRollouts(staleness=1): environments converse with the current policy")


@BACKGROUND
def test_a_server_keeps_the_weights_of_the_rollout_before(background, tmp_path):
    def save(model, folder):
        torch.save(model.table.weight.detach().clone(), folder / "table.pt")

    with text_server("vllm", tmp_path / "policy", VOCABULARY) as server:
        sampler = ServerSampler(server.url, folder=tmp_path / "policy", save=save, timeout=30.0)
        run, recorded, _ = ahead(background=background, sampler=sampler)
        served, policies = [], []
        run.on(Events.ROLLOUT_STARTED)(lambda: served.append(server.table.clone()))
        run.on(Events.ROLLOUT_STARTED)(lambda: policies.append(run.model.table.weight.detach().clone()))
        run.train()
        run.train_loader.restart()  # waits for the texts that are drawn still
    assert not served[0].any()
    assert torch.equal(served[1], policies[0])
    assert torch.equal(served[2], policies[1])
    ratios = [each.metrics["rollout/sampler_ratio"] for each in recorded.rollouts]
    assert ratios[0] == pytest.approx(1.0, abs=1e-4)
    assert all(abs(ratio - 1.0) > 1e-3 for ratio in ratios[1:])


@BACKGROUND
def test_texts_that_could_not_be_drawn_cost_no_checkpoint(background, tmp_path):
    class Failing:
        """Fails in the third rollout."""

        def __init__(self, fails):
            self.calls, self.fails = 0, fails

        def __call__(self, prompts, count, *, temperature, end_token):
            self.calls += 1
            if self.calls == 3 and self.fails:
                raise ConnectionError("gone")
            return [Completion([1], [-1.0]) for _ in prompts]

        def update_weights(self, model, version):
            pass

    def run(folder, fails):
        made = TextRollouts(
            PROMPTS, Reward(), max_new_tokens=1, prompts_per_rollout=5, staleness=1, background=background,
            sampler=Failing(fails),
        )  # fmt: skip
        saving = Checkpointer(tmp_path / folder, every=Every(iterations=1), keep_last=100)
        strategy = GRPOStrategy(2, minibatch_epochs=2)
        return trainer(
            {"max_updates": 8}, model=Tokens(VOCABULARY), train_loader=made, strategy=strategy, handlers=[saving]
        )

    failed = run("failed", fails=True)
    with pytest.raises(ConnectionError, match="gone"):
        failed.train()
    # the thread draws the third rollout's texts while the second is learnt; the foreground, before that
    last = 4 if background else 2
    assert failed.state.update == last
    again = run("again", fails=False)
    again.train(resume=saved(tmp_path / "failed", last))
    assert again.state.update == 8


@BACKGROUND
def test_a_sampler_without_log_probabilities_is_used_as_it_is_only_if_asked_to(background, tmp_path):
    class Constant:
        def __call__(self, prompts, count, *, temperature, end_token):
            return [[len(prompt) % VOCABULARY] for prompt in prompts]

        def update_weights(self, model, version):
            pass

    def run(folder, **options):
        made = TextRollouts(
            PROMPTS, Reward(), max_new_tokens=1, prompts_per_rollout=5, staleness=1, background=background,
            sampler=Constant(), **options,
        )  # fmt: skip
        saving = Checkpointer(tmp_path / folder, every=Every(iterations=1), keep_last=100)
        return trainer(
            {"max_updates": 4}, model=Tokens(VOCABULARY), train_loader=made, strategy=GRPOStrategy(2), handlers=[saving]
        )

    message = refusal(run("refused").train)
    assert message.startswith("TextRollouts(importance_cap=2.0): texts drawn ahead are weighted by log-probabilities")
    whole, again = run("whole", importance_cap=None), run("again", importance_cap=None)
    whole.train()
    again.train(resume=saved(tmp_path / "whole", 2))
    assert differences(again, whole) == set()


def test_a_validation_needs_rollouts_of_its_own():
    rollouts = TextRollouts(PROMPTS, Reward(), max_new_tokens=3, prompts_per_rollout=5, staleness=1)
    learner = {"model": Tokens(VOCABULARY), "strategy": GRPOStrategy(2)}
    message = refusal(lambda: trainer({}, train_loader=rollouts, val_loader=rollouts, **learner))
    assert message.startswith(
        "TextRollouts(staleness=1): it is the train_loader, too, whose texts are drawn ahead; give"
    )


def test_texts_outlast_an_interrupt_of_the_wait_for_them():
    drawn, may_end = [], threading.Event()

    def draw(number):
        drawn.append(number)
        assert may_end.wait(30.0)
        return [Completion([number])]

    texts_ahead = Ahead(lambda number: None, draw, background=True)
    texts_ahead.begin(3, update=1)
    interrupting = threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])

    def wait():
        interrupting.start()  # here, so that the interrupt is within the block
        texts_ahead.texts(3, update=2)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGINT, before)
    may_end.set()
    assert texts_ahead.texts(3, update=2) == ([Completion([3])], 1), "by the weights that they were begun with"
    assert drawn == [3]
