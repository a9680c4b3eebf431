import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn, update_bn

from pulsetrain.engine import ConfigurationError, Engine, Events, Every, Phase
from pulsetrain.handlers import SWA, Checkpointer
from tests.support import averages
from tests.support.averages import PlugPulled, Setting, averaged, pull_the_plug, same, snapshot
from tests.support.models import loader, pairs, regression_model

run_of = partial(averages.run_of, max_epochs=4)


class Counted:
    """A loader that counts its passes, and perhaps draws from every generator on the way."""

    def __init__(self, batches, draws=False):
        self.batches, self.draws, self.passes = batches, draws, 0

    def __iter__(self):
        self.passes += 1
        for batch in self.batches:
            if self.draws:
                random.random(), np.random.rand(), torch.rand(1)
            yield batch


def batches(number=4):
    return list(loader(4 * number, shuffle=False))


# ------------------------------------------------------------------------------------------------- averaged values


@pytest.mark.parametrize(
    ("arguments", "weights"),
    [
        ({"after_epoch": 0}, [10.0, 7.0, 4.0, 1.0]),
        ({"after_epoch": 2}, [4.0, 1.0]),
        ({"after_epoch": 1, "every": Every(epochs=2)}, [7.0, 1.0]),
        ({"after_epoch": 2, "every": Every(updates=2)}, [5.0, 3.0, 1.0]),  # updates 8, 10 and 12
        ({"after_update": 6}, [4.0, 1.0]),  # update 6 is the end of epoch 2
        ({"after_update": 9, "every": Every(updates=1)}, [3.0, 2.0, 1.0]),
        ({"after_update": 9, "every": Every(iterations=1, epochs=1, updates=1)}, [3.0, 2.0, 1.0]),
    ],
)
def test_the_average_is_the_mean_of_the_weights_after_the_start(arguments, weights):
    engine = Setting()
    swa = SWA(**arguments).attach(engine)
    engine.run(iter(range(12, 0, -1)), max_epochs=4, epoch_length=3)
    assert swa.number_averaged == len(weights)
    with swa.applied():
        assert engine.model.weight.item() == pytest.approx(sum(weights) / len(weights), abs=1e-6)
    assert engine.model.weight.item() == 1.0


def test_weights_and_statistics_are_those_of_torchs_own_recipe_bit_for_bit():
    swa = SWA(after_epoch=1, bn_loader=loader(shuffle=False))
    run = run_of(swa, validated=False)
    theirs = AveragedModel(run.model, multi_avg_fn=get_swa_multi_avg_fn())
    run.add_event_handler(Events.EPOCH_COMPLETED(after=1), lambda: theirs.update_parameters(run.model))
    run.train()
    torch.manual_seed(3)
    update_bn(loader(shuffle=False), theirs)
    torch.manual_seed(3)  # dropout draws, in the recipe too
    assert swa.number_averaged == 3
    copied = regression_model()
    swa.copy_to(copied)
    assert same(snapshot(copied), theirs.module.state_dict())


def test_before_the_start_the_models_own_weights_are_validated():
    data = Counted(batches())
    swa = SWA(after_epoch=99, bn_loader=data)
    run = run_of(swa)
    run.train()
    assert same(averaged(swa, run.model), snapshot(run.model))
    assert data.passes == 0


# ------------------------------------------------------------------------------------------- batch normalisation


def test_batch_normalisation_without_a_loader_is_refused_and_nothing_stays_attached():
    run = run_of()
    swa = SWA(after_epoch=0)
    with pytest.raises(ConfigurationError, match=r"SWA\(bn_loader=None\): .*batch normalisation.*pass bn_loader="):
        swa.attach(run)
    assert swa.applied not in run.evaluator.contexts
    swa.bn_loader = loader()
    swa.attach(run)


@pytest.mark.parametrize("model", [nn.BatchNorm2d(2, track_running_stats=False), nn.LayerNorm(2), nn.Linear(2, 2)])
def test_a_model_without_running_statistics_needs_no_loader(model):
    swa = SWA(after_epoch=0, model=model, every=Every(iterations=1))
    engine = Engine(lambda engine, batch: None)
    swa.attach(engine)
    engine.run([0], max_epochs=1)
    with swa.applied():
        pass


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_every_kind_of_batch_normalisation_is_found(kind):
    assert issubclass(kind, _BatchNorm)
    with pytest.raises(ConfigurationError, match="bn_loader"):
        SWA(after_epoch=0, model=nn.Sequential(kind(2))).attach(Engine(lambda engine, batch: None))


