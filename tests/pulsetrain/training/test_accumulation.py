"""Accumulation in a run: by batches, by tokens, by a schedule; the same gradient as one large batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pulsetrain import Trainer
from pulsetrain.engine import ConfigurationError, Events, Every, TorchBackend
from pulsetrain.engine.step.accumulation import Accumulate
from pulsetrain.handlers import Checkpointer
from tests.support.models import Tokens, trainer


def split(sizes: list[int], seed: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed))
    return list(zip(inputs.split(sizes), inputs.sum(1, keepdim=True).split(sizes), strict=True))


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def texts(lengths: list[int], rows: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(8, (rows, length + 1), generator=generator) for length in lengths]


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return Tokens()


def update_iterations(run: Trainer) -> list[int]:
    seen: list[int] = []
    run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: seen.append(engine.state.iteration))
    run.train()
    return seen


def test_batches_of_unequal_size_make_the_gradient_of_all_their_samples():
    whole = trainer({"max_updates": 3}, model=linear(), train_loader=split([8, 8, 8]))
    parts = trainer({"max_updates": 3, "accumulate": 2}, model=linear(), train_loader=split([3, 5, 7, 1, 2, 6]))
    whole.train()
    parts.train()
    for mine, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert parts.history["train/loss"] == pytest.approx(whole.history["train/loss"], rel=1e-6)  # weighted, too


def test_accumulated_tokens_make_the_gradient_of_all_of_them():
    lengths = [3, 5, 4, 9, 12, 1]  # two rows each: 6, 10, 8 / 18, 24 / 2 tokens
    run = trainer(
        {"max_updates": 2, "accumulate": Accumulate(tokens=24)},
        model=language_model(),
        strategy="pretrain",
        train_loader=texts(lengths),
    )
    assert run.length.total_updates == 2
    assert update_iterations(run) == [3, 5]
    assert run.state.stop_reason == "max_updates=2 was reached"
    assert run.state.iteration == 5

    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for window in (texts(lengths)[:3], texts(lengths)[3:5]):
        optimizer.zero_grad()
        total = sum(batch[:, 1:].numel() for batch in window)
        for batch in window:
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            (loss * batch[:, 1:].numel() / total).backward()
        optimizer.step()
    torch.testing.assert_close(run.model.table.weight, model.table.weight, rtol=1e-6, atol=1e-7)


def test_a_schedule_accumulates_more_batches_during_the_run():
    rule = Accumulate(schedule={0: 1, 2: 3, 3: 2})
    run = trainer({"max_updates": 5, "accumulate": rule}, model=linear(), train_loader=split([4] * 20))
    assert run.total_iterations == 1 + 1 + 3 + 2 + 2
    assert update_iterations(run) == [1, 2, 5, 7, 9]
    run = trainer({"max_iterations": 8, "accumulate": rule}, model=linear(), train_loader=split([4] * 20))
    assert run.length.total_updates == 4
    assert update_iterations(run) == [1, 2, 5, 7]


def test_a_window_keeps_its_gradients_in_one_place():
    rule = {"accumulate": 4, "max_updates": 2, "clip_grad_norm": 1e-3}
    run = trainer(rule, model=linear(), train_loader=split([4, 3, 4, 4, 1, 2, 3, 4]))  # sizes that need a correction
    places: list[tuple[int, ...]] = []

    def note(engine: Trainer) -> None:
        grads = [p.grad for p in engine.model.parameters()]
        if grads[0] is not None:  # after an update they are None
            places.append(tuple(grad.data_ptr() for grad in grads))

    run.add_event_handler(Events.ITERATION_COMPLETED, note)
    run.add_event_handler(Events.GRADIENTS_READY, note)
    run.train()
    assert len(places) == 8  # three batches and the moment before the update, twice
    assert len(set(places[:4])) == len(set(places[4:])) == 1


def cut(run: Trainer, iteration: int) -> None:
    def pull(engine: Trainer) -> None:
        if engine.state.iteration == iteration:
            raise ZeroDivisionError

    run.add_event_handler(Events.ITERATION_COMPLETED, pull, phase=3)
    with pytest.raises(ZeroDivisionError):
        run.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [Accumulate(batches=3), Accumulate(tokens=30), Accumulate(schedule={0: 1, 2: 4})], ids=repr
)
@pytest.mark.parametrize("iteration", [1, 4, 7, 10])
def test_a_run_resumed_inside_a_window_equals_the_uninterrupted_one(rule: Accumulate, iteration: int, tmp_path: Path):
    def make(folder: str) -> Trainer:
        return trainer(
            {"max_iterations": 20, "accumulate": rule, "clip_grad_norm": 1.0},
            model=language_model(),
            strategy="pretrain",
            train_loader=texts([3, 5, 4, 9, 12, 1, 7, 2, 2, 8, 6, 5]),
            handlers=[Checkpointer(tmp_path / folder, every=Every(iterations=1))],
        )

    whole = make("whole")
    history = whole.train()
    cut(make("cut"), iteration)
    again = make("cut")
    assert again.train(resume="latest") == history
    assert again.state.update == whole.state.update
    assert torch.equal(again.model.table.weight, whole.model.table.weight)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"accumulate": Accumulate(tokens=8)}, {}, r"accumulate=Accumulate\(.*\): SupervisedStrategy counts no tokens"),
        ({"accumulate": Accumulate(schedule={0: 41})}, {}, r"the run has 10 batches, which make no update"),
    ],
)
def test_an_impossible_rule_is_rejected_when_the_trainer_is_made(
    config: dict[str, Any], arguments: dict[str, Any], message: str
):
    with pytest.raises(ConfigurationError, match=message):
        trainer({"max_epochs": 1, **config} if "max_iterations" not in config else config, **arguments)


def test_tokens_of_a_stream_are_accumulated_too():
    run = trainer(
        {"max_updates": 2, "accumulate": Accumulate(tokens=24)},
        model=language_model(),
        strategy="pretrain",
        train_loader=iter(texts([3, 5, 4, 9, 12, 1])),
    )
    assert update_iterations(run) == [3, 5]


def test_a_stream_whose_strategy_counts_no_tokens_is_rejected_at_its_first_batch():
    config = {"max_iterations": 4, "accumulate": Accumulate(tokens=8)}
    run = trainer(config, model=linear(), train_loader=iter(split([4, 4, 4, 4])))
    with pytest.raises(ConfigurationError, match="the strategy counts no tokens; accumulate batches"):
        run.train()
    run = trainer({"max_tokens": 100}, model=linear(), train_loader=iter(split([4] * 9)))
    with pytest.raises(ConfigurationError, match=r"max_tokens=100\): the strategy counts no tokens"):
        run.train()
    assert run.state.iteration == 1


def test_the_number_of_updates_is_estimated_over_several_batches():
    lengths = [60, 4, 4, 4, 4, 4, 4, 4] * 2  # two rows each
    rule = Accumulate(tokens=22)
    run = trainer({"accumulate": rule}, model=language_model(), strategy="pretrain", train_loader=texts(lengths))
    assert run.length.total_updates == 16  # 22 a batch on average
    one_large = texts([1, *[40] * 15])
    run = trainer({"accumulate": rule}, model=language_model(), strategy="pretrain", train_loader=one_large)
    assert update_iterations(run) == list(range(2, 17))


def padded(rows: int, length: int, ignored: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(8, (rows, length), generator=generator)
    targets = torch.randint(8, (rows, length), generator=generator)
    targets.view(-1)[:ignored] = -100
    return tokens, targets


def test_ignored_targets_do_not_weigh_in_accumulation_history_and_validation():
    parts = [padded(2, 5, 7, 0), padded(2, 5, 1, 1), padded(2, 5, 10, 2)]  # the last batch has weight zero
    whole = [tuple(torch.cat(each) for each in zip(*parts[:2], strict=True))]
    split_run = trainer(
        {"max_updates": 1, "accumulate": 2, "learning_rate": 1.0},
        model=language_model(),
        strategy="supervised",
        train_loader=parts[:2],
        val_loader=parts,
    )
    whole_run = trainer(
        {"max_updates": 1, "learning_rate": 1.0},
        model=language_model(),
        strategy="supervised",
        train_loader=whole,
        val_loader=whole,
    )
    split_history, whole_history = split_run.train(), whole_run.train()
    torch.testing.assert_close(split_run.model.table.weight, whole_run.model.table.weight, rtol=1e-6, atol=1e-7)
    assert split_history["train/loss"] == pytest.approx(whole_history["train/loss"], rel=1e-6)
    assert split_history["val/loss"] == pytest.approx(whole_history["val/loss"], rel=1e-6)


def test_targets_of_unequal_length_weigh_by_their_elements():
    def pair(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(2, length, 4, generator=torch.Generator().manual_seed(seed))
        return inputs, inputs.sum(-1, keepdim=True)

    parts = [pair(1, 0), pair(5, 1)]
    whole = [tuple(torch.cat(each, dim=1) for each in zip(*parts, strict=True))]
    one = trainer({"max_updates": 1, "accumulate": 2}, model=linear(), train_loader=parts)
    other = trainer({"max_updates": 1}, model=linear(), train_loader=whole)
    assert one.train()["train/loss"] == pytest.approx(other.train()["train/loss"], rel=1e-6)
    torch.testing.assert_close(one.model.weight, other.model.weight, rtol=1e-6, atol=1e-7)


class OutOfMemory(nn.Module):
    """Fails in the batches of these numbers."""

    def __init__(self, at: set[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.at, self.calls = nn.Linear(4, 1), at, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.inner(inputs)
        if self.calls in self.at:
            raise torch.OutOfMemoryError
        return outputs


def backend(precision: str) -> TorchBackend:
    return TorchBackend("cpu", precision=precision, gradient_scale=64.0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_batch_that_fails_discards_the_accumulated_gradients(precision: str):
    norms: list[float] = []
    batches = split([4] * 8)
    config = {"max_epochs": 2, "accumulate": 4}
    run = trainer(config, model=OutOfMemory({2}), train_loader=batches, backend=backend(precision))
    run.add_event_handler(Events.GRADIENTS_READY, lambda engine, event: norms.append(event.payload.grad_norm.item()))
    with pytest.raises(torch.OutOfMemoryError):
        run.train()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    run.train()  # the next epoch
    expected = linear()
    for inputs, targets in batches[:4]:
        (nn.functional.mse_loss(expected(inputs), targets) / 4).backward()
    norm = torch.cat([p.grad.flatten() for p in expected.parameters()]).norm().item()
    assert norms[0] == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_handler_that_fails_between_backward_and_update_leaves_no_gradient(precision: str):
    norms: list[float] = []
    config = {"max_epochs": 3, "learning_rate": 1e-6}
    run = trainer(config, model=linear(), train_loader=split([4]) * 2, backend=backend(precision))

    @run.on(Events.GRADIENTS_READY)
    def fail_once(engine: Trainer, event: Any) -> None:
        norms.append(event.payload.grad_norm.item())
        if engine.state.iteration == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.train()
    run.train()
    assert norms == pytest.approx([norms[0]] * 6, rel=1e-2)  # always the same batch's


def test_a_checkpoint_inside_a_window_resumes_under_another_rule(tmp_path: Path):
    def make(accumulate: int) -> Trainer:
        return trainer(
            {"max_iterations": 12, "accumulate": accumulate},
            model=linear(),
            train_loader=split([4] * 12),
            handlers=[Checkpointer(tmp_path, every=Every(iterations=1), keep_last=20)],
        )

    cut(make(4), 6)
    resumed = make(1)
    assert update_iterations_after(resumed) == [7, 8, 9, 10, 11, 12]


def update_iterations_after(run: Trainer) -> list[int]:
    seen: list[int] = []
    run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: seen.append(engine.state.iteration))
    run.train(resume="latest")
    return seen


@pytest.mark.parametrize(
    ("before", "after", "cut", "end"),
    [
        (Accumulate(batches=4), Accumulate(batches=1), 12, 19),  # 3 updates, and 7 are left
        (Accumulate(batches=4), Accumulate(batches=1), 11, 19),  # 2 updates, 3 batches wait, and 1 completes the next
        (Accumulate(batches=1), Accumulate(batches=4), 3, 31),
        (Accumulate(batches=1), Accumulate(schedule={0: 1, 6: 2}), 3, 14),
        (Accumulate(batches=2), Accumulate(schedule={0: 1, 6: 2}), 8, 18),
        (Accumulate(batches=2), Accumulate(batches=2), 7, 20),
    ],
)
def test_a_bound_in_updates_holds_when_a_run_resumes_under_another_rule(
    before: Accumulate, after: Accumulate, cut: int, end: int, tmp_path: Path
):
    def make(rule: Accumulate, *, saves: bool = True) -> Trainer:
        saver = Checkpointer(tmp_path, every=Every(iterations=1))
        config = {"max_updates": 10, "accumulate": rule, "max_epochs": None}
        return trainer(config, model=linear(), train_loader=split([2] * 25), handlers=[saver] if saves else [])

    first = make(before)
    first.add_event_handler(Events.ITERATION_COMPLETED(once=cut), lambda engine: engine.terminate())
    first.train()
    second = make(after)
    second.add_event_handler(Events.ITERATION_COMPLETED(once=cut + 2), lambda engine: engine.terminate())
    second.train(resume="latest")
    third = make(after)
    third.train(resume="latest")
    assert (third.state.update, third.state.iteration, third.total_iterations) == (10, end, end)
    assert third.state.stop_reason == "max_updates=10 was reached" or end == 25
    fourth = make(after, saves=False)
    fourth.train(resume=tmp_path)
    assert (fourth.state.update, fourth.state.iteration) == (10, end)
    fourth.train()  # from the beginning
    assert (fourth.state.update, fourth.state.iteration) == (10, after.batches_in(10))
