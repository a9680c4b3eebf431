"""Text rollouts and a deterministic environment, each with a policy."""

import numpy
import torch
from torch import nn

from pulsetrain.engine import Events, PPOStrategy
from pulsetrain.engine.rollouts import TextRollouts
from tests.support.models import Tokens, trainer

# ---------------------------------------------------------------------------------------------------------------- texts


VOCABULARY = 6
PROMPTS = [[0, 1], [2], [3, 4, 5], [1], [5, 5]]


class Valued(nn.Module):
    """A language model of one table, with a value for each token."""

    def __init__(self, vocabulary=VOCABULARY):
        super().__init__()
        self.table, self.worth = nn.Embedding(vocabulary, vocabulary), nn.Embedding(vocabulary, 1)

    def forward(self, tokens):
        return self.table(tokens), self.worth(tokens).squeeze(-1)


class Observed:
    """The batches that a run learns from, the metrics of the policy before each, and the payloads of rollouts."""

    def __init__(self, run):
        self.run, self.batches, self.metrics = run, [], []
        self.rollouts, self.rewards, self.updates = [], [], []
        run.add_event_handler(Events.ITERATION_STARTED, self._look)
        for event, payloads in (
            (Events.ROLLOUT_COMPLETED, self.rollouts),
            (Events.REWARDS_COMPUTED, self.rewards),
            (Events.POLICY_UPDATED, self.updates),
        ):
            run.add_event_handler(event, lambda engine, event, payloads=payloads: payloads.append(event.payload))

    def _look(self):
        batch = self.run.strategy.prepare_batch(self.run.state.batch)
        self.batches.append(self.run.state.batch)
        with torch.no_grad():
            found = self.run.strategy.compute_metrics(self.run.model(batch.inputs), batch)
        self.metrics.append({name: float(value) for name, value in found.items()})


class Reward:
    """Records its arguments, and scores texts."""

    def __init__(self):
        self.prompts, self.completions, self.given = [], [], []

    def __call__(self, prompts, completions):
        self.prompts.append(prompts)
        self.completions.append(completions)
        self.given.append([float(sum(each) % 5) for each in completions])
        return self.given[-1]


def texts(strategy, *, model=None, updates=1, config=None, **options):
    """A run over texts to the five prompts, and what was observed of it."""
    torch.manual_seed(0)
    model = model or (Valued() if isinstance(strategy, PPOStrategy) else Tokens(VOCABULARY))
    reward = options.setdefault("reward", Reward())
    rollouts = TextRollouts(options.pop("prompts", PROMPTS), **{"max_new_tokens": 4, **options})
    settings = {"max_updates": updates, "learning_rate": 0.5, "seed": 3, **(config or {})}
    run = trainer(settings, model=model, train_loader=rollouts, strategy=strategy)
    return run, Observed(run), reward


# --------------------------------------------------------------------------------------------------------- environments


LENGTH, LIMIT = 4, 3


class Space:
    def __init__(self, **given):
        self.__dict__.update(given)


class Counting:
    """Counts its steps: an episode ends after the fourth, its time limit; every other one is truncated after 3."""

    made = 0

    def __init__(self):
        self.action_space, self.observation_space = Space(n=2), Space(shape=(2,), dtype=numpy.float32)
        Counting.made += 1
        self.number, self.episode, self.seeds = Counting.made, 0, []

    def reset(self, *, seed=None):
        self.seeds.append(seed)
        self.episode += 1
        self.step_number = 0
        return self._seen(), {}

    def _seen(self):
        return numpy.array([self.step_number, self.number], "float32")

    def step(self, action):
        self.step_number += 1
        ended = self.step_number == LENGTH
        cut_off = ended or (self.episode % 2 == 1 and self.step_number == LIMIT)
        return self._seen(), self.step_number + 0.5 * action, ended, cut_off, {}

    def close(self):
        pass


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(2, 2), nn.Linear(2, 1)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, observations):
        return self.actor(observations), self.critic(observations).squeeze(-1)
