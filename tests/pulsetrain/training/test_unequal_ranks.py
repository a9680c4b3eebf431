"""Processes whose loaders have no length, and may give them different numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from pulsetrain import Loop, Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, TorchBackend
from pulsetrain.engine.distributed.agreed_pass import AgreedPass
from pulsetrain.engine.distributed.collectives import ControlGroup
from pulsetrain.engine.distributed.pulse import Pulse
from pulsetrain.engine.distributed.ranks import Ranks
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.handlers import Checkpointer, EventRecorder
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import make, make_with

SIZE = 4  # rows of a batch of one process
ALL = [each.double() for each in pairs(200).tensors]
NUMBER = {value: index for index, value in enumerate(ALL[0][:, 0].tolist())}  # of a row, by its first value


class Rows(IterableDataset[Any]):
    """A stream of rows."""

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return ((ALL[0][row], ALL[1][row]) for row in self.rows)


class Batches:
    """A user's loader without a length; writes into its batches, as preprocessing may."""

    def __init__(self, rows: range) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        for at in range(0, len(self.rows), SIZE):
            rows = list(self.rows[at : at + SIZE])
            yield ALL[0][rows], ALL[1][rows]


class Keeping(Batches):
    """One that keeps its position itself."""

    def __init__(self, rows: range) -> None:
        super().__init__(rows)
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number >= self.given:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class InOrder(Sampler[int]):
    """A user's sampler without a length."""

    def __init__(self, rows: range) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


