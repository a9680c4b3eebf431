import errno
import math

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from pulsetrain.engine import ConfigurationError, Engine, Events, Every
from pulsetrain.engine.checkpoint import load_checkpoint
from pulsetrain.engine.errors import RecordingError, RunFolderError
from pulsetrain.engine.events.payloads import CheckpointLoaded
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EMA, SWA, BestModel, Checkpointer, EarlyStopping, EventRecorder
from tests.support.engines import validate_each_epoch
from tests.support.models import loader, pairs, regression_model, trainer

NAN = math.nan


class Setting(Engine):
    """Makes its one weight the number of the iteration."""

    def __init__(self):
        super().__init__(self._step, name="trainer")
        self.model = nn.Linear(1, 1, bias=False)

    def _step(self, engine, batch):
        nn.init.constant_(self.model.weight, self.state.iteration)

    @property
    def weight(self):
        return self.model.weight.item()


def driven(handler, values, engine=None):
    engine = engine or Setting()
    handler.attach(engine)
    validate_each_epoch(engine, [{"val/loss": value} for value in values])
    engine.run([0], max_epochs=len(values))
    return engine


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_of(*handlers, **config):
    """A trainer whose validation is best in the middle: its rate is too high to stay there."""
    settings = {"max_epochs": 8, "optimizer": "sgd", "learning_rate": 0.08, "seed": 5, **config}
    run = trainer(settings, model=regression_model(), val_loader=loader(12, shuffle=False), handlers=list(handlers))
    run.seen = []  # value and weights of each validation

    def see():
        run.seen.append((run.state.metrics["val/loss"], snapshot(run.model)))

    run.add_event_handler(Events.VALIDATION_COMPLETED, see)
    return run


def best_of(seen):
    return min(seen, key=lambda each: each[0])


# ------------------------------------------------------------------------------------------------------ kept weights


def test_the_weights_of_the_best_validation_are_in_the_model_when_the_run_has_completed():
    best = BestModel()
    engine = driven(best, [3.0, 1.0, 2.0, 1.0, 5.0])
    assert (best.best_value, best.best_iteration) == (1.0, 2)
    assert engine.weight == 2.0


def test_max_mode_takes_larger_for_better_and_nan_never_is():
    best = BestModel("val_loss", mode="max")
    assert driven(best, [NAN, 1.0, 3.0, NAN, 2.0]).weight == 3.0
    assert best.best_value == 3.0


def test_without_restore_the_model_keeps_its_last_weights_and_load_into_gives_the_best():
    best = BestModel(restore=False)
    engine = driven(best, [1.0, 2.0, 3.0])
    assert engine.weight == 3.0
    other = nn.Linear(1, 1, bias=False)
    best.load_into(other)
    assert other.weight.item() == 1.0


def test_what_is_kept_is_a_copy_on_the_host():
    best = BestModel(restore=False)
    engine = driven(best, [1.0])
    kept = best.state_dict()["weights"]["weight"]
    nn.init.constant_(engine.model.weight, 9.0)
    assert kept.device.type == "cpu"
    assert kept.item() == 1.0


def test_a_trainers_best_weights_are_those_that_were_validated_best():
    best = BestModel()
    run = run_of(best)
    run.train()
    value, weights = best_of(run.seen)
    assert value < run.seen[-1][0], "the last should not be the best"
    assert best.best_value == value
    assert same(snapshot(run.model), weights)


@pytest.mark.parametrize("average", [lambda: EMA(0.8), lambda: SWA(after_epoch=1, bn_loader=averaging_loader())])
def test_the_average_is_kept_if_it_was_validated(average):
    averaging, best = average(), BestModel()
    run = run_of(averaging, best)
    wanted = {}

    def see():
        if run.state.metrics["val/loss"] == best.best_value:
            with averaging.applied():
                wanted.update(snapshot(run.model))

    run.bus.subscribe(Events.VALIDATION_COMPLETED, see, sender=run, phase=3)
    run.train()
    assert same(snapshot(run.model), wanted)
    averaging.detach()
    assert run.validate()["val/loss"] == best.best_value


def averaging_loader():
    return torch.utils.data.DataLoader(pairs(), batch_size=8)


def test_a_schedule_free_optimizers_average_is_kept():
    best = BestModel()
    run = run_of(best, optimizer="schedule_free_sgd", max_epochs=4)
    run.train()
    run.optimizer.train = run.optimizer.eval = lambda: None  # the model as it is
    run.evaluator.contexts.clear()
    assert run.validate()["val/loss"] == best.best_value


