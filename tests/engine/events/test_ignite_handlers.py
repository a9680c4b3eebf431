"""Pytorch-ignite's own handlers and metrics attach to our Engine unchanged and do what they do on ignite's.

Each scenario runs on both engines from the same seed; the results are compared.
"""

from __future__ import annotations

import io

import pytest
import torch
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents
from ignite.engine import supervised_evaluation_step, supervised_training_step
from ignite.handlers import (
    BasicTimeProfiler,
    Checkpoint,
    CosineAnnealingScheduler,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    EpochOutputStore,
    FastaiLRFinder,
    HandlersTimeProfiler,
    ProgressBar,
    TerminateOnNan,
    TimeLimit,
    Timer,
)
from ignite.metrics import Accuracy, Loss, RunningAverage
from torch import nn

from pulsetrain.engine import Engine, Events
from pulsetrain.engine.events.filters import EventFilter

ENGINES = (Engine, IgniteEngine)


def on_both(scenario):
    """The scenario's results on our engine and on ignite's, from the same seed."""
    results = []
    for kind in ENGINES:
        torch.manual_seed(0)
        results.append(scenario(kind))
    return results


def batches(count=4, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 5, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def build_trainer(kind, model=None, learning_rate=0.1):
    model = model if model is not None else nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    trainer = kind(supervised_training_step(model, optimizer, nn.functional.cross_entropy))
    return trainer, model, optimizer


def test_the_supervised_training_step_trains_the_same_weights():
    def scenario(kind):
        trainer, model, _ = build_trainer(kind)
        losses = []
        trainer.add_event_handler(IgniteEvents.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
        trainer.run(batches(), max_epochs=3)
        return losses, model.weight.detach().clone()

    (losses, weight), (their_losses, their_weight) = on_both(scenario)
    assert losses == their_losses
    assert losses[-1] < losses[0]
    assert torch.equal(weight, their_weight)


def test_accuracy_and_loss_on_an_evaluator():
    def scenario(kind):
        model = nn.Linear(5, 3)
        evaluator = kind(supervised_evaluation_step(model))
        Accuracy().attach(evaluator, "accuracy")
        Loss(nn.functional.cross_entropy).attach(evaluator, "loss")
        return [dict(evaluator.run(batches(count)).metrics) for count in (4, 2)]

    ours, theirs = on_both(scenario)
    assert ours == theirs
    assert ours[0] != ours[1]  # reset between runs
    assert ours[0].keys() == {"accuracy", "loss"}


def test_a_metric_detaches_and_its_formulas_combine():
    def scenario(kind):
        evaluator = kind(supervised_evaluation_step(nn.Linear(5, 3)))
        accuracy = Accuracy()
        accuracy.attach(evaluator, "accuracy")
        (1 - accuracy).attach(evaluator, "error")
        first = dict(evaluator.run(batches()).metrics)
        accuracy.detach(evaluator)
        attached = accuracy.is_attached(evaluator)
        evaluator.state.metrics.clear()
        return first, attached, dict(evaluator.run(batches()).metrics)

    ours, theirs = on_both(scenario)
    assert ours == theirs
    first, attached, _ = ours
    assert first["accuracy"] + first["error"] == 1
    assert attached is False


def test_running_average_follows_the_loss():
    def scenario(kind):
        trainer, _, _ = build_trainer(kind)
        RunningAverage(output_transform=lambda loss: loss).attach(trainer, "smooth")
        seen = []
        trainer.add_event_handler(
            IgniteEvents.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.metrics["smooth"])
        )
        trainer.run(batches(), max_epochs=2)
        return seen

    ours, theirs = on_both(scenario)
    assert ours == theirs
    assert len(ours) == 8


def test_checkpoint_keeps_the_best_on_disk(tmp_path):
    def scenario(kind):
        folder = tmp_path / kind.__module__
        trainer, model, optimizer = build_trainer(kind)
        saver = Checkpoint(
            {"model": model, "optimizer": optimizer, "trainer": trainer},
            DiskSaver(str(folder), create_dir=True),
            n_saved=2,
            score_function=lambda engine: -engine.state.output,
            score_name="loss",
        )
        trainer.add_event_handler(IgniteEvents.EPOCH_COMPLETED, saver)
        trainer.run(batches(), max_epochs=4)
        saved = torch.load(saver.last_checkpoint, weights_only=True)
        return sorted(path.name for path in folder.iterdir()), saver.last_checkpoint.name, saved

    (names, last, saved), (their_names, their_last, their_saved) = on_both(scenario)
    assert names == their_names
    assert len(names) == 2
    assert last == their_last
    assert saved["trainer"] == their_saved["trainer"]
    assert torch.equal(saved["model"]["weight"], their_saved["model"]["weight"])


def test_a_checkpoint_of_ignite_resumes_our_engine(tmp_path):
    trainer, model, _ = build_trainer(Engine)
    saver = Checkpoint(
        {"model": model, "trainer": trainer},
        DiskSaver(str(tmp_path)),
        global_step_transform=lambda engine, event: engine.state.get_event_attrib_value(event),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), saver)
    trainer.run(batches(), max_epochs=2)
    assert saver.last_checkpoint.name == "checkpoint_6.pt"
    resumed, other, _ = build_trainer(Engine)
    state = torch.load(tmp_path / "checkpoint_6.pt", weights_only=True)
    Checkpoint.load_objects({"model": other, "trainer": resumed}, state)
    seen = []
    resumed.on(Events.ITERATION_STARTED)(lambda engine: seen.append(engine.state.iteration))
    resumed.run(batches())
    assert seen == [7, 8]


