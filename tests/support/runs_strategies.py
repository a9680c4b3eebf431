"""A small run of each strategy on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from examples.byte_lm.model import ByteGPT
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import (
    DPOStrategy,
    Every,
    GRPOStrategy,
    JaxBackend,
    KTOStrategy,
    ORPOStrategy,
    PPOStrategy,
    PretrainStrategy,
    RewardModelStrategy,
    SFTStrategy,
    TorchBackend,
)
from pulsetrain.engine.data.preferences import pad_unpaired
from pulsetrain.engine.data.sequences import pack, pad_examples
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.rollouts import EnvironmentRollouts, TextRollouts
from pulsetrain.engine.strategies import WithValueHead
from pulsetrain.handlers import Checkpointer, EarlyStopping, EventRecorder, Fingerprints
from tests.support.runs_backends import needs_jax, whole_state

needs_gymnasium = pytest.mark.skipif(find_spec("gymnasium") is None, reason="gymnasium is not installed")

VOCABULARY, END, WIDTH = 12, 0, 16
PROMPTS = [[3, 4], [5], [6, 7, 8], [9], [10, 3], [4]]
NEW_TOKENS, LENGTH = 5, 9  # of a text after its prompt, and of all rows: programs are compiled for one shape
# a rate at which a policy exceeds target_kl in some rollouts, and not in others
SETTINGS = {"max_epochs": 2, "learning_rate": 0.02, "clip_grad_norm": 1.0, "log_every_n_steps": 3, "seed": 7}

TORCH, FUNCTIONAL, JAX = "torch", "torch-functional", "jax"
MAKE_BACKEND: dict[str, Callable[[], Any]] = {
    TORCH: TorchBackend,
    FUNCTIONAL: lambda: TorchBackend(functional=True),
    JAX: JaxBackend,
}


# ------------------------------------------------------------------------------------------------------------- models


class ActorCritic(nn.Module):
    """A policy and a value of CartPole's four numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.hidden, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.hidden(observations))
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def language_model(dropout: float = 0.0) -> ByteGPT:
    """The model of the demo, at its smallest."""
    torch.manual_seed(2)
    model = ByteGPT(layers=1, width=WIDTH, heads=2, context=32, vocabulary=VOCABULARY, dropout=dropout)
    with torch.no_grad():
        model.head.weight.mul_(20.0)  # otherwise all tokens are equally likely
    return model