def test_an_early_end_restores_too_and_a_failure_does_not():
    stopped = run_of(BestModel(), EarlyStopping(patience=1), max_epochs=50)
    stopped.train()
    assert stopped.state.stop_reason.startswith("early stopping")
    assert same(snapshot(stopped.model), best_of(stopped.seen)[1])

    failing, best = Setting(), BestModel()

    def fail():
        raise OSError("the power went")

    failing.add_event_handler(Events.ITERATION_COMPLETED(once=3), fail)
    with pytest.raises(OSError, match="the power went"):
        driven(best, [1.0, 2.0, 3.0], failing)
    assert failing.weight == 3.0
    best.load_into(failing.model)
    assert failing.weight == 1.0


def test_a_run_that_validated_nothing_says_so():
    engine = Setting()
    BestModel().attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=1)
    assert [line["event"] for line in logs] == [
        "BestModel has kept nothing: no validation or rollout gave a number that could be the best"
    ]
    assert engine.weight == 1.0


# ------------------------------------------------------------------------------------------------ checkpoints, resume


def test_the_last_checkpoint_holds_the_last_weights_whichever_was_attached_first(tmp_path):
    for number, order in enumerate((1, -1)):
        folder = tmp_path / str(number)
        run = run_of(*[BestModel(), Checkpointer(folder, every=Every(epochs=3))][::order])
        run.train()
        newest = load_checkpoint(max((folder / "checkpoints").glob("0*")))
        assert newest["counters"]["iteration"] == run.state.iteration
        assert same(dict(newest["model"]), run.seen[-1][1])
        assert not same(snapshot(run.model), run.seen[-1][1])


def test_a_resumed_run_continues_from_the_last_weights_and_knows_the_best_ones(tmp_path):
    whole, kept = run_of(BestModel()), BestModel()
    history = whole.train()

    cut = run_of(BestModel(), Checkpointer(tmp_path))
    cut.add_event_handler(Events.EPOCH_STARTED(once=7), cut.terminate)
    cut.train()
    assert best_of(whole.seen)[0] == best_of(cut.seen)[0], "the best should come before the cut"

    resumed = run_of(kept, Checkpointer(tmp_path))
    assert resumed.train(resume="latest") == history
    assert kept.best_value == best_of(whole.seen)[0]
    assert same(snapshot(resumed.model), snapshot(whole.model))


def test_a_resumed_run_in_this_process_continues_with_its_last_weights():
    plain, kept = run_of(), run_of(BestModel())
    for run in (plain, kept):
        run.add_event_handler(Events.EPOCH_COMPLETED(once=6), run.terminate)
        run.train()
    assert not same(snapshot(kept.model), snapshot(plain.model))
    assert kept.train() == plain.train()
    assert len(kept.seen) == 8
    assert same(kept.seen[-1][1], plain.seen[-1][1])
    assert same(snapshot(kept.model), best_of(plain.seen)[1])


def test_weights_written_into_the_model_meanwhile_are_kept():
    best, engine = BestModel(), Setting()
    engine.add_event_handler(Events.EPOCH_COMPLETED(once=2), engine.terminate)
    driven(best, [1.0, 2.0, 3.0], engine)
    assert engine.weight == 1.0
    nn.init.constant_(engine.model.weight, 7.0)
    seen = []
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: seen.append(engine.weight))
    engine.run([0])
    assert seen == [7.0]


def test_after_a_checkpoint_the_run_continues_from_its_weights_even_where_those_are_the_best():
    best, engine = BestModel(), Setting()
    engine.add_event_handler(Events.EPOCH_COMPLETED(once=2), engine.terminate)
    driven(best, [1.0, 2.0, 3.0], engine)
    assert engine.weight == 1.0
    engine.fire(Events.CHECKPOINT_LOADED, CheckpointLoaded(path="000000001-checkpoint", iteration=1))
    seen = []
    engine.add_event_handler(Events.EPOCH_STARTED, lambda: seen.append(engine.weight))
    engine.run([0])
    assert seen == [1.0]


# ------------------------------------------------------------------------------------------------------------ the file


def test_the_file_holds_the_best_weights_for_safe_loading(tmp_path):
    best = BestModel(folder=tmp_path / "run")
    engine = driven(best, [2.0, 1.0, 3.0])
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["best_model.pt"]
    other = nn.Linear(1, 1, bias=False)
    other.load_state_dict(torch.load(tmp_path / "run" / "best_model.pt", weights_only=True))
    assert other.weight.item() == engine.weight == 2.0


