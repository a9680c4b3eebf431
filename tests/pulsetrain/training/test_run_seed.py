"""Without a configured seed a run has torch's; a loader's own generator decides the order of the data."""

import io
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, SupervisedStrategy, TorchBackend
from pulsetrain.handlers import Checkpointer, ConsoleLogger, EventRecorder
from tests.support.loaders import torchdata_loader

ROWS = 12


def data(**options):
    dataset = TensorDataset(torch.arange(ROWS, dtype=torch.float32).unsqueeze(1), torch.zeros(ROWS, 1))
    return DataLoader(dataset, batch_size=2, **({"shuffle": True} | options))


class Watched:
    """What a run draws: the order of its rows, and its dropout."""

    def __init__(self, loader, seed=None, epochs=2, **arguments):
        self.rows, self.dropped = [], []
        self.trainer = Trainer(
            nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5), nn.Linear(64, 1)),
            loader,
            strategy=SupervisedStrategy("mse"),
            config=TrainingConfig(max_epochs=epochs, optimizer="sgd", learning_rate=1e-6, seed=seed, device="cpu"),
            **arguments,
        )
        self.trainer.model[1].register_forward_hook(lambda module, inputs, output: self.dropped.append(output == 0))
        self.trainer.on(Events.ITERATION_STARTED)(lambda run: self.rows.extend(run.state.batch[0].flatten().tolist()))

    def train(self, **options):
        self.trainer.train(**options)
        return self

    def drew_the_same_dropout_as(self, other):
        return all(torch.equal(mine, theirs) for mine, theirs in zip(self.dropped, other.dropped, strict=True))


def seeded_before(seed, configured=None):
    torch.manual_seed(seed)
    return Watched(data(), configured).train()


def seeded_after(seed):
    """Between the making of the trainer and train()."""
    run = Watched(data())
    torch.manual_seed(seed)
    return run.train()


def test_the_runs_seed_decides_the_order_of_a_stateful_loader_that_shuffles():
    """Its sampler makes a generator, which it seeds from torch's global one."""

    def loader(seed, generator=None):
        torch.manual_seed(seed)
        return torchdata_loader(dataset=data().dataset, generator=generator)

    first, other = loader(1), loader(2)
    rows = Watched(first, seed=5).train().rows
    assert Watched(other, seed=5).train().rows == Watched(first, seed=5).train().rows == rows
    assert Watched(other, seed=6).train().rows != rows
    mine = Watched(loader(1, torch.Generator().manual_seed(5)), seed=6).train().rows
    assert mine == rows, "of its user's generator"


@pytest.mark.parametrize("seeded", [seeded_before, seeded_after])
@pytest.mark.parametrize("large", [0, 2**40])
def test_the_users_seed_decides_the_order_and_the_dropout(seeded, large):
    first, again, other = (seeded(seed + large) for seed in (1, 1, 2))
    assert first.rows == again.rows != other.rows
    assert first.drew_the_same_dropout_as(again)
    assert not first.drew_the_same_dropout_as(other)
    assert (first.trainer.seed, other.trainer.seed) == (1 + large, 2 + large)


def test_a_configured_seed_holds_whatever_torch_was_seeded_with():
    runs = [seeded_before(seed, configured=5) for seed in (1, 2)]
    assert runs[0].rows == runs[1].rows
    assert runs[0].drew_the_same_dropout_as(runs[1])
    assert [run.trainer.seed for run in runs] == [5, 5]


@pytest.mark.parametrize("seed", [3, 2**40])
def test_a_run_that_is_repeated_in_one_process_has_the_same_seed(seed):
    torch.manual_seed(seed)
    run = Watched(data(), epochs=1).train().train()
    assert run.trainer.seed == seed
    assert run.rows[:ROWS] == run.rows[ROWS:]


LOADERS = {
    "a shuffled loader": lambda own: data(generator=own),
    "a sampler": lambda own: data(shuffle=False, sampler=RandomSampler(range(ROWS), generator=own)),
    "a sampler that draws": lambda own: data(
        shuffle=False, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS, generator=own)
    ),
    "another kind of loader": lambda own: Others(data(generator=own).dataset, 2, shuffle=True, generator=own),
}


class Others(DataLoader):
    """Is not read by position."""


