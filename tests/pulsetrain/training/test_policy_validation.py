"""Held-out prompts as a validation set: the policy writes, its rewards are reported, and training does not notice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from pulsetrain import Trainer, verify
from pulsetrain.engine import Events, Every, GRPOStrategy, PPOStrategy, SFTStrategy
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.rollouts import EnvironmentRollouts, TextRollouts
from pulsetrain.handlers import EMA, Checkpointer, EarlyStopping, EventRecorder
from pulsetrain.report import write_report
from tests.support.models import Tokens, loader, trainer
from tests.support.rollouts import Counting, Valued
from tests.support.runs_backends import saved
from tests.support.runs_strategies import (
    END,
    GROUPS,
    JAX,
    LENGTH,
    MAKE_BACKEND,
    NEW_TOKENS,
    PROMPTS,
    VOCABULARY,
    differences,
    jax_language_model,
    language_model,
    on_each,
    reward,
)

HELD_OUT = [[1], [2, 2], [1, 5], [3], [5]]


def lengths(prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
    return [float(len(each)) for each in completions]


def ends(completions: Sequence[Any]) -> list[float | None]:
    return [None if len(each) == 1 else float(each[-1] == END) for each in completions]


def rollouts(prompts: Sequence[Any] = PROMPTS, judge: Any = lengths, **options: Any) -> TextRollouts:
    return TextRollouts(prompts, judge, **{"max_new_tokens": 4, "prompts_per_rollout": 2, "end_token": END, **options})


def run_of(held_out: Any, *, model: Any = None, config: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {"max_updates": 3, "learning_rate": 0.5, "seed": 3, "validate_every": Every(iterations=1)}
    arguments.setdefault("strategy", GRPOStrategy(2))
    return trainer(
        {**settings, **(config or {})}, model=model or Tokens(VOCABULARY), train_loader=rollouts(), val_loader=held_out,
        **arguments,
    )  # fmt: skip


def drawn(prompts: Sequence[Sequence[int]], most: int, **_: Any) -> list[list[int]]:
    """Texts that depend on their prompts: as many tokens as the sum of its tokens, at most 4, and an end if fewer."""
    return [[7] * min(sum(prompt), most) if sum(prompt) >= most else [7] * sum(prompt) + [END] for prompt in prompts]


# ----------------------------------------------------------------------------------------------------- what is reported


def test_at_temperature_0_each_text_is_the_most_likely_one() -> None:
    run = run_of(rollouts(HELD_OUT, temperature=0.0, log_completions=5), model=Tokens(VOCABULARY))
    shown: list[str] = []
    run.add_event_handler(Events.MEDIA_LOGGED, lambda engine, event: shown.append(event.payload.value))
    run.validate()
    following = run.model.table.weight.argmax(-1).tolist()
    for prompt, text in zip(HELD_OUT, shown, strict=True):
        expected, last = [], prompt[-1]
        while len(expected) < 4 and END not in expected:
            last = following[last]
            expected.append(last)
        assert text.endswith(f"completion: {expected}")


def test_a_temperature_that_training_does_not_learn_at_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"TextRollouts\(temperature=0\.5\): is of a validation set"):
        trainer({}, model=Tokens(VOCABULARY), train_loader=rollouts(temperature=0.5), strategy=GRPOStrategy(2))


def test_a_reward_that_applies_to_no_text_of_a_rollout_keeps_no_old_value() -> None:
    calls: list[int] = []

    def sometimes(completions: Sequence[Any]) -> list[float | None]:
        calls.append(1)
        return [1.0 if len(calls) == 1 else None] * len(completions)

    judge = {"lengths": lengths, "sometimes": sometimes}
    run = trainer(
        {"max_updates": 2, "seed": 0}, model=Tokens(VOCABULARY), train_loader=rollouts(judge=judge),
        strategy=GRPOStrategy(2),
    )  # fmt: skip
    seen: list[bool] = []
    run.add_event_handler(
        Events.ROLLOUT_COMPLETED, lambda engine: seen.append("rollout/reward/sometimes" in engine.state.metrics)
    )
    run.train()
    assert seen == [True, False]
    assert "rollout/reward/lengths" in run.state.metrics


def test_the_metrics_are_those_of_one_completion_for_each_prompt() -> None:
    asked: list[Any] = []

    def sampler(prompts: list[list[int]], most: int, **options: Any) -> list[list[int]]:
        asked.append(prompts)
        return drawn(prompts, most)

    held_out = rollouts(HELD_OUT, {"lengths": lengths, "ends": ends}, reward_weights=[1.0, 10.0], sampler=sampler)
    run = run_of(held_out)
    found = run.validate()
    assert asked == [HELD_OUT[:2], HELD_OUT[2:4], HELD_OUT[4:]]
    # completions of 2 (ended), 4, 4, 4 (ended) and 4 tokens
    assert found == pytest.approx({
        "val/reward": (12.0 + 4.0 + 4.0 + 14.0 + 4.0) / 5,
        "val/reward_std": torch.tensor([12.0, 4.0, 4.0, 14.0, 4.0]).std(correction=0).item(),
        "val/reward/lengths": 18 / 5,
        "val/reward_std/lengths": 0.8,
        "val/reward/ends": 2 / 5,
        "val/reward_std/ends": (0.4 * 0.6) ** 0.5,
        "val/length": 18 / 5,
        "val/length_min": 2.0,
        "val/length_max": 4.0,
        "val/ended": 2 / 5,
        "val/truncated": 3 / 5,
    })  # fmt: skip
    assert run.state.metrics["val/reward"] == found["val/reward"]


def test_several_sets_have_their_names_and_may_stand_beside_loaders() -> None:
    run = run_of({"easy": rollouts([[1]], sampler=drawn), "hard": rollouts([[9]], sampler=drawn)})
    found = run.validate()
    assert (found["easy/reward"], found["hard/reward"]) == (2.0, 4.0)


def test_it_follows_the_trainers_cadence_and_handlers_read_it(tmp_path: Path) -> None:
    stopping = EarlyStopping("val/reward", patience=1, min_delta=100.0, mode="max")
    run = run_of(rollouts(HELD_OUT), config={"validate_every": Every(iterations=2), "max_updates": 8},
                 handlers=[stopping, EventRecorder(tmp_path)])  # fmt: skip
    run.train()
    events = list(EventLog(tmp_path).read(event="validation_completed"))
    assert [event.iteration for event in events] == [2, 4]
    assert run.state.iteration == 4
    assert [event.payload["metrics"]["val/reward"] for event in events] == run.history["val/reward"]


def test_each_validation_draws_the_same_random_numbers() -> None:
    run = run_of(rollouts(HELD_OUT))
    first = run.validate()
    torch.rand(7)  # whatever was drawn meanwhile
    before = torch.get_rng_state()
    assert run.validate() == first
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        run.model.table.weight.mul_(-9.0)
    assert run.validate() != first


def test_it_learns_what_it_learns_without() -> None:
    alone, judged = run_of(None), run_of(rollouts(HELD_OUT))
    alone.train()
    judged.train()
    assert len(judged.history["val/reward"]) == 3
    assert torch.equal(alone.model.table.weight, judged.model.table.weight)
    assert alone.history["rollout/reward"] == judged.history["rollout/reward"]


def test_the_model_is_in_eval_mode_and_has_averaged_weights() -> None:
    class Watched(Tokens):
        def __init__(self) -> None:
            super().__init__(VOCABULARY)
            self.seen: list[tuple[bool, Tensor]] = []

        def forward(self, tokens: Tensor) -> Tensor:
            self.seen.append((self.training, self.table.weight.detach().clone()))
            return super().forward(tokens)

    torch.manual_seed(1)
    run = run_of(rollouts(HELD_OUT), model=Watched(), handlers=[EMA(0.5)], config={"validate_every": None})
    run.train()
    run.model.train()
    live = run.model.table.weight.detach().clone()
    run.model.seen.clear()
    run.validate()
    assert run.model.seen
    assert not any(training for training, _ in run.model.seen)
    assert not any(torch.equal(weight, live) for _, weight in run.model.seen)
    assert run.model.training
    assert torch.equal(run.model.table.weight, live)


def test_a_critic_is_judged_as_well() -> None:
    torch.manual_seed(0)
    run = run_of(rollouts(HELD_OUT), model=Valued(VOCABULARY), strategy=PPOStrategy(0.0, minibatch_epochs=1))
    run.train()
    assert len(run.history["val/reward"]) == 3


# ------------------------------------------------------------------------------------------------ resumed and recorded


# two batches a rollout, so that checkpoints hold rows with which texts were truncated
OPTIONS: dict[str, Any] = {"minibatch_epochs": 2, "ratio": "sequence", "advantages": "rloo", "entropy_coef": 0.01}
OPTIONS |= {"mask_truncated": True, "normalization": "token_mean"}


def started(folder: Path, on: str, *more: Any) -> Trainer:
    def texts(prompts: Any, count: int) -> TextRollouts:
        return TextRollouts(
            prompts, reward, max_new_tokens=NEW_TOKENS, prompts_per_rollout=count, end_token=END, pad_to=LENGTH,
            log_completions=2,
        )  # fmt: skip

    return trainer(
        {"max_iterations": 6, "learning_rate": 0.05, "seed": 3, "validate_every": Every(iterations=2)},
        model=jax_language_model() if on == JAX else language_model(),
        backend=MAKE_BACKEND[on](), train_loader=texts(PROMPTS[:4], 2), val_loader=texts(PROMPTS[4:], 2),
        strategy=GRPOStrategy(3, **OPTIONS),
        handlers=[Checkpointer(folder, every=Every(iterations=1), keep_last=9), *more],
    )  # fmt: skip


@pytest.mark.slow
@on_each([GROUPS])
def test_a_resumed_run_reports_the_same_and_nothing_is_unsaved(task: Any, on: str, tmp_path: Path) -> None:
    whole = started(tmp_path / "whole", on)
    texts = published(whole)
    with capture_logs() as logs:
        whole.train()
    warned = [name for line in logs if line["log_level"] != "info" for name in line.get("attributes", [line["event"]])]
    assert [name for name in warned if "published" not in name] == []  # the list of this test itself is not saved
    assert len(whole.history["val/reward"]) == 3
    for cut in (3, 4):
        again = started(tmp_path / f"again {cut}", on)
        further = published(again)
        again.train(resume=saved(tmp_path / "whole", cut))
        assert again.history["val/reward"] == whole.history["val/reward"]
        assert differences(again, whole) == set()
        assert len(further) > 2
        assert further == texts[-len(further) :]


@pytest.mark.slow
@on_each([GROUPS])
def test_a_recorded_run_is_reproduced_with_its_validations_and_completions(task: Any, on: str, tmp_path: Path) -> None:
    started(tmp_path, on, EventRecorder(tmp_path)).train()
    kinds = {event.event for event in EventLog(tmp_path).read()}
    assert {"media_logged", "validation_completed", "rollout_completed"} <= kinds
    found = verify(tmp_path, lambda: started(tmp_path, on, EventRecorder(tmp_path)), from_iteration=3)
    assert found, str(found)
    assert (found.start, found.end) == (2, 6)
    assert not found.changed


# ----------------------------------------------------------------------------------------------- completions in the log


def published(run: Trainer) -> list[tuple[int, str, str]]:
    found: list[tuple[int, str, str]] = []
    run.on(Events.MEDIA_LOGGED)(
        lambda engine, event: found.append((event.iteration, event.payload.name, event.payload.value))
    )
    return found


class Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


def test_completions_are_published_with_their_rewards() -> None:
    def none(completions: Sequence[str]) -> list[float | None]:
        return [None] * len(completions)

    def sampler(prompts: list[list[int]], most: int, **options: Any) -> list[list[int]]:
        return [[65 + number, END] for number, _ in enumerate(prompts)]

    options = {"tokenizer": Bytes(), "sampler": sampler, "max_new_tokens": 2, "prompts_per_rollout": 3}
    given = TextRollouts(["a"], {"size": lengths, "none": none}, end_token=END, log_completions=2, **options)
    held_out = TextRollouts(["b", "c"], lengths, end_token=END, log_completions=9, **options)
    run = trainer({"max_updates": 1}, model=Tokens(256), train_loader=given, val_loader=held_out,
                  strategy=GRPOStrategy(2))  # fmt: skip
    found = published(run)
    run.train()
    assert found == [
        (0, "rollout/completion/1", "reward 1 (size 1, none -)\nprompt: a\ncompletion: A"),
        (0, "rollout/completion/2", "reward 1 (size 1, none -)\nprompt: a\ncompletion: D"),
        (1, "val/completion/1", "reward 1 (lengths 1)\nprompt: b\ncompletion: A"),
        (1, "val/completion/2", "reward 1 (lengths 1)\nprompt: c\ncompletion: B"),
    ]


def test_without_a_tokenizer_they_are_token_ids_and_long_ones_are_cut() -> None:
    run = run_of(None)
    run.train_loader.log_completions = 1
    found = published(run)
    run.train()
    assert [name for _, name, _ in found] == ["rollout/completion/1"] * 3
    assert found[0][2].splitlines()[1].startswith("prompt: [")
    held_out = TextRollouts(["x" * 5000], lengths, tokenizer=Bytes(), log_completions=1, max_new_tokens=1500,
                            sampler=lambda prompts, most, **_: [[66] * most] * len(prompts))  # fmt: skip
    run = trainer({"max_updates": 1}, model=Tokens(256), train_loader=rollouts([[65]], max_new_tokens=2),
                  val_loader=held_out, strategy=GRPOStrategy(2))  # fmt: skip
    found = published(run)
    run.validate()
    assert [len(line) for line in found[0][2].splitlines()[1:]] == [len("prompt: ") + 1000, len("completion: ") + 1000]


def test_nothing_is_published_where_it_was_not_asked_for_or_nobody_reads_it() -> None:
    run = run_of(None)
    found = published(run)
    run.train()
    assert found == []
    run = run_of(None)
    run.train_loader.log_completions = 3
    run.bus.subscribe(Events.MEDIA_LOGGED, found.append, passive=True)  # sees what is fired, and asks for nothing
    run.train()
    assert found == []


def test_the_report_shows_the_latest(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    run = run_of(rollouts(HELD_OUT, log_completions=1), handlers=[EventRecorder(tmp_path / "run")])
    run.train()
    page = write_report(tmp_path / "run", tmp_path / "page.html").path.read_text()
    texts = [event.payload["value"] for event in EventLog(tmp_path / "run").read(event="media_logged")]
    assert len(texts) == 3
    assert '<th scope="row">val/completion/1 <small>at 3</small></th>' in page
    assert f"<td>{texts[-1]}</td>" in page
    assert "<h2>Texts</h2>" in page


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_policy_is_what_is_judged() -> None:
    with pytest.raises(ConfigurationError, match=r"^TextRollouts: SFTStrategy does not learn from rollouts"):
        trainer({}, model=Tokens(), train_loader=loader(), val_loader=rollouts(), strategy=SFTStrategy())


def test_one_set_serves_one_trainer() -> None:
    held_out = rollouts(HELD_OUT)
    run_of(held_out)
    with pytest.raises(ConfigurationError, match=r"^TextRollouts: already belongs to another trainer"):
        run_of(held_out)


def test_held_out_texts_fit_the_models_context() -> None:
    held_out = TextRollouts([[1] * 30], lengths, max_new_tokens=8)
    with pytest.raises(ConfigurationError, match=r"^TextRollouts\(max_new_tokens=8\): with the longest prompt"):
        run_of(held_out, model=language_model())


def test_environments_are_refused_as_a_validation_set() -> None:
    with pytest.raises(ConfigurationError, match=r"^Trainer\(val_loader\): 'val' is EnvironmentRollouts, whose "):
        run_of(EnvironmentRollouts(Counting, 2, 4))


def test_a_reward_that_fails_in_a_validation_names_itself() -> None:
    def broken(completions: Sequence[Any]) -> list[float]:
        raise ValueError("no score")

    run = run_of(rollouts(HELD_OUT, broken))
    with pytest.raises(ValueError, match="no score") as caught:
        run.validate()
    assert "in TextRollouts, in the reward 'broken' of 2 texts" in caught.value.__notes__
    assert run.model.training