def test_early_stopping_ends_the_run():
    def scenario(kind):
        trainer = kind(lambda engine, batch: None)
        scores = iter([1.0, 2.0, 1.5, 1.4, 9.0, 9.0])
        stopper = EarlyStopping(patience=2, score_function=lambda engine: next(scores), trainer=trainer)
        evaluator = kind(lambda engine, batch: None)
        evaluator.add_event_handler(IgniteEvents.COMPLETED, stopper)
        trainer.add_event_handler(IgniteEvents.EPOCH_COMPLETED, lambda engine: evaluator.run([1]))
        trainer.run([1, 2], max_epochs=6)
        return trainer.state.epoch, stopper.counter, stopper.best_score

    ours, theirs = on_both(scenario)
    assert ours == theirs == (4, 2, 2.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_terminate_on_nan_ends_the_run(bad):
    def scenario(kind):
        trainer = kind(lambda engine, batch: bad if engine.state.iteration == 3 else 1.0)
        trainer.add_event_handler(IgniteEvents.ITERATION_COMPLETED, TerminateOnNan())
        return trainer.run(range(9)).iteration

    assert on_both(scenario) == [3, 3]


def test_time_limit_ends_the_run(monkeypatch):
    from ignite.handlers import time_limit

    def scenario(kind):
        now = [0.0]

        def step(engine, batch):
            now[0] += 1.0

        monkeypatch.setattr(time_limit.time, "time", lambda: now[0])
        trainer = kind(step)
        trainer.add_event_handler(IgniteEvents.ITERATION_COMPLETED, TimeLimit(3))
        state = trainer.run(range(9))
        monkeypatch.undo()
        return state.iteration

    assert on_both(scenario) == [4, 4]


def test_timer_counts_the_iterations():
    def scenario(kind):
        trainer = kind(lambda engine, batch: None)
        timer = Timer(average=True)
        timer.attach(
            trainer,
            start=IgniteEvents.EPOCH_STARTED,
            resume=IgniteEvents.ITERATION_STARTED,
            pause=IgniteEvents.ITERATION_COMPLETED,
            step=IgniteEvents.ITERATION_COMPLETED,
        )
        trainer.run(range(5))
        return timer.step_count, timer.value() > 0

    assert on_both(scenario) == [(5, True), (5, True)]


def test_basic_time_profiler_measures_every_event():
    def scenario(kind):
        trainer = kind(lambda engine, batch: None)
        profiler = BasicTimeProfiler()
        profiler.attach(trainer)
        seen = []
        trainer.add_event_handler(IgniteEvents.ITERATION_COMPLETED(every=2), lambda engine: seen.append(1))
        trainer.run(range(4), max_epochs=3)
        results = profiler.get_results()
        counted = {
            name: len(times) for name, times in vars(profiler).items() if isinstance(times, torch.Tensor) and times.ndim
        }
        return len(seen), counted, sorted(results), profiler.processing_times.min().item() > 0

    ours, theirs = on_both(scenario)
    assert ours == theirs
    assert ours[0] == 6


def test_handlers_time_profiler_measures_every_handler_and_puts_everything_back():
    def scenario(kind):
        trainer = kind(lambda engine, batch: None)
        seen = []

        @trainer.on(IgniteEvents.ITERATION_COMPLETED(every=2))
        def filtered(engine):
            seen.append(("filtered", engine.state.iteration))

        @trainer.on(IgniteEvents.EPOCH_COMPLETED, 7)
        def plain(engine, value):
            seen.append(("plain", value))

        profiler = HandlersTimeProfiler()
        profiler.EVENT_FILTER_THESHOLD_TIME = 0  # calls that take less are not counted
        profiler.attach(trainer)
        trainer.run(range(4), max_epochs=2)
        results = {row[0].split(".")[-1]: row[1] for row in profiler.get_results()[:-1] if row}
        counts = {
            event.name: {name.split(".")[-1]: len(t) for name, t in times.items()}
            for event, times in profiler.event_handlers_times.items()
            if times
        }
        trainer.run(range(4), max_epochs=1 + 2)
        return seen, results, counts

    ours, theirs = on_both(scenario)
    assert ours == theirs
    assert ("filtered", 2) in ours[0]
    assert ("plain", 7) in ours[0]


def test_a_filter_that_changes_while_a_profiler_applies_it_counts():
    engine = Engine(lambda engine, batch: None)
    seen = []
    subscription = engine.bus.subscribe(
        Events.ITERATION_COMPLETED(once=1), lambda: seen.append(engine.state.iteration), sender=engine
    )

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def again():
        subscription.refilter(EventFilter(once=(3,)))

    profiler = HandlersTimeProfiler()
    profiler.attach(engine)
    engine.run(range(4), max_epochs=1)
    assert seen == [1, 3]
    engine.run(range(4), max_epochs=1 + 1)
    assert seen == [1, 3]


@pytest.mark.filterwarnings("ignore:Run completed without loss diverging:UserWarning")
def test_lr_finder_sweeps_the_learning_rate():
    def scenario(kind):
        trainer, model, optimizer = build_trainer(kind)
        finder = FastaiLRFinder()
        with finder.attach(trainer, {"model": model, "optimizer": optimizer}, num_iter=12, end_lr=1.0) as finding:
            finding.run(batches(), max_epochs=3)
        results = finder.get_results()
        return results["lr"], results["loss"], optimizer.param_groups[0]["lr"]

    ours, theirs = on_both(scenario)
    assert ours == theirs
    assert len(ours[0]) == 12
    assert ours[2] == 0.1  # put back


def test_ema_handler_averages_the_weights():
    def scenario(kind):
        trainer, model, _ = build_trainer(kind)
        ema = EMAHandler(model, momentum=0.2)
        ema.attach(trainer, name="momentum_seen", event=IgniteEvents.ITERATION_COMPLETED(every=2))
        trainer.run(batches(), max_epochs=2)
        return ema.ema_model.weight.detach().clone(), trainer.state.momentum_seen, model.weight.detach().clone()

    ours, theirs = on_both(scenario)
    assert torch.equal(ours[0], theirs[0])
    assert ours[1] == theirs[1] == 0.2
    assert not torch.equal(ours[0], ours[2])


def test_cosine_annealing_scheduler_sets_the_learning_rate():
    def scenario(kind):
        trainer, _, optimizer = build_trainer(kind)
        trainer.add_event_handler(
            IgniteEvents.ITERATION_STARTED,
            CosineAnnealingScheduler(optimizer, "lr", 1.0, 0.0, cycle_size=6, save_history=True),
        )
        rates = []
        trainer.add_event_handler(
            IgniteEvents.ITERATION_COMPLETED, lambda engine: rates.append(optimizer.param_groups[0]["lr"])
        )
        trainer.run(batches(), max_epochs=2)
        return rates, trainer.state.param_history

    ours, theirs = on_both(scenario)
    assert ours == theirs
    assert ours[0][0] == 1.0
    assert ours[0][3] == pytest.approx(0.5)  # half of the cycle


def test_progress_bar_shows_the_run():
    def scenario(kind):
        trainer, _, _ = build_trainer(kind)
        RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
        screen = io.StringIO()
        bar = ProgressBar(file=screen, bar_format="{desc} {n_fmt}/{total_fmt}{postfix}", mininterval=0, miniters=1)
        bar.attach(trainer, ["loss"])
        trainer.run(batches(), max_epochs=2)
        return [line.strip() for line in screen.getvalue().replace("\r", "\n").split("\n") if line.strip()]

    ours, theirs = on_both(scenario)
    assert ours == theirs
    assert ours
    assert ours[-1].startswith("Epoch [2/2]")
    assert "loss=" in ours[-1]


def test_epoch_output_store_collects_the_outputs():
    def scenario(kind):
        evaluator = kind(lambda engine, batch: batch * 10)
        store = EpochOutputStore()
        store.attach(evaluator, "outputs")
        first = list(evaluator.run([1, 2, 3]).outputs)
        evaluator.run([4])
        return first, list(store.data), list(evaluator.state.outputs)

    ours, theirs = on_both(scenario)
    assert ours == theirs == ([10, 20, 30], [40], [40])
