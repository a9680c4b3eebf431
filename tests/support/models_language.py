"""Small language models, their batches, and a check that a bad batch is rejected."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from pulsetrain.engine import Events
from pulsetrain.engine.errors import ConfigurationError
from tests.support import formulas
from tests.support.formulas import IGNORED, VOCABULARY
from tests.support.models import Tokens, trainer

CONTEXT = 6
TOKENS = torch.tensor([[1, 2, 3, 4, 0, 1], [2, 2, 1, 0, 3, 4]])
LABELS = torch.where(torch.arange(6) < 2, IGNORED, TOKENS)
TEXTS = {"input_ids": TOKENS, "labels": LABELS}
PAIRS = {f"{side}_{name}": value for side in ("chosen", "rejected") for name, value in TEXTS.items()}
ROWS = {
    "input_ids": TOKENS,
    "completion_mask": LABELS != IGNORED,
    **{name: torch.full((2, 5), -0.5) for name in ("log_probs", "advantages", "values", "returns")},
}
GROUP = {**ROWS, "advantages": torch.tensor([1.0, -1.0])}
STEPS = {"observations": torch.ones(2, 3), "actions": torch.tensor([1, 0])} | {
    name: torch.full((2,), -0.5) for name in ("log_probs", "advantages", "values", "returns")
}
ONE_LABEL_OUT = LABELS.clone()
ONE_LABEL_OUT[1, 3] = 99
ONE_MASKED = LABELS.clone()
ONE_MASKED[1, 1:] = IGNORED
NOT_A_NUMBER = torch.tensor([[0.0] * 5, [0.0, float("nan"), 0.0, float("inf"), 0.0]])


class Short(Tokens):
    """A language model of one table with a context."""

    context = CONTEXT

    def __init__(self):
        super().__init__(VOCABULARY)


class Placed(Short):
    """Also takes positions."""

    def forward(self, input_ids, position_ids=None):
        return self.table(input_ids)


class Valued(Short):
    """Also returns values."""

    def forward(self, tokens):
        return self.table(tokens), self.table(tokens)[..., 0]


class Acting(nn.Module):
    """An actor and a critic."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, observations):
        return self.actor(observations), self.critic(observations).squeeze(-1)


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


def assert_refused(run, error, parts):
    """With these words in the message or its notes, and without a change of any weight."""
    weights = {}

    def keep():
        weights.update({name: value.clone() for name, value in run.model.state_dict().items()})

    keep()
    run.add_event_handler(Events.ITERATION_COMPLETED, keep)
    with pytest.raises(error) as caught:
        run.train()
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for part in parts:
        assert part in message
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, weights[name]), f"{name} has moved"
    return message


class Attending(nn.Module):
    """Each token attends to those before it in its document: the mean of their embeddings, by position_ids."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, position_ids=None):
        length = input_ids.shape[1]
        place = torch.arange(length)
        document = torch.zeros_like(input_ids) if position_ids is None else (position_ids == 0).cumsum(1)
        seen = ((document[:, :, None] == document[:, None, :]) & (place[:, None] >= place)).to(self.head.weight.dtype)
        return self.head(seen @ self.embedding(input_ids) / seen.sum(-1, keepdim=True))


def documents():
    """Of different lengths, each with a prompt."""
    found = []
    for number in range(5):
        tokens = formulas.tokens_of(number, 1, 3 + number)[0]
        found.append({"input_ids": tokens, "labels": torch.where(torch.arange(len(tokens)) < 2, IGNORED, tokens)})
    return found


def run_of(data, strategy, model=None):
    return trainer(
        {"max_epochs": 1, "learning_rate": 0.1}, model=model or Short(), train_loader=data, strategy=strategy
    )


class Mean(Tokens):
    """Each position sees the mean of all before it, within its document if `apart`; counts its calls."""

    def __init__(self, apart, zero=False):
        super().__init__(VOCABULARY)
        self.head = nn.Linear(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.2)  # two answers of one model differ, too, unless it is asked in eval mode
        self.apart, self.calls = apart, 0
        if zero:
            nn.init.zeros_(self.head.weight)

    def forward(self, input_ids, position_ids):
        self.calls += 1
        place = torch.arange(input_ids.shape[1])
        begun = place - position_ids if self.apart else torch.zeros_like(position_ids)
        seen = ((begun[:, :, None] == begun[:, None]) & (place[:, None] >= place)).float()
        return self.head(seen / seen.sum(-1, keepdim=True) @ self.dropout(self.table(input_ids)))


def refusal(make, error=ConfigurationError):
    with pytest.raises(error) as caught:
        make()
    return str(caught.value)


class Adapted(nn.Module):
    """A frozen table and head with an adapter of two factors; unless it is trained, the second is 0, as in LoRA."""

    def __init__(self, trained=False, seed=0, vocabulary=VOCABULARY):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocabulary, 6).requires_grad_(False)
        self.head = nn.Linear(6, vocabulary, bias=False).requires_grad_(False)
        torch.manual_seed(seed)
        self.lora_A, self.lora_B = nn.Linear(6, 2, bias=False), nn.Linear(2, vocabulary, bias=False)
        self.enabled = True
        if not trained:
            nn.init.zeros_(self.lora_B.weight)

    @contextmanager
    def disable_adapter(self):
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def forward(self, tokens):
        hidden = self.table(tokens)
        logits = self.head(hidden)
        return logits + 3 * self.lora_B(self.lora_A(hidden)) if self.enabled else logits