def _weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    draw = np.random.default_rng(3)
    return {name: draw.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


def jax_language_model(values: bool = False) -> tuple[Any, dict[str, Any]]:
    """A function in JAX: each position sees the mean of its document so far. It can give values beside the logits."""
    import jax.numpy as jnp

    def net(weights: Any, input_ids: Any, position_ids: Any = None) -> Any:
        embedded = weights["table"][input_ids]
        place = jnp.arange(input_ids.shape[1])
        begun = place[None] if position_ids is None else place[None] - position_ids  # where its document begins
        seen = (begun[:, :, None] == begun[:, None]) if position_ids is not None else True
        seen = (seen & (place[:, None] >= place)).astype(embedded.dtype)
        hidden = jnp.tanh((seen @ embedded) / seen.sum(-1, keepdims=True) @ weights["mix"]) + embedded
        logits = hidden @ weights["head"]
        return (logits, hidden @ weights["value"]) if values else logits

    shapes = {"table": (VOCABULARY, WIDTH), "mix": (WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    weights = _weights(**shapes, **({"value": (WIDTH,)} if values else {}))
    return net, {**weights, "table": 4 * weights["table"]}  # its policy also exceeds target_kl at first


def jax_actor_critic() -> tuple[Any, dict[str, Any]]:
    """The same as `ActorCritic`, with other weights."""
    import jax.numpy as jnp

    def net(weights: Any, observations: Any) -> Any:
        hidden = jnp.tanh(observations @ weights["hidden"])
        return hidden @ weights["actor"], hidden @ weights["critic"]

    return net, _weights(hidden=(4, 8), actor=(8, 2), critic=(8,))


def with_values() -> nn.Module:
    """The language model and a critic on top of it."""
    return WithValueHead(language_model(), head="head")


# --------------------------------------------------------------------------------------------------------------- data


def reward(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in each) / len(each) for each in completions]


def texts(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Examples of a prompt of two tokens and an answer of three to six."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        tokens = torch.randint(1, VOCABULARY, (5 + number % 4,), generator=draw).tolist()
        found.append({"input_ids": tokens, "labels": [-100, -100, *tokens[2:]]})
    return found


def padded(seed: int = 1) -> list[dict[str, Tensor]]:
    """Five batches of two examples."""
    examples = texts(10, seed)
    return [pad_examples(examples[n : n + 2], length=LENGTH) for n in range(0, 10, 2)]


def packed() -> list[dict[str, Tensor]]:
    """Five batches of two rows, of two documents or so each."""
    rows = pack(texts(20, 1), 2 * LENGTH)
    return [pad_examples(rows[n : n + 2], length=2 * LENGTH) for n in range(0, 10, 2)]


def windows() -> list[Tensor]:
    """Five batches of two windows of a text, in which some documents end."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 5, (2, LENGTH), generator=draw) for _ in range(5)]


def preferences() -> list[dict[str, Tensor]]:
    """Five batches of two pairs."""
    sides = {"chosen": padded(1), "rejected": padded(2)}
    return [
        {f"{side}_{name}": each for side, found in sides.items() for name, each in found[n].items()} for n in range(5)
    ]


def judged() -> list[dict[str, Tensor]]:
    """Five batches of two answers, one of them desirable."""
    examples = [{**each, "desirable": number % 2 == 0} for number, each in enumerate(texts(10, 1))]
    return [pad_unpaired(examples[n : n + 2], length=LENGTH) for n in range(0, 10, 2)]


@cache
def _stored() -> list[dict[str, Tensor]]:
    return DPOStrategy(reference=language_model()).store_reference(preferences())


# ---------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True, eq=False)
class Task:
    """A training task: a strategy, its data, and models for torch and JAX."""

    name: str
    strategy: Callable[[], Any]
    data: Callable[[], Any]
    model: Callable[[], nn.Module]
    jax_model: Callable[[], Any]
    cuts: tuple[int, ...]  # iterations after which runs are interrupted
    settings: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "val/loss"

    @property
    def acts(self) -> bool:
        """Whether the data are rollouts."""
        return not self.metric.startswith("val/")


def _dropping_out() -> nn.Module:
    return language_model(dropout=0.2)


def text_rollouts(prompts_per_rollout: int, judge: Callable[..., Any] = reward) -> TextRollouts:
    """Short texts to short prompts."""
    return TextRollouts(
        PROMPTS, judge, max_new_tokens=NEW_TOKENS, prompts_per_rollout=prompts_per_rollout, end_token=END, pad_to=LENGTH
    )  # fmt: skip


# An epoch has 5 batches; with two accumulated, 3 is inside an update, and 5 at an epoch's end.
# A rollout has 4: 2 batches, twice. Runs are interrupted inside its first epoch (5), between both (6), at its end (8).
PRETRAIN = Task(
    "pretrain", lambda: PretrainStrategy(separator=0), windows, _dropping_out, jax_language_model, cuts=(2, 5)
)
PADDED = Task("sft-padded", SFTStrategy, padded, _dropping_out, jax_language_model, (3, 5), {"accumulate": 2})
PACKED = Task("sft-packed", SFTStrategy, packed, _dropping_out, jax_language_model, (3, 5), {"accumulate": 2})
COPIED = Task("dpo-copied", DPOStrategy, preferences, _dropping_out, jax_language_model, cuts=(2, 5))
STORED = Task(
    "dpo-stored", lambda: DPOStrategy(reference=None), _stored, language_model, jax_language_model, cuts=(2, 5)
)
ODDS = Task("orpo", ORPOStrategy, preferences, _dropping_out, jax_language_model, (3, 5), {"accumulate": 2})
JUDGED = Task("kto", KTOStrategy, judged, _dropping_out, jax_language_model, cuts=(2, 5))
REWARDS = Task(
    "reward-model",
    lambda: RewardModelStrategy(center_coef=0.01),
    preferences,
    with_values,
    lambda: jax_language_model(values=True),
    cuts=(2, 5),
)
CARTPOLE = Task(
    "ppo-cartpole",
    lambda: PPOStrategy(minibatch_size=16, minibatch_epochs=2, entropy_coef=0.01),
    lambda: EnvironmentRollouts("CartPole-v1", environments=2, steps=16),
    ActorCritic,
    jax_actor_critic,
    cuts=(1, 5, 6, 8),
    settings={"max_epochs": 3},
    metric="rollout/reward",
)
TEXTS = Task(
    "ppo-texts",
    lambda: PPOStrategy(
        gamma=1.0, minibatch_size=2, minibatch_epochs=2, adaptive_kl=0.2, target_kl=0.21, value_clip_range=0.2
    ),
    lambda: text_rollouts(4),
    with_values,
    lambda: jax_language_model(values=True),
    cuts=(2, 5, 6, 8),
    settings={"max_epochs": 3, "seed": 1},  # with which some rollouts exceed target_kl on each backend
    metric="rollout/reward",
)
GROUPS = Task(
    "grpo",
    lambda: GRPOStrategy(group_size=3, kl_coef=0.1, minibatch_size=3, minibatch_epochs=2),
    lambda: text_rollouts(2),
    language_model,
    jax_language_model,
    cuts=(3, 5, 6, 8),
    settings={"max_epochs": 3, "accumulate": 3},  # updates span the ends of rollouts
    metric="rollout/reward",
)
TASKS = (PRETRAIN, PADDED, PACKED, COPIED, STORED, ODDS, JUDGED, REWARDS, CARTPOLE, TEXTS, GROUPS)


def on_each(tasks: Sequence[Task] = TASKS, backends: Sequence[str] = (TORCH, FUNCTIONAL, JAX)) -> pytest.MarkDecorator:
    """A test of each task on each backend: its arguments `task` and `on`."""
    return pytest.mark.parametrize(("task", "on"), [case(task, on) for task in tasks for on in backends])


def case(task: Task, on: str, *more: Any) -> Any:
    """One of a test's cases, with what it needs installed."""
    marks = [*([needs_jax] if on == JAX else []), *([needs_gymnasium] if task is CARTPOLE else [])]
    names = (task.name, on, *(getattr(each, "name", str(each)) for each in more))
    return pytest.param(task, on, *more, id="-".join(names), marks=marks)


def make(
    task: Task,
    on: str,
    folder: Path,
    *handlers: Any,
    every: Every | None = None,
    model: Any = None,
    data: Any = None,
    strategy: Any = None,
    **settings: Any,
) -> Trainer:
    """Always the same run.

    Args:
        folder: of its log and its checkpoints.
        handlers: in front of those that it has in any case.
        every: when to save; by default after each iteration.
        model: another one; likewise data and strategy.
        settings: other ones than the task's.
    """
    made = model if model is not None else task.jax_model() if on == JAX else task.model()
    return Trainer(
        made,
        task.data() if data is None else data,
        None if task.acts else task.data()[:2],
        strategy=strategy or task.strategy(),
        backend=MAKE_BACKEND[on](),
        config=TrainingConfig(**{"device": "cpu", **SETTINGS, **task.settings, **settings}),
        handlers=[
            *handlers,
            EarlyStopping(metric=task.metric, patience=50, mode="max" if task.acts else "min"),
            Fingerprints(Every(updates=1), batches=True),
            EventRecorder(folder),
            Checkpointer(folder, every=every or Every(iterations=1), keep_last=100),
        ],
    )


# ------------------------------------------------------------------------------------------------- comparisons

STEP_EVENTS = {"iteration_completed", "rollout_started", "rewards_computed", "rollout_completed", "policy_updated"}


def differences(one: Trainer, other: Trainer) -> set[str]:
    """The paths that differ, without the log's run and the counts of saves and events: a resumed run has one more."""
    states = [whole_state(each) for each in (one, other)]
    found = {path for path in states[0] | states[1] if states[0].get(path) != states[1].get(path)}
    return found - {"counters/save", "handlers/EventRecorder/state/ord", "handlers/EventRecorder/state/run"}


def logged_steps(folder: Path) -> list[tuple[Any, ...]]:
    """The log's events of rollouts and steps, floats by their digits, without superseded events."""
    return [
        (event.event, event.epoch, event.iteration, repr(_without_times(event.payload)), repr(event.output))
        for event in EventLog(folder).read(event=STEP_EVENTS)
        if event.ord >= 0
    ]


def _without_times(payload: Any) -> Any:
    return {name: value for name, value in payload.items() if name != "seconds"} if payload else payload


def detach_recorder(trainer: Trainer) -> None:
    """Release the log, so that a resumed run can continue it."""
    for handler in trainer.handlers:
        if isinstance(handler, EventRecorder):
            handler.detach()