LOADERS: dict[str, Callable[[range], Iterable[Any]]] = {
    "a stream": lambda rows: DataLoader(Rows(rows), SIZE),
    "an iterable": Batches,
    "a loader with a state": Keeping,
    "a sampler": lambda rows: DataLoader(TensorDataset(*ALL), SIZE, sampler=InOrder(rows)),
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def parts(rows: int, *, more: int) -> list[range]:
    """The rows of each rank; the one with this number has about twice as many."""
    found = [range(rows // 3), range(rows // 3, rows)]
    return found if more == 1 else found[::-1]


def whole_batches(shares: list[range]) -> list[Any]:
    """What one process has to train for the same result: the batches of both ranks as one, while both have any."""
    batches = [[list(share[at : at + SIZE]) for at in range(0, len(share), SIZE)] for share in shares]
    found = []
    for pair in zip_longest(*batches, fillvalue=[]):
        rows = [row for share in pair for row in share]
        found.append((ALL[0][rows], ALL[1][rows]))
    return found


def backend_of(kind: str) -> Any:
    return TorchBackend("cpu", topology=Topology(shard=2)) if kind == "sharded" else None


def weights_of(made: Trainer) -> Any:
    named = made.model.state_dict().items()
    return {name: (each.full_tensor() if hasattr(each, "full_tensor") else each).tolist() for name, each in named}


def counted(made: Trainer) -> list[int]:
    """A list that the rows of every step are added to, if they count."""
    found: list[int] = []

    @made.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        if made.stepper.counts:
            found.extend(NUMBER[value] for value in made.state.batch[0][:, 0].tolist())

    return found


@pytest.mark.parametrize("kind", ["copies", pytest.param("sharded", marks=pytest.mark.slow)])
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_with_other_numbers_of_batches_learn_what_one_process_learns(kind: str, accumulate: int):
    """Every sample counts once, whichever rank has more of them; also in validation."""
    config = {"accumulate": accumulate, "clip_grad_norm": 1.0}
    cases = [(rows, rows // 2 % 2) for rows in range(15, 35) if kind == "copies" or rows in (15, 16, 18, 33)]

    def train(loader: Any, val: Any, backend: Any = None) -> Any:
        made = make_with(net(), loader, val, backend=backend, **config)
        got = [0, 0]
        made.on(Events.GET_BATCH_STARTED)(lambda: got.__setitem__(0, got[0] + 1))
        made.on(Events.GET_BATCH_COMPLETED)(lambda: got.__setitem__(1, got[1] + 1))
        rows, history = counted(made), made.train()
        state = made.state
        counts = state.iteration, state.update, state.samples, state.epoch_length, made.data.passes, got
        return counts, weights_of(made), history.get("val/loss"), history.get("train/loss"), rows

    def body(rank: int) -> Any:
        found = []
        for rows, more in cases:
            share = parts(rows, more=more)[rank]
            val = Batches(share) if kind == "copies" else whole_batches(parts(rows, more=more))
            loader = list(LOADERS.values())[rows % len(LOADERS)](share)
            found.append(train(loader, val, backend_of(kind)))
        return found

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    for (rows, more), mine, other in zip(cases, first.value, second.value, strict=True):
        assert mine[:4] == other[:4], "the ranks have diverged"
        batches = whole_batches(parts(rows, more=more))
        expected = train(batches, batches)
        assert mine[0][:5] == expected[0][:5], (rows, more)
        assert sorted(mine[4] + other[4]) == sorted([*range(rows)] * 2), (rows, more)
        assert mine[2] == pytest.approx(expected[2], rel=1e-6), "a mean of float32 numbers"
        assert mine[3] == pytest.approx(expected[3], rel=1e-6)
        for name, values in mine[1].items():
            torch.testing.assert_close(
                torch.tensor(values, dtype=torch.float64),
                torch.tensor(expected[1][name], dtype=torch.float64),
                rtol=1e-12,
                atol=1e-12,
            )


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 1])
def test_a_run_resumes_bit_for_bit_from_each_of_its_iterations(more: int, tmp_path: Path):
    """Before and after a rank has ended, and with gradients that wait; the batch that is read ahead is not trained."""
    rows = 23  # 2 and 4 batches
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate": 2, "optimizer": "adamw", "learning_rate": 0.01}

    def make_of(kind: str, rank: int, *handlers: Any) -> Trainer:
        return make(net(), LOADERS[kind](parts(rows, more=more)[rank]), *handlers, **settings)

    def whole(rank: int) -> Any:
        found = []
        for number, kind in enumerate(LOADERS):
            made = make_of(kind, rank, Checkpointer(tmp_path / str(number), Every(iterations=1), keep_last=50))
            seen = counted(made)
            made.train()
            found.append((weights_of(made), seen))
        return found

    def resumed(rank: int) -> Any:
        found = []
        for number, kind in enumerate(LOADERS):
            for path in sorted((tmp_path / str(number) / "checkpoints").iterdir()):
                if path.name[:9].isdigit():
                    made = make_of(kind, rank)
                    seen = counted(made)
                    made.train(resume=path)
                    found.append((number, int(path.name[:9]), weights_of(made), seen, made.state.iteration))
        return found

    expected = in_processes(whole)
    assert [each.error for each in expected] == ["", ""]
    ended = in_processes(resumed)
    assert [each.error for each in ended] == ["", ""]
    iterations = {number: at for number, at, *_ in ended[0].value}
    assert set(iterations) == set(range(len(LOADERS)))
    for whole_rank, resumed_rank in zip(expected, ended, strict=True):
        for number, at, weights, seen, last in resumed_rank.value:
            assert weights == whole_rank.value[number][0], (number, at)
            assert last == iterations[number]
            # what is left of what the whole run has counted on this rank
            all_seen = whole_rank.value[number][1]
            assert seen == all_seen[len(all_seen) - len(seen) :]
    for number, at, _, seen, _ in ended[0].value:
        theirs = next(each[3] for each in ended[1].value if each[:2] == (number, at))
        batches = [len(batch[0]) for batch in whole_batches(parts(rows, more=more))] * 2
        assert len(seen) + len(theirs) == sum(batches[at:]), (number, at)


def test_batches_are_left_out_by_their_number_on_all_ranks():
    """Also where one of them has none with this number any more."""
    shares = parts(40, more=1)  # 4 and 7 batches

    class Whole:
        def __iter__(self) -> Iterator[Any]:
            return iter(whole_batches(shares))

    def train(loader: Any) -> Any:
        made = make(net(), loader, skip_batches=((2, 5), (9, 9)), max_epochs=3)
        made.train()
        return made.state.iteration, made.state.samples, made.data.skipped, weights_of(made)

    first, second = in_processes(lambda rank: train(Batches(shares[rank])))
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    expected = train(Whole())
    assert first.value[:3] == expected[:3]
    for name, values in first.value[3].items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected[3][name]), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_an_iterator_loses_nothing_at_a_bound_inside_of_a_pass():
    def body(rank: int) -> Any:
        loader = iter(Batches(range(rank * 100, rank * 100 + SIZE * (10 - 3 * rank))))
        made = make(net(), loader, max_epochs=None, max_iterations=4)
        seen = counted(made)
        made.train()
        made.train()
        with pytest.raises(Exception) as refused:  # noqa: PT011  # of either kind
            made.train()
        return seen, str(refused.value)

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value[0] == [*range(8 * SIZE)]
    assert second.value[0] == [*range(100, 100 + 7 * SIZE)]
    said = "the loader of rank 1 gave no batch in this pass, and others did; every process needs at least one"
    assert said in first.value[1]
    assert said in second.value[1]


def test_an_error_of_a_loader_comes_when_its_batch_is_due():
    class Failing(Batches):
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(super().__iter__()):
                if number == 2:
                    raise ValueError("row 8 is damaged")
                yield batch

    def body(rank: int) -> Any:
        made = make(net(), (Failing if rank else Batches)(range(20)))
        seen: list[int] = []
        made.on(Events.ITERATION_COMPLETED)(lambda: seen.append(made.state.iteration))
        try:
            made.train()
        except Exception as error:
            return seen, str(error)
        return seen, ""

    first, second = in_processes(body)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert second.value == ([1, 2], "row 8 is damaged")
    assert first.value[0] == [1, 2]
    assert "rank 1 has failed at epoch 1, iteration 2" in first.value[1]
    assert "row 8 is damaged" in first.value[1]


class Lying(Batches):
    """One whose length is not what it gives."""

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("batches", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_length_that_one_rank_does_not_keep_is_named(batches: int):
    def body(rank: int) -> None:
        loader = Lying(range(SIZE * (batches if rank else 4)))
        make(net(), loader, log_every_n_steps=50, max_epochs=3).train()

    for each in in_processes(body):
        last = each.error.splitlines()[-1]
        assert "the loader of a rank gave more or fewer batches than its len()" in last
        assert ("rank 0 (1, 0); rank 1 (2, 3)" if batches == 3 else "rank 0 (2, 4); rank 1 (2, 5)") in last


def test_an_iterator_that_ends_before_its_length_is_named():
    """Nothing more can be read, so that this rank ends its epoch when the others still compute."""

    class Once(Lying):
        def __init__(self, rows: range) -> None:
            super().__init__(rows)
            self.batches = super().__iter__()

        def __iter__(self) -> Iterator[Any]:
            return self.batches

    def body(rank: int) -> None:
        make(net(), Once(range(SIZE * (4 - rank))), log_every_n_steps=50, max_epochs=1).train()

    ended = in_processes(body)
    said = "".join(each.error.splitlines()[-1] for each in ended)
    assert "they do not have the same number of batches, or a handler acts in one of them alone" in said
    assert all("PeerFailed" in each.error for each in ended)


def test_where_a_batch_cannot_be_repeated_the_rank_that_has_fewer_is_named(tmp_path: Path):
    """A Loop's body would count it again; a sharded model's validation counts it."""

    def body(rank: int) -> Any:
        share, said = range(SIZE * (3 + rank)), []
        loop = Loop(DistributedDataParallel(net()), Batches(share), optimizer="sgd", config=TrainingConfig(seed=1))
        steps: list[int] = []

        def loop_by_hand() -> None:
            for inputs, targets in loop.batches():
                (loop.model(inputs) - targets).square().mean().backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                steps.append(loop.state.iteration)

        with pytest.raises(ValueError, match="the loader of rank 0 has ended after 3 batches") as refused:
            loop_by_hand()
        said.append(str(refused.value))
        made = make_with(net(), whole_batches([range(SIZE)]), Batches(share), backend=backend_of("sharded"))
        with pytest.raises(ValueError, match="the loader of rank 0 has ended after 3 batches") as refused:
            made.train()
        return len(steps), [*said, str(refused.value)]

    first, second = in_processes(body, own_group=True)
    assert (first.error, second.error) == ("", ""), first.error + second.error
    assert first.value == second.value
    assert first.value[0] == 3
    assert [text.rpartition(": ")[2].split(" ")[:2] for text in first.value[1]] == [["the", "body"], ["a", "sharded"]]


def test_the_end_of_a_pass_is_agreed_on_without_a_call_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # a clock that stops: else a slow machine has more pulses
    monkeypatch.setattr("pulsetrain.training.agreement.Pulse", partial(Pulse, clock=lambda: 0.0))

    def calls(rank: int, batches: int) -> tuple[int, int]:
        made = make(
            net(), Batches(range(SIZE * batches // (2 - rank))), EventRecorder(tmp_path / str(batches)),
            log_every_n_steps=1000,
        )  # fmt: skip
        before = made.agreement.control.calls
        made.train()
        return made.state.iteration, made.agreement.control.calls - before

    for each in in_processes(lambda rank: (calls(rank, 20), calls(rank, 30))):
        assert each.error == ""
        (fewer, calls_of_fewer), (more, calls_of_more) = each.value
        assert (fewer, more) == (40, 60)
        assert calls_of_more - calls_of_fewer == more - fewer, "one with each batch"


def test_a_batch_that_a_step_has_written_into_is_repeated_as_it_was():
    agreed = AgreedPass(ControlGroup(Ranks()))
    batches = agreed.over(iter([torch.zeros(2), torch.zeros(2)]))
    for _ in range(2):
        next(batches).fill_(1.0)
    agreed.note(1)  # another rank has one
    for _ in range(2):
        again: Tensor = next(batches)  # type: ignore[assignment]
        assert agreed.is_repeated
        assert again.tolist() == [0.0, 0.0]
        again.fill_(2.0)
        agreed.note(1)
    agreed.note(0)
    assert list(batches) == []


@pytest.mark.parametrize("done", [0, 1, 3, 4])
def test_a_pass_continues_after_the_batches_that_were_trained(done: int):
    agreed, batches = AgreedPass(ControlGroup(Ranks())), iter("abc")
    if done == 4:
        with pytest.raises(CheckpointError, match="resuming after 4 batches of a pass, but the loaders of all ranks"):
            agreed.skip(batches, done)
        return
    agreed.skip(batches, done)
    assert "".join(map(str, agreed.over(batches))) == "abc"[done:]