def test_a_run_resumed_from_a_checkpoint_restores_its_file(tmp_path):
    run = run_of(BestModel(folder=tmp_path), Checkpointer(tmp_path, keep_last=50))
    run.train()
    file, final = tmp_path / "best_model.pt", snapshot(run.model)
    first = min((tmp_path / "checkpoints").glob("0*"))
    assert same(dict(torch.load(file, weights_only=True)), final)
    resumed = run_of(BestModel(folder=tmp_path), Checkpointer(tmp_path, keep_last=50))
    resumed.load_checkpoint(first)
    assert same(dict(torch.load(file, weights_only=True)), run.seen[0][1])


def test_the_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    synced = []

    def note(path):
        files = [each for each in (path, tmp_path / "best_model.pt") if each.exists()]
        synced.append([torch.load(each, weights_only=True)["weight"].item() for each in files])

    monkeypatch.setattr("pulsetrain.handlers.checkpointing.best_model.sync", note)
    driven(BestModel(folder=tmp_path), [2.0, 1.0])
    assert synced == [[1.0], [2.0, 1.0]]


def test_a_file_that_cannot_be_written_is_reported_and_only_it_is_lost(tmp_path):
    best = BestModel(folder=tmp_path)
    (tmp_path / "best_model.pt").mkdir()
    (tmp_path / "best_model.pt" / "in the way").touch()
    with capture_logs() as logs:
        engine = driven(best, [1.0, 2.0])
    assert engine.weight == 1.0
    warned = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert [each.partition(",")[0] for each in warned] == ["best weights not written; they are kept in memory"]
    assert [path.name for path in tmp_path.iterdir()] == ["best_model.pt"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_file_that_could_not_be_written_for_a_moment_is_written_later(tmp_path, monkeypatch, failing):
    attempts = []

    def fill(path):
        attempts.append(path)
        if len(attempts) <= failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pulsetrain.handlers.checkpointing.best_model.sync", fill)
    with capture_logs() as logs:
        driven(BestModel(folder=tmp_path), [1.0, 2.0])  # the second attempt is at the second validation
    assert torch.load(tmp_path / "best_model.pt", weights_only=True)["weight"].item() == 1.0
    assert len(attempts) == failing + 1
    assert len([line for line in logs if line["log_level"] == "warning"]) == 1


# -------------------------------------------------------------------------------------------------------------- misuse


def test_load_into_needs_weights_and_a_model_that_they_fit():
    best = BestModel()
    with pytest.raises(RuntimeError, match="no weights have been kept yet; validate first"):
        best.load_into(nn.Linear(1, 1))
    driven(best, [1.0])
    with pytest.raises(ConfigurationError, match=r"missing: bias \(1,\); shape: weight is \(1, 1\).*\(1, 2\) in the"):
        best.load_into(nn.Linear(2, 1))


def test_two_best_model_handlers_cannot_both_restore():
    engine = Setting()
    BestModel().attach(engine)
    with pytest.raises(ConfigurationError, match=r"metric='val/error'.*pass restore=False to one of the two"):
        BestModel("val/error").attach(engine)
    BestModel("val/error", restore=False).attach(engine)


def test_wrong_arguments_are_refused_when_constructing():
    with pytest.raises(ConfigurationError, match=r"BestModel\(mode='lowest'\): unknown; choose one of max, min"):
        BestModel(mode="lowest")
    with pytest.raises(ConfigurationError, match=r"BestModel\(metric=None\): needs a metric's name"):
        BestModel(None)


def test_what_has_no_weights_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="'plain' has no torch model"):
        BestModel().attach(Engine(lambda engine, batch: 0.0, name="plain"))
    trainer({"max_epochs": 1}, handlers=[EventRecorder(tmp_path), Checkpointer(tmp_path)]).train()
    with pytest.raises(RecordingError, match=r"BestModel\.attach\(\).*has no weights"):
        BestModel().attach(Replay(tmp_path))
    model = regression_model()
    with pytest.raises(RecordingError, match=r"BestModel\.attach\(\).*has no weights of its validations"):
        BestModel().attach(Replay(tmp_path, checkpoints=True, model=model))
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"BestModel\(folder=.*cannot be written"):
        BestModel(folder=tmp_path / "file").attach(Setting())
