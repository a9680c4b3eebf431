"""Calling train() again: after a pause, an end, an error or a bound, and after a loaded checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.handlers import TerminateOnNan

from pulsetrain import Trainer
from pulsetrain.engine import CheckpointError, ConfigurationError, Events, Every, RunFolderError
from pulsetrain.engine.schedules import Cosine
from pulsetrain.handlers import Checkpointer, CSVLogger, EarlyStopping, LRScheduler
from tests.support.models import loader, regression_model, trainer


def iterations(run: Trainer) -> list[int]:
    seen: list[int] = []
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.iteration))
    return seen


def test_after_an_interruption_it_continues_with_the_next_batch():
    run = trainer({"max_epochs": 2})
    run.add_event_handler(Events.ITERATION_COMPLETED(once=15), lambda engine: engine.interrupt())
    seen = iterations(run)
    run.train()
    assert seen[-1] == 15
    run.train()
    assert seen == list(range(1, 21))


@pytest.mark.slow
def test_a_resumed_run_that_is_interrupted_before_its_first_batch_loses_no_epoch(tmp_path: Path):
    def make(folder: Path) -> Trainer:
        return trainer({"max_epochs": 3}, handlers=[Checkpointer(folder, every=Every(iterations=1), at_end=False)])

    expected = make(tmp_path / "whole").train()
    cut = make(tmp_path / "cut")
    cut.add_event_handler(Events.ITERATION_COMPLETED(once=14), lambda engine: engine.terminate())
    cut.train()
    again = make(tmp_path / "cut")
    again.add_event_handler(Events.EPOCH_STARTED(once=2), lambda engine: engine.interrupt())
    seen = iterations(again)
    again.train(resume="latest")
    assert (seen, again.is_paused, again.is_resuming) == ([], True, True)
    assert again.train() == expected
    assert (seen, again.state.epoch, again.is_resuming) == (list(range(15, 31)), 3, False)


def test_a_run_interrupted_twice_inside_an_epoch_ends_like_an_uninterrupted_one(tmp_path: Path):
    def make(folder: Path) -> Trainer:
        return trainer({"max_epochs": 2}, handlers=[Checkpointer(folder, every=Every(iterations=1), at_end=False)])

    expected = make(tmp_path / "whole").train()
    for last in (3, 6, 8):
        run = make(tmp_path / "cut")
        run.add_event_handler(Events.ITERATION_COMPLETED(once=last), lambda engine: engine.terminate())
        run.train(resume="latest")
        assert run.state.iteration == last
    assert make(tmp_path / "cut").train(resume="latest") == expected


def test_a_finished_run_continues_to_a_higher_bound():
    whole = trainer({"max_epochs": 3}).train()
    run = trainer({"max_epochs": 2})
    run.train()
    run.state.max_epochs = 3
    assert run.train() == whole
    assert run.state.epoch == 3


@pytest.mark.parametrize("how", ["terminate", "raise"])
def test_after_a_termination_or_an_error_it_continues_with_the_next_epoch(how: str):
    run = trainer({"max_epochs": 3})
    seen = iterations(run)

    @run.on(Events.ITERATION_COMPLETED(once=15))
    def stop(engine: Trainer) -> None:
        if how == "terminate":
            engine.terminate()
        else:
            raise RuntimeError("planted")

    if how == "raise":
        with pytest.raises(RuntimeError, match="planted"):
            run.train()
    else:
        run.train()
    run.train()
    assert (run.state.epoch, seen) == (3, list(range(1, 26)))


def test_a_second_run_of_a_finished_trainer_resets_everything_but_the_weights():
    model = regression_model()
    schedule = LRScheduler(Cosine(0.01, 10))
    config = {"max_iterations": 10, "accumulate": 4, "schedule": None}
    run = trainer(config, model=model, handlers=[schedule], val_loader=loader(8, shuffle=False))
    first = {name: list(values) for name, values in run.train().items()}
    weight = model[0].weight.detach().clone()
    rates: list[float] = []
    run.add_event_handler(
        Events.OPTIMIZER_STEP_COMPLETED, lambda e, event: rates.append(event.payload.learning_rates[0])
    )
    second = run.train()
    assert not torch.equal(weight, model[0].weight)
    assert {name: len(values) for name, values in second.items()} == {name: len(v) for name, v in first.items()}
    assert run.state.update == 2
    assert rates[0] == pytest.approx(0.01)  # the schedule's beginning, not its end


def test_a_trained_trainer_continues_from_an_earlier_checkpoint_loaded_into_it(tmp_path: Path):
    def make(folder: Path) -> Trainer:
        checkpointer = Checkpointer(folder, every=Every(iterations=1), keep_last=99)
        return trainer({"max_epochs": 2}, val_loader=loader(8, shuffle=False), handlers=[checkpointer])

    run = make(tmp_path)
    expected = {name: list(values) for name, values in run.train().items()}
    run.load_checkpoint(next((tmp_path / "checkpoints").glob("000000019-*")))
    updates: list[int] = []
    run.add_event_handler(Events.OPTIMIZER_STEP_COMPLETED, lambda engine: updates.append(engine.state.update))
    history = run.train()
    assert updates == [20]
    assert history == expected


def test_saving_changes_no_figure(tmp_path: Path):
    plain = trainer({"max_epochs": 2}).train()
    saved = trainer({"max_epochs": 2}, handlers=[Checkpointer(tmp_path, every=Every(iterations=3))]).train()
    assert saved == plain


def test_the_half_epoch_of_a_stopped_run_is_discarded_when_it_resumes(tmp_path: Path):
    whole = {name: list(values) for name, values in trainer({"max_epochs": 3}).train().items()}
    run = trainer({"max_epochs": 3}, handlers=[Checkpointer(tmp_path, every=Every(epochs=9))])
    run.add_event_handler(Events.ITERATION_COMPLETED(once=15), lambda engine: engine.terminate())
    assert len(run.train()["train/loss"]) == 2
    again = trainer({"max_epochs": 3}, handlers=[Checkpointer(tmp_path, every=Every(epochs=9))])
    assert again.train(resume="latest") == whole


def test_a_run_interrupted_after_its_last_checkpoint_still_ends_as_it_should(tmp_path: Path):
    config = {"max_iterations": 15, "validate_every": None}

    def make() -> Trainer:
        checkpointer = Checkpointer(tmp_path, every=Every(iterations=15), at_end=False)
        return trainer(config, val_loader=loader(8, shuffle=False), handlers=[checkpointer])

    cut = make()
    cut.add_event_handler(Events.TERMINATE, lambda: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        cut.train()
    completed: list[int] = []
    again = make()
    again.add_event_handler(Events.COMPLETED, lambda engine: completed.append(engine.state.iteration))
    seen = iterations(again)
    history = again.train(resume="latest")
    assert (seen, completed, len(history["val/loss"])) == ([], [15], 1)


def test_an_early_stopped_run_stays_stopped_when_resumed(tmp_path: Path):
    def make() -> Trainer:
        handlers = [Checkpointer(tmp_path, at_end=False), EarlyStopping(patience=2)]
        return trainer(
            {"max_epochs": 50, "learning_rate": 1e-9}, val_loader=loader(8, shuffle=False), handlers=handlers
        )

    first = make()
    first.train()
    again = make()
    seen = iterations(again)
    again.train(resume="latest")
    assert seen == []
    assert "early stopping" in again.state.stop_reason


def test_a_checkpoint_made_before_any_training_is_a_beginning(tmp_path: Path):
    expected = trainer({"max_epochs": 1}).train()
    checkpointer = Checkpointer(tmp_path, at_end=False)
    run = trainer({"max_epochs": 1}, handlers=[checkpointer])
    path = run.save_checkpoint("blank")
    other = trainer({"max_epochs": 1})
    other.load_checkpoint(path)
    other.add_event_handler(Events.EPOCH_COMPLETED, lambda e: states.append(e.checkpoint_state()["rng"]["torch"]))
    states: list[torch.Tensor] = []
    assert other.train() == expected
    assert torch.equal(states[0], torch.get_rng_state())  # not those of the checkpoint


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path):
    run = trainer({"schedule": "cosine", "max_epochs": 2}, handlers=[Checkpointer(tmp_path)])
    run.train()
    path = run.handlers[0].manager.get_latest()
    longer = trainer({"schedule": "cosine", "max_epochs": 3})
    before = {name: value.clone() for name, value in longer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match="total_steps"):
        longer.load_checkpoint(path)
    assert all(torch.equal(before[name], value) for name, value in longer.model.state_dict().items())
    assert longer.state.iteration == 0
    with pytest.raises(CheckpointError, match="SGD, this trainer has AdamW"):
        trainer({"optimizer": "adamw", "schedule": "cosine", "max_epochs": 2}).load_checkpoint(path)


def test_states_of_two_early_stoppings_are_distinguished(tmp_path: Path):
    class Accuracy:
        def reset(self) -> None: ...

        def update(self, predicted: torch.Tensor, true: torch.Tensor) -> None: ...

        def compute(self) -> float:
            return 0.5

    def make(*handlers: Any) -> Trainer:
        return trainer(
            {"max_epochs": 2},
            val_loader=loader(8, shuffle=False),
            metrics={"accuracy": Accuracy()},
            handlers=[Checkpointer(tmp_path), *handlers],
        )

    make(EarlyStopping(metric="val/loss"), EarlyStopping(metric="val/accuracy", mode="max")).train()
    alone = EarlyStopping(metric="val/accuracy", mode="max")
    again = make(alone)
    again.train(resume="latest")
    assert alone.best_value == 0.5


def test_a_muted_event_leaves_the_trainers_own_bookkeeping_alone():
    run = trainer({"max_epochs": 2})
    with run.bus.signal(Events.EPOCH_COMPLETED).muted(), run.bus.signal(Events.ITERATION_COMPLETED).muted():
        history = run.train()
    assert len(history["train/loss"]) == 2
    assert run.data.epoch_done


def test_an_instance_keeps_its_own_rate_under_a_schedule():
    model = regression_model()
    run = trainer({"schedule": "cosine"}, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    rates: list[float] = []
    run.add_event_handler(
        Events.OPTIMIZER_STEP_COMPLETED, lambda e, event: rates.append(event.payload.learning_rates[0])
    )
    run.train()
    assert rates[0] == 0.5


def test_the_norm_is_measured_only_when_a_filtered_receiver_is_due(monkeypatch: pytest.MonkeyPatch):
    import pulsetrain.engine.backends.torch as module

    measured: list[int] = []
    real = module.grad_norm
    run = trainer({"max_iterations": 10})
    monkeypatch.setattr(module, "grad_norm", lambda ps: (measured.append(run.state.update + 1), real(ps))[1])
    run.add_event_handler(Events.GRADIENTS_READY(every=5), lambda engine: None)
    run.train()
    assert measured == [5, 10]


def test_ignites_handlers_read_a_step_as_a_mapping():
    class Diverge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(float("nan")))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.sum(1, keepdim=True) * self.weight

    run = trainer({"max_epochs": 1}, model=Diverge())
    run.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    run.train()
    assert run.state.iteration == 1


@pytest.mark.parametrize(
    ("config", "arguments", "says"),
    [
        ({"accumulate": 11}, {}, "make no update"),
        ({"max_epochs": 2}, {"train_loader": iter([1])}, "read only once"),
        (
            {"early_stopping_patience": 2},
            {"handlers": [EarlyStopping()]},
            r"patience=2\): a handler EarlyStopping .*: None",
        ),
    ],
)
def test_runs_that_could_not_succeed_are_rejected(config: dict[str, Any], arguments: dict[str, Any], says: str):
    with pytest.raises(ConfigurationError, match=says):
        trainer(config, val_loader=loader(8), **arguments)


def test_compiling_by_configuration_reaches_the_backend(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: asked.append(self))
    run = trainer({"compile": True})
    assert asked == [run.model]


def test_a_rejected_second_run_leaves_the_finished_one_unchanged(tmp_path: Path):
    run = trainer({"max_epochs": 2}, handlers=[Checkpointer(tmp_path)])
    history = run.train()
    with pytest.raises(RunFolderError, match="already holds a run"):
        run.train()
    assert len(history["train/loss"]) == 2
    assert run.state.iteration == 20


def test_a_second_runs_history_is_a_new_object():
    run = trainer({"max_epochs": 1})
    first = run.train()
    second = run.train()
    assert first is not second
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize("bound", [{"max_iterations": 13}, {"max_updates": 13}])
def test_a_run_killed_at_its_very_end_ends_alike_when_resumed(bound: dict[str, int], tmp_path: Path):
    def make(folder: Path) -> Trainer:
        checkpointer = Checkpointer(folder, every=Every(iterations=1), at_end=False)
        shuffled = loader(12, shuffle=True)  # its order is random: the generators have to be restored
        return trainer({**bound, "validate_every": None}, val_loader=shuffled, handlers=[checkpointer])

    whole = make(tmp_path / "whole")
    expected = whole.train()
    cut = make(tmp_path / "cut")
    cut.add_event_handler(Events.TERMINATE, lambda: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        cut.train()
    torch.manual_seed(123)
    again = make(tmp_path / "cut")
    assert again.train(resume="latest") == expected
    assert (again.state.epoch, again.state.stop_reason) == (whole.state.epoch, whole.state.stop_reason)


def test_a_log_point_after_a_resume_still_has_the_norm(tmp_path: Path):
    def logged(run: Trainer) -> list[set[str]]:
        names: list[set[str]] = []
        run.add_event_handler(Events.METRICS_LOGGED, lambda engine, event: names.append(set(event.payload.metrics)))
        return names

    config = {"max_iterations": 5, "accumulate": 3, "clip_grad_norm": 1.0}
    run = trainer(config, handlers=[Checkpointer(tmp_path, every=Every(epochs=9))])
    run.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda engine: engine.terminate())
    run.train()
    again = trainer(config, handlers=[Checkpointer(tmp_path, every=Every(epochs=9))])
    names = logged(again)
    again.train(resume="latest")
    assert "grad_norm" in names[0]


@pytest.mark.filterwarnings("ignore:Data iterator can not provide data")
def test_data_that_ends_before_the_bound_ends_the_run_and_says_so():
    run = trainer({"max_iterations": 50}, train_loader=iter(list(loader())))
    run.train()
    assert run.state.stop_reason == "the data ended after 10 iterations, before the run's bound"


def test_a_validation_set_needs_a_name_of_its_own():
    for name in ("train", "", 1):
        with pytest.raises(ConfigurationError, match="other than 'train'"):
            trainer(val_loader={name: loader()})


def test_resuming_takes_a_word_or_a_path():
    with pytest.raises(TypeError, match="'latest' or a checkpoint's path"):
        trainer().train(resume=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["raise", "Ctrl-C", "complete", "complete twice and fail"])
def test_resuming_a_trained_trainer_without_a_checkpoint_is_refused(how: str, tmp_path: Path):
    run = trainer({"max_epochs": 1}, handlers=[Checkpointer(tmp_path, at_end=False, every=Every(epochs=9))])
    if "complete" in how:
        run.train()
    if how != "complete":
        at = Events.STARTED if "twice" in how else Events.ITERATION_COMPLETED(once=5)

        def stop() -> None:
            raise KeyboardInterrupt if how == "Ctrl-C" else RuntimeError("planted")

        with run.add_event_handler(at, stop), pytest.raises((KeyboardInterrupt, RuntimeError)):
            run.train()
    seen = iterations(run)
    with pytest.raises(ConfigurationError, match=r"(?s)make a new Trainer .*call train\(\) to continue"):
        run.train(resume="latest")
    assert seen == []


def test_a_trainer_that_failed_before_its_first_batch_still_starts_from_the_beginning(tmp_path: Path):
    def make(folder: Path) -> Trainer:
        handlers = [Checkpointer(folder, at_end=False, every=Every(epochs=9)), CSVLogger(folder)]
        return trainer({"max_epochs": 2}, handlers=handlers)

    expected = make(tmp_path / "whole").train()
    for at in (Events.STARTED, Events.EPOCH_STARTED):
        run = make(tmp_path / at.name)
        with pytest.raises(RuntimeError, match="planted"), run.add_event_handler(at, fail):
            run.train()
        seen = iterations(run)
        assert run.train(resume="latest") == expected
        assert seen == list(range(1, 21))


def fail() -> None:
    raise RuntimeError("planted")