def test_statistics_are_estimated_once_for_each_average_and_only_when_needed():
    data = Counted(batches())
    swa = SWA(after_epoch=1, bn_loader=data)
    run = run_of(swa, validated=False)
    run.train()
    assert data.passes == 0
    first, second = averaged(swa, run.model), averaged(swa, run.model)
    swa.copy_to(regression_model())
    assert data.passes == 1
    assert same(first, second)
    run.train()  # again
    averaged(swa, run.model)
    assert data.passes == 2


def test_an_estimate_leaves_modes_momenta_statistics_and_random_numbers_as_they_were():
    swa = SWA(after_epoch=0, bn_loader=Counted(batches(), draws=True))
    run = run_of(swa, validated=False, max_epochs=1)
    run.train()
    run.model[1].eval()
    run.model[1].momentum = 0.25
    before, modes = snapshot(run.model), [module.training for module in run.model.modules()]
    numbers = []
    for estimated in (False, True):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        if estimated:
            with swa.applied():
                assert [module.training for module in run.model.modules()] == modes
                assert not torch.equal(run.model[1].running_mean, before["1.running_mean"])
        numbers.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert numbers[0] == numbers[1]
    assert modes == [True, True, False, True, True, True] == [module.training for module in run.model.modules()]
    assert run.model[1].momentum == 0.25
    assert same(snapshot(run.model), before)


def test_an_estimate_leaves_a_shared_module_in_the_mode_it_was_in():
    shared = nn.Dropout()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(shared), nn.Sequential(shared, nn.Dropout()))
    model[2].eval()
    shared.train()
    modes = [module.training for module in model.modules()]
    swa = SWA(after_epoch=0, model=model, bn_loader=batches(), every=Every(iterations=1))
    swa.attach(engine := Engine(lambda engine, batch: None))
    engine.run([0], max_epochs=1)
    averaged(swa, model)
    assert [module.training for module in model.modules()] == modes == [True, True, True, True, False, False]


def test_an_estimate_that_fails_leaves_the_model_as_it_was_and_is_made_the_next_time():
    data = Counted(batches())
    swa = SWA(after_epoch=0, bn_loader=data)
    run = run_of(swa, validated=False, max_epochs=1)
    run.train()
    before, good = snapshot(run.model), data.batches
    data.batches = [*good[:2], torch.zeros(2, 3)]  # the last one does not fit the model
    with pytest.raises(RuntimeError, match="shapes"), swa.applied():
        pytest.fail("entered")
    assert same(snapshot(run.model), before)
    assert all(module.training for module in run.model.modules())
    assert run.model[1].momentum == 0.1
    data.batches = good
    assert not torch.equal(averaged(swa, run.model)["1.running_mean"], before["1.running_mean"])
    assert data.passes == 2


@pytest.mark.slow
def test_the_training_loader_may_be_the_one_that_statistics_are_estimated_with():
    """In the middle of a pass too: sampling with replacement draws its order as it goes."""

    def weights(estimating):
        sampler = torch.utils.data.RandomSampler(pairs(), replacement=True, num_samples=80)
        data = torch.utils.data.DataLoader(pairs(), batch_size=4, sampler=sampler)
        swa = SWA(after_epoch=0, bn_loader=data, every=Every(iterations=1), validate=estimating)
        run = run_of(swa, train_loader=data, validate_every=Every(iterations=3), max_epochs=2)
        run.train()
        return snapshot(run.model)

    assert same(weights(True), weights(False))