@pytest.mark.parametrize("configured", [None, 5])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_generator_of_the_loaders_own_decides_its_order(kind, configured):
    def run(torchs, own):
        torch.manual_seed(torchs)
        return Watched(LOADERS[kind](torch.Generator().manual_seed(own)), configured).train()

    first, again, other, elsewhere = run(1, 1), run(1, 1), run(1, 2), run(2, 1)
    assert first.rows == again.rows == elsewhere.rows != other.rows
    assert first.drew_the_same_dropout_as(other)
    assert first.drew_the_same_dropout_as(elsewhere) is (configured is not None)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_that_was_read_before_gives_the_order_of_its_generator_until_that_is_seeded_again(kind):
    own = torch.Generator().manual_seed(1)
    loader = LOADERS[kind](own)
    first, again = (Watched(loader, 0).train().rows for _ in range(2))
    assert first == again
    own.manual_seed(2)
    assert first != Watched(loader, 0).train().rows


def test_a_generator_that_was_made_here_is_not_the_users():
    loader = Others(data().dataset, 2, shuffle=True)
    first, other, again = (Watched(loader, seed).train().rows for seed in (1, 2, 1))
    assert first == again != other


def test_processes_without_a_chosen_seed_agree_on_the_order():
    def orders(**config):
        seen = []
        for rank in (0, 1):
            torch.manual_seed(rank)  # as unseeded processes differ
            dataset = data().dataset
            sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=9)
            seen += Watched(data(shuffle=False, sampler=sampler), epochs=1, **config).train().rows
        return seen

    assert sorted(orders()) == list(range(ROWS))  # neither twice nor never
    assert orders(seed=1) != orders(seed=2)


@pytest.mark.parametrize("own", [None, 7])
@pytest.mark.parametrize("kind", ["a shuffled loader", "a sampler that draws", "another kind of loader"])
def test_a_resumed_run_continues_with_the_checkpoints_seed_and_order(kind, own, tmp_path):
    def run(torchs, generators, **options):
        torch.manual_seed(torchs)
        generator = None if own is None else torch.Generator().manual_seed(generators)
        saver = Checkpointer(tmp_path / options.pop("folder"), keep_last=99)
        return Watched(LOADERS[kind](generator), handlers=[saver], **options)

    whole = run(1, 7, folder="whole").train()
    run(1, 7, folder="cut", epochs=1).train()
    resumed = run(2, 8, folder="cut").train(resume="latest")
    assert resumed.trainer.seed == 1
    assert resumed.rows == whole.rows[ROWS:]
    assert all(map(torch.equal, resumed.dropped, whole.dropped[ROWS // 2 :]))


def test_a_backend_by_value_draws_from_the_seed_that_holds(tmp_path):
    def run(seed, **options):
        torch.manual_seed(seed)
        backend = TorchBackend("cpu", functional=True)
        Watched(data(), handlers=[Checkpointer(tmp_path)], backend=backend, epochs=1).train(**options)
        return backend.settings.seed

    assert (run(11), run(12, resume="latest")) == (11, 11)


def test_a_checkpoint_of_before_there_was_an_order_of_the_generators_keeps_the_order_of_its_seed(tmp_path):
    run = Watched(data(generator=torch.Generator().manual_seed(7)), seed=1, handlers=[Checkpointer(tmp_path)], epochs=1)
    state = run.train().trainer.checkpoint_state()
    del state["data"]["order_seed"]
    resumed = Watched(data(generator=torch.Generator().manual_seed(7)), seed=1)
    resumed.trainer.load_checkpoint_state(state)
    assert resumed.train().rows == Watched(data(), seed=1).train().rows[ROWS:]


def test_the_seed_that_holds_is_in_the_first_line_and_in_run_json(tmp_path):
    def said(seed, **options):
        torch.manual_seed(seed)
        stream = io.StringIO()
        handlers = [ConsoleLogger(format="json", stream=stream), EventRecorder(tmp_path), Checkpointer(tmp_path)]
        Watched(data(), handlers=handlers, epochs=options.pop("epochs")).train(**options)
        first = json.loads(stream.getvalue().splitlines()[0])
        return first.get("seed"), json.loads((tmp_path / "run.json").read_text())["seed"]

    assert said(11, epochs=1) == (11, 11)
    assert said(12, epochs=2, resume="latest") == (11, 11)
