"""Handlers that read weights, gradients or rates, on by-value backends."""

import math

import pytest
import structlog
import torch

from pulsetrain.engine import Event, Events, Every
from pulsetrain.handlers import (
    EMA,
    SWA,
    BestModel,
    Checkpointer,
    CrashBundle,
    EarlyStopping,
    Fingerprints,
    GradientMonitor,
    LRFinder,
    LRScheduler,
    NaNGuard,
    ReduceLROnPlateau,
)
from pulsetrain.handlers.crash.crash_bundle import read_bundle
from pulsetrain.handlers.recorder.fingerprints import FingerprintEvents
from tests.support.models import batches
from tests.support.runs import cut_after
from tests.support.runs_backends import needs_jax, programs_kept
from tests.support.runs_by_value import each_backend, state_of, trainer


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


@each_backend
def test_ema_is_the_average_of_the_weights_and_what_is_validated(on):
    ema = EMA(decay=0.5)
    run = trainer(on, [ema], max_epochs=1)
    expected = None
    with_average = []

    @run.on(Events.OPTIMIZER_STEP_COMPLETED, phase=3)
    def follow(engine):
        nonlocal expected
        now = {name: each.detach().clone() for name, each in engine.model.named_parameters()}
        expected = now if expected is None else {name: 0.5 * (expected[name] + each) for name, each in now.items()}

    run.evaluator.add_event_handler(Events.STARTED, lambda: with_average.append(state_of(run)))
    run.train()
    assert ema.number_averaged == 10
    raw = state_of(run)
    with ema.applied():
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)
        assert state_of(run) == with_average[0] != raw
    assert state_of(run) == raw


@each_backend
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_nan_guard_leaves_an_update_out_and_no_bit_changes(on, optimizer):
    if on == "numpy":
        optimizer = "sgd"
    data = batches(4)
    data[2] = (data[2][0] * math.nan, data[2][1])
    run = trainer(on, [NaNGuard()], data, max_epochs=1, optimizer=optimizer)
    states, reported = {}, []
    run.add_event_handler(Events.ITERATION_COMPLETED, lambda: states.update({run.state.iteration: state_of(run)}))
    run.add_event_handler(Events.ANOMALY_DETECTED, lambda engine, event: reported.append(event.payload.kind))
    run.train()
    assert reported == ["nan_gradient"]
    changed = {path for path, value in states[3].items() if states[2][path] != value}
    # counts of draws and of passes cannot become nan
    assert all(path.endswith(("count", "num_batches_tracked")) for path in changed), changed
    assert states[4] != states[3] != states[1]


@each_backend
def test_best_model_leaves_the_best_weights_in_the_model_and_in_the_state(on, tmp_path):
    best = BestModel(folder=tmp_path)
    run = trainer(on, [best], learning_rate=0.5)
    seen = {}
    run.add_event_handler(Events.VALIDATION_COMPLETED, lambda: seen.update({run.state.iteration: state_of(run)}))
    history = run.train()["val/loss"]
    assert best.best_iteration == 10 * (1 + history.index(min(history)))
    weights = {path: each for path, each in seen[best.best_iteration].items() if path.startswith("weights")}
    assert {path: each for path, each in state_of(run).items() if path.startswith("weights")} == weights
    on_disk = torch.load(tmp_path / "best_model.pt", weights_only=True)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(on_disk[name], tensor), name


@each_backend
def test_fingerprints_differ_where_the_state_does(on):
    run = trainer(on, [Fingerprints(every=Every(updates=5))])
    found = []
    run.add_event_handler(
        FingerprintEvents.STATE_FINGERPRINTED,
        lambda engine, event: found.append((event.payload.weights.item(), event.payload.optimizer.item())),
    )
    run.train()
    assert len(found) == 6
    for part in zip(*found, strict=True):
        assert len(set(part)) == 6
    again, repeated = trainer(on, [Fingerprints(every=Every(updates=5))]), []
    again.add_event_handler(
        FingerprintEvents.STATE_FINGERPRINTED,
        lambda engine, event: repeated.append((event.payload.weights.item(), event.payload.optimizer.item())),
    )
    again.train()
    assert repeated == found


@each_backend
def test_the_range_test_leaves_no_trace(on):
    run, untouched = trainer(on), trainer(on)
    before = state_of(run)
    result = LRFinder(start_lr=1e-5, end_lr=1.0, iterations=20).run(run)
    assert len(set(result.losses)) > 10
    assert state_of(run) == before
    assert run.train() == untouched.train()
    assert state_of(run) == state_of(untouched)


