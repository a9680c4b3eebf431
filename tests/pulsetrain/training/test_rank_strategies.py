"""Fine-tuning, preferences and reinforcement learning in several processes learn what they learn in one."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import DPOStrategy, Events, Every, GRPOStrategy, PPOStrategy, SFTStrategy, Topology, TorchBackend
from pulsetrain.engine.data.sequences import pad_examples
from pulsetrain.engine.rollouts import ConversationRollouts, TextRollouts
from pulsetrain.handlers import Checkpointer
from tests.support.models_language import Adapted
from tests.support.ranks import in_processes
from tests.support.runs_of_shards import whole_of
from tests.support.runs_strategies import END, LENGTH, NEW_TOKENS, PROMPTS, VOCABULARY, reward, texts, with_values
from tests.support.runs_strategies import language_model as gpt


def drawn(prompts: Sequence[Sequence[int]], most: int, **_: Any) -> list[list[int]]:
    """Texts that depend on their prompt, and on which text for it they are, alone: however they are shared out."""
    before: Counter[tuple[int, ...]] = Counter()
    found = []
    for prompt in prompts:
        before[tuple(prompt)] += 1
        draw = torch.Generator().manual_seed(sum(prompt) * 31 + before[tuple(prompt)])
        length = int(torch.randint(2, most + 1, (), generator=draw))
        found.append(torch.randint(1, VOCABULARY, (length,), generator=draw).tolist())
    return found


def pairs(rows: list[Any]) -> dict[str, torch.Tensor]:
    sides = {side: pad_examples([row[side] for row in rows], length=LENGTH) for side in ("chosen", "rejected")}
    return {f"{side}_{name}": each for side, found in sides.items() for name, each in found.items()}


def examples() -> Any:
    return DataLoader(texts(11, 1), batch_size=4, collate_fn=partial(pad_examples, length=LENGTH), shuffle=True)


def preferences() -> Any:
    rows = [{"chosen": one, "rejected": other} for one, other in zip(texts(11, 1), texts(11, 2), strict=True)]
    return DataLoader(rows, batch_size=4, collate_fn=pairs, shuffle=True)


def rollouts(sampler: Any = drawn) -> TextRollouts:
    return TextRollouts(
        PROMPTS, reward, max_new_tokens=NEW_TOKENS, prompts_per_rollout=2, end_token=END, pad_to=LENGTH, sampler=sampler
    )  # fmt: skip


Task = tuple[Callable[[], Any], Callable[[], Any], Callable[[], nn.Module]]
TASKS: dict[str, Task] = {
    "sft": (SFTStrategy, examples, gpt),
    "dpo": (DPOStrategy, preferences, gpt),
    "ppo": (
        lambda: PPOStrategy(gamma=1.0, minibatch_size=2, minibatch_epochs=2, adaptive_kl=0.2, value_clip_range=0.2),
        rollouts,
        with_values,
    ),
    "grpo": (lambda: GRPOStrategy(3, kl_coef=0.1, minibatch_size=2, minibatch_epochs=2), rollouts, gpt),
    "adapters": (DPOStrategy, preferences, partial(Adapted, trained=True, vocabulary=VOCABULARY)),
    "grpo in one pass": (lambda: GRPOStrategy(2, kl_coef=0.1, scale_rewards="batch"), rollouts, gpt),
}
LAYOUTS: dict[str, dict[str, Any] | None] = {"copies": None, "shards": {"shard": 2}, "tensor": {"tensor": 2}}


doubles = partial(torch.tensor, dtype=torch.float64)

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the loss does not write into the outputs


def trainer(task: str, layout: str, *handlers: Any, data: Any = None, model: nn.Module | None = None) -> Trainer:
    strategy, loader, make = TASKS[task]
    topology = LAYOUTS.get(layout)
    return Trainer(
        (make() if model is None else model).double(),  # float32 would differ by 1e-6 of the numbers' size
        loader() if data is None else data,
        strategy=strategy(),
        backend=None if topology is None else TorchBackend(topology=Topology(**topology)),
        config=TrainingConfig(
            device="cpu", max_epochs=3, optimizer="sgd", learning_rate=0.1, clip_grad_norm=1.0, log_every_n_steps=1,
            seed=7,
        ),
        handlers=list(handlers),
    )  # fmt: skip


def learned(made: Trainer, resume: str | None = None) -> dict[str, Any]:
    """The weights, the reported losses, and the metrics of rollouts and of the policy."""
    found: dict[str, Any] = {"reported": []}
    made.on(Events.METRICS_LOGGED)(lambda engine, event: found["reported"].append(event.payload.metrics["train/loss"]))
    made.on(Events.POLICY_UPDATED)(lambda engine, event: found["reported"].extend(event.payload.metrics.values()))
    made.on(Events.ROLLOUT_COMPLETED)(lambda engine, event: found["reported"].extend(event.payload.metrics.values()))
    made.train(resume=resume)
    return {**found, "weights": {name: whole_of(each).tolist() for name, each in made.model.state_dict().items()}}


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        *((task, "copies") for task in TASKS),
        *((task, "shards") for task in ("dpo", "adapters")),
        *(pytest.param(task, "shards", marks=pytest.mark.slow) for task in TASKS if task not in ("dpo", "adapters")),
        *(pytest.param(task, "tensor", marks=pytest.mark.slow) for task in TASKS if task not in ("ppo", "adapters")),
    ],
)
def test_two_processes_learn_what_one_learns(task: str, layout: str):
    alone = learned(trainer(task, "one"))
    assert len(set(alone["reported"])) > 4
    for each in in_processes(lambda rank: learned(trainer(task, layout))):
        assert each.error == "", each.error
        assert each.value["reported"] == pytest.approx(alone["reported"], rel=1e-6, abs=1e-9)
        for name, weights in alone["weights"].items():
            torch.testing.assert_close(doubles(each.value["weights"][name]), doubles(weights), rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["copies", "shards"])
@pytest.mark.parametrize("task", ["dpo", "ppo", "grpo"])
def test_a_run_that_was_killed_resumes_bit_for_bit(task: str, layout: str, tmp_path: Path):
    """Inside a rollout, and with texts that each process draws from the policy."""

    def made(folder: str) -> Trainer:
        data = None if task == "dpo" else rollouts(None)
        model = Plain() if layout == "shards" and task != "ppo" else None
        if layout == "shards" and task == "ppo":
            data = rollouts()  # the model's own sample() is refused there
        return trainer(task, layout, Checkpointer(tmp_path / folder, every=Every(iterations=1)), data=data, model=model)

    def cut(rank: int) -> None:
        run = made("run")
        run.on(Events.ITERATION_COMPLETED(once=4))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        run.train()

    in_processes(cut)
    resumed = in_processes(lambda rank: learned(made("run"), resume="latest"))
    whole = in_processes(lambda rank: learned(made("whole")))
    for each, expected in zip(resumed, whole, strict=True):
        assert (each.error, expected.error) == ("", "")
        assert each.value["weights"] == expected.value["weights"]
        assert each.value["reported"] == expected.value["reported"][-len(each.value["reported"]) :]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft and transformers
@pytest.mark.parametrize("layout", ["copies", "shards"])
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_adapters_learn_what_they_learn_in_one_process(task: str, layout: str):
    """The reference of a policy with adapters is the policy without them."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def adapted() -> Any:
        torch.manual_seed(2)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
        )
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian")
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)

    alone = learned(trainer(task, "one", model=adapted()))
    assert len(set(alone["reported"])) > 4
    for each in in_processes(lambda rank: learned(trainer(task, layout, model=adapted()))):
        assert each.error == "", each.error
        assert each.value["reported"] == pytest.approx(alone["reported"], rel=1e-6, abs=1e-7)
        for name, weights in alone["weights"].items():
            torch.testing.assert_close(
                doubles(each.value["weights"][name]), doubles(weights), rtol=0, atol=1e-7
            )  # it normalises in float32


