"""Rollouts of texts: a model, a reward, and a record of what a run learns from."""

import torch
from torch import nn

from pulsetrain.engine import Events, PPOStrategy
from pulsetrain.engine.rollouts import TextRollouts
from tests.support.small import Tokens, trainer

VOCABULARY = 6
PROMPTS = [[0, 1], [2], [3, 4, 5], [1], [5, 5]]


class Valued(nn.Module):
    """A language model of one table, with a value of each token."""

    def __init__(self, vocabulary=VOCABULARY):
        super().__init__()
        self.table, self.worth = nn.Embedding(vocabulary, vocabulary), nn.Embedding(vocabulary, 1)

    def forward(self, tokens):
        return self.table(tokens), self.worth(tokens).squeeze(-1)


class Heard:
    """The batches that a run learns from, with the metrics of the policy before each; and what rollouts tell."""

    def __init__(self, run):
        self.run, self.batches, self.metrics = run, [], []
        self.rollouts, self.rewards, self.updates = [], [], []
        run.add_event_handler(Events.ITERATION_STARTED, self._look)
        for event, told in (
            (Events.ROLLOUT_COMPLETED, self.rollouts),
            (Events.REWARDS_COMPUTED, self.rewards),
            (Events.POLICY_UPDATED, self.updates),
        ):
            run.add_event_handler(event, lambda engine, event, told=told: told.append(event.payload))

    def _look(self):
        batch = self.run.strategy.prepare_batch(self.run.state.batch)
        self.batches.append(self.run.state.batch)
        with torch.no_grad():
            found = self.run.strategy.compute_metrics(self.run.model(batch.inputs), batch)
        self.metrics.append({name: float(value) for name, value in found.items()})


class Reward:
    """Keeps what it was asked, and says what a text is worth."""

    def __init__(self):
        self.prompts, self.completions, self.given = [], [], []

    def __call__(self, prompts, completions):
        self.prompts.append(prompts)
        self.completions.append(completions)
        self.given.append([float(sum(each) % 5) for each in completions])
        return self.given[-1]


def texts(strategy, *, model=None, updates=1, config=None, **options):
    """A run over texts to the five prompts, and what was heard of it."""
    torch.manual_seed(0)
    model = model or (Valued() if isinstance(strategy, PPOStrategy) else Tokens(VOCABULARY))
    reward = options.setdefault("reward", Reward())
    rollouts = TextRollouts(options.pop("prompts", PROMPTS), **{"max_new_tokens": 4, **options})
    settings = {"max_updates": updates, "learning_rate": 0.5, "seed": 3, **(config or {})}
    run = trainer(settings, model=model, train_loader=rollouts, strategy=strategy)
    return run, Heard(run), reward