@each_backend
def test_a_rate_that_a_handler_sets_is_the_updates(on):
    run = trainer(on, [ReduceLROnPlateau(patience=1, factor=0.1, threshold=100.0)], max_epochs=4)
    rates = run.train()["learning_rate"]
    assert rates == pytest.approx([0.05, 0.05, 0.005, 0.005])
    optimizer = run.model_store.state.optimizer
    assert run.backend.learning_rate(optimizer) == pytest.approx(0.005)
    torchs = trainer(on)
    LRScheduler(torch.optim.lr_scheduler.StepLR(torchs.optimizer, 10, 0.5)).attach(torchs)
    torchs.train()
    # the rate of an epoch is that of its last update; the schedule has set the next one since
    assert torchs.history.get_history()["learning_rate"] == pytest.approx([0.05, 0.025, 0.0125])
    assert torchs.model_store.state.metadata["learning_rate"] == pytest.approx(0.00625)


@each_backend
def test_early_stopping_ends_the_run(on):
    run = trainer(on, [EarlyStopping(patience=1, min_delta=100.0)], max_epochs=10)
    run.train()
    assert run.state.epoch == 2
    assert "has not improved" in run.state.stop_reason


@each_backend
def test_a_crash_leaves_a_bundle_with_the_batch(on, tmp_path):
    data = batches(4)
    data[2] = (torch.ones(16, 5), data[2][1])
    run = trainer(on, [CrashBundle(tmp_path)], data)
    before = {}
    run.add_event_handler(Events.ITERATION_STARTED, lambda: before.update(state_of(run)))
    with pytest.raises(Exception, match="5") as error:  # of the library's own kind
        run.train()
    assert (
        any(note.startswith("given inputs ") and "(16, 5)" in note for note in error.value.__notes__) or on == "numpy"
    )
    assert state_of(run) == before
    bundle = read_bundle(tmp_path / "crash" / "iteration-000000003")
    assert bundle.batch[0].shape == (16, 5)


@pytest.mark.slow
@needs_jax
@pytest.mark.parametrize("iteration", [7, 10])
def test_a_run_of_linen_with_dropout_and_batch_norm_resumes_bit_for_bit(iteration, tmp_path):
    whole = trainer("jax", accumulate=2)
    history = whole.train()
    cut_after(trainer("jax", [Checkpointer(tmp_path, Every(iterations=iteration))], accumulate=2), iteration)
    resumed = trainer("jax", [Checkpointer(tmp_path, Every(iterations=iteration))], accumulate=2)
    assert resumed.train(resume="latest") == history
    assert state_of(resumed) == state_of(whole)


@each_backend
def test_gradient_monitor_looks_at_the_gradients_of_each_update(on):
    run = trainer(on, [GradientMonitor(every=Every(updates=1), by="parameter", updates=True)], accumulate=2)
    norms, found = [], []
    run.add_event_handler(Events.GRADIENTS_READY, lambda e, event: norms.append(float(event.payload.grad_norm)))

    @run.on(Events.METRICS_LOGGED)
    def keep(engine, event: Event):
        if any(name.startswith("update_ratio/") for name in event.payload.metrics):
            found.append({k: v for k, v in event.payload.metrics.items() if k.startswith("grad_norm/")})

    run.train()
    assert len(found) == len(norms) == 15
    assert [math.hypot(*each.values()) for each in found] == pytest.approx(norms, rel=1e-5)
    assert all(parameter.grad is None for parameter in run.model.parameters())


@needs_jax
def test_swa_says_that_it_does_not_measure_statistics_on_jax():
    with structlog.testing.capture_logs() as logs:
        run = trainer("jax", [SWA(after_epoch=1)])
        run.train()
    assert [each["event"][:4] for each in logs if "running statistics" in each["event"]] == ["SWA:"]
    averaged = run.handlers[0]
    assert averaged.number_averaged == 2


def test_swa_measures_statistics_on_values_of_torch():
    data = batches(10)
    run = trainer("torch", [SWA(after_epoch=1, bn_loader=data)])
    run.train()
    own = {name: each.clone() for name, each in run.model.named_buffers()}
    with run.handlers[0].applied():
        measured = dict(run.model.named_buffers())
        assert not torch.equal(measured["2.running_mean"], own["2.running_mean"])
    assert torch.equal(dict(run.model.named_buffers())["2.running_mean"], own["2.running_mean"])