class Plain(nn.Module):
    """A model without a sample() of its own: it is called once per token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.embedding(input_ids)).mul(3.0)
        return found


@pytest.mark.parametrize("layout", ["copies", pytest.param("shards", marks=pytest.mark.slow)])
def test_held_out_prompts_are_judged_as_in_one_process(layout: str):
    """Five prompts, which two processes cannot share evenly, and a reward that does not apply to all."""

    def long(completions: Sequence[Sequence[int]], answer: Sequence[int]) -> list[float | None]:
        return [
            None if len(each) == NEW_TOKENS else float(len(each) + right)
            for each, right in zip(completions, answer, strict=True)
        ]

    def judged(layout: str) -> dict[str, float]:
        rows = [{"prompt": prompt, "answer": sum(prompt)} for prompt in ([3], [4, 5], [6], [7], [8, 3])]
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "prompts_per_rollout": 2, "end_token": END}
        topology = LAYOUTS.get(layout)
        made = Trainer(
            Plain().double(), TextRollouts(PROMPTS, reward, sampler=drawn, **options),
            TextRollouts(rows, {"reward": reward, "long": long}, reward_weights=[1.0, 0.5], sampler=drawn, **options),
            strategy=GRPOStrategy(2), backend=None if topology is None else TorchBackend(topology=Topology(**topology)),
            config=TrainingConfig(device="cpu", max_epochs=1, seed=7),
        )  # fmt: skip
        return made.validate()

    alone = judged("one")
    assert len(alone) > 8
    for each in in_processes(lambda rank: judged(layout)):
        assert each.error == "", each.error
        assert each.value == pytest.approx(alone, rel=1e-9)


def test_processes_draw_other_texts_and_train_on_all_of_them():
    def run(rank: int, layout: str) -> Any:
        asked: list[Any] = []

        def judge(prompts: Any, completions: Any) -> list[float]:
            asked.append((prompts, completions))
            return reward(prompts, completions)

        data = TextRollouts(
            [[3, 4]], judge, max_new_tokens=NEW_TOKENS, prompts_per_rollout=2, end_token=END, pad_to=LENGTH
        )
        rewards: list[float] = []
        made = trainer("grpo in one pass", layout, data=data, model=Plain())
        made.on(Events.REWARDS_COMPUTED)(lambda engine, event: rewards.append(event.payload.count))
        made.train()
        return asked, rewards

    for layout in ("copies", "shards"):
        first, second = in_processes(lambda rank, layout=layout: run(rank, layout))
        assert (first.error, second.error) == ("", ""), first.error
        (asked, counts), (others, _) = first.value, second.value
        assert len(asked) == len(others) > 1
        assert all(len(prompts) == 2 for prompts, _ in [*asked, *others])  # one prompt each, in a group of two
        assert all(mine[1] != theirs[1] for mine, theirs in zip(asked, others, strict=True))
        assert set(counts) == {4}


@pytest.mark.parametrize(
    ("arguments", "strategy", "said"),
    [
        (
            {"prompts_per_rollout": 3},
            GRPOStrategy(2),
            r"TextRollouts\(prompts_per_rollout=3\): 2 processes cannot share",
        ),
        ({}, GRPOStrategy(3, minibatch_size=3), r"GRPOStrategy\(minibatch_size=3\): 2 processes cannot share a batch"),
    ],
)
def test_what_cannot_be_shared_evenly_is_refused(arguments: dict[str, Any], strategy: Any, said: str):
    def run(rank: int) -> None:
        data = TextRollouts(PROMPTS, reward, **{"max_new_tokens": 3, "prompts_per_rollout": 4, **arguments})
        Trainer(Plain(), data, strategy=strategy, config=TrainingConfig(device="cpu", max_epochs=1))

    for each in in_processes(run):
        assert any(re.search(said, line) for line in each.error.splitlines()), each.error


def test_a_sharded_model_that_draws_its_texts_itself_is_refused():
    def run(rank: int) -> None:
        trainer("grpo", "shards", data=rollouts(None))

    for each in in_processes(run):
        assert "may call the model more often in one process than in another" in each.error.splitlines()[-1]


@pytest.mark.parametrize("layout", ["copies", "shards"])
@pytest.mark.parametrize("kind", ["texts", "conversations"])
def test_texts_that_the_policy_draws_do_not_depend_on_the_number_of_processes(kind: str, layout: str):
    def run(layout: str) -> Any:
        asked: list[Any] = []

        def judge(prompts: Any, completions: Any) -> list[float]:
            asked.extend((prompt, tuple(each)) for prompt, each in zip(prompts, completions, strict=True))
            return reward(prompts, completions)

        options: dict[str, Any] = {"max_new_tokens": 3, "prompts_per_rollout": 2, "end_token": END, "pad_to": 24}
        data = (
            TextRollouts(PROMPTS, judge, **options)
            if kind == "texts"
            else ConversationRollouts(PROMPTS, Answering, judge, max_length=24, **options)
        )
        trainer("grpo in one pass", layout, data=data, model=Plain()).train()
        return asked

    alone = run("one")
    first, second = in_processes(lambda rank: run(layout))
    assert (first.error, second.error) == ("", ""), first.error
    assert len(set(map(str, alone))) > 4
    assert sorted(first.value + second.value) == sorted(alone)


class Answering:
    """Writes the first token of each turn once more, and ends with an even one."""

    def reset(self, prompt: list[int]) -> list[int]:
        return []

    def step(self, completion: list[int]) -> tuple[list[int], float, bool]:
        return completion[:1], 0.0, completion[0] % 2 == 0


class Updated:
    """A sampler that keeps a copy of the policy."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def __call__(self, prompts: Any, most: int, **options: Any) -> list[list[int]]:
        return drawn(prompts, most)

    def update_weights(self, model: nn.Module, version: int) -> None:
        self.versions.append(version)


def test_the_main_process_alone_updates_a_sampler_that_keeps_a_copy_of_the_policy():
    def run(rank: int) -> list[int]:
        sampler = Updated()
        trainer("grpo", "copies", data=rollouts(sampler)).train()
        return sampler.versions

    first, second = in_processes(run)
    assert (first.error, second.error) == ("", ""), first.error
    assert first.value == list(range(1, len(first.value) + 1)) != []
    assert second.value == []


def test_a_sampler_that_saves_the_whole_model_is_refused_where_processes_hold_parts():
    def run(rank: int) -> None:
        trainer("grpo", "shards", data=rollouts(Updated()))

    for each in in_processes(run):
        assert "TextRollouts(sampler=Updated): it saves the whole model" in each.error.splitlines()[-1]