def test_a_training_loader_with_persistent_workers_is_refused():
    data = loader(num_workers=1, persistent_workers=True)
    with pytest.raises(ConfigurationError, match="pass another DataLoader over the same set"):
        run_of(SWA(after_epoch=0, bn_loader=data), train_loader=data)
    run_of(SWA(after_epoch=0, bn_loader=loader(num_workers=1, persistent_workers=True)), train_loader=data)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            Counted([]),
            ConfigurationError,
            r"SWA\(bn_loader=Counted\): gave no batch; pass an iterable that gives batches in each pass",
        ),
        ([{"x": torch.zeros(2, 4)}], TypeError, r"SWA\(bn_loader=list\): gave dict for the model's input"),
        ([()], TypeError, r"SWA\(bn_loader=list\): gave tuple for the model's input"),
    ],
)
def test_a_bn_loader_without_usable_batches_is_refused_when_read(data, error, message):
    swa = SWA(after_epoch=0, bn_loader=data)
    run = run_of(swa, validated=False, max_epochs=1)
    run.train()
    before = snapshot(run.model)
    with pytest.raises(error, match=message), swa.applied():
        pytest.fail("entered")
    assert same(snapshot(run.model), before)


def test_batches_may_be_tensors():
    inputs = [batch[0] for batch in batches()]
    found = []
    for data in (inputs, batches()):
        torch.manual_seed(0)
        swa = SWA(after_epoch=0, bn_loader=data)
        run = run_of(swa, max_epochs=1)
        run.train()
        found.append(averaged(swa, run.model))
    assert same(*found)


# ------------------------------------------------------------------------------- validation, checkpoints, resuming


# 10 batches an epoch: before the start, at it, an epoch's last batch before and after its end, before an estimate
@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["global", "own generator", "the training loader"])
@pytest.mark.parametrize("saving", [Every(iterations=n) for n in (3, 20, 23, 24)] + [Every(epochs=3)], ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one(saving, shuffle, tmp_path):
    def make(folder, saving):
        own = torch.Generator().manual_seed(1) if shuffle == "own generator" else None
        data = loader(generator=own)
        checkpointer = Checkpointer(folder, every=saving)
        swa = SWA(after_epoch=1, every=Every(iterations=5, epochs=1), bn_loader=data)
        training = data if shuffle == "the training loader" else None
        return run_of(swa, checkpointer, train_loader=training, validate_every=Every(iterations=4)), swa

    whole, expected = make(tmp_path / "whole", Every(epochs=99))
    history = whole.train()
    run, _ = make(tmp_path / "cut", saving)

    run.add_event_handler(Events.CHECKPOINT_SAVED, pull_the_plug, phase=Phase.PERSIST)
    with pytest.raises(PlugPulled):
        run.train()
    torch.manual_seed(999)  # another process
    again, swa = make(tmp_path / "cut", Every(epochs=99))
    assert again.train(resume="latest") == history
    assert same(snapshot(again.model), snapshot(whole.model))
    assert swa.number_averaged == expected.number_averaged > 0
    assert same(averaged(swa, again.model), averaged(expected, whole.model))


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("arguments", [{}, {"after_epoch": 1, "after_update": 10}])
def test_exactly_one_start_must_be_given(arguments):
    with pytest.raises(ConfigurationError, match=r"SWA\(after_epoch=.*, after_update=.*\): needs exactly one"):
        SWA(**arguments)


@pytest.mark.parametrize("argument", ["after_epoch", "after_update"])
@pytest.mark.parametrize("start", [-1, 1.5, True, "3"])
def test_a_start_that_is_not_a_whole_number_is_refused(argument, start):
    with pytest.raises(ConfigurationError, match=rf"SWA\({argument}=.*\): needs a whole number of at least 0"):
        SWA(**{argument: start})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            iter(loader()),
            r"_SingleProcessDataLoaderIter\): is an iterator, which gives its batches once; pass a DataLoader",
        ),
        (
            (batch for batch in batches()),
            r"generator\): is an iterator, which gives its batches once; pass a DataLoader",
        ),
        ((loader(), loader()), r"tuple\): holds DataLoaders where batches are needed; pass one of them"),
        ([loader(), None], r"list\): holds DataLoaders where batches are needed; pass one of them"),
    ],
)
def test_a_bn_loader_that_cannot_be_iterated_twice_is_refused(data, message):
    with pytest.raises(ConfigurationError, match=rf"SWA\(bn_loader={message}"):
        SWA(after_epoch=1, bn_loader=data)


def test_other_arguments_of_the_wrong_type_are_refused():
    with pytest.raises(TypeError, match=r"SWA\(bn_loader=3\): needs an iterable"):
        SWA(after_epoch=1, bn_loader=3)
    with pytest.raises(ConfigurationError, match=r"SWA\(bn_loader=list\): gave no batch"):
        SWA(after_epoch=1, bn_loader=[])
