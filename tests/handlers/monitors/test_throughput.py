"""Throughput: times by a clock moved by hand, operations by a count on paper, and numbers that do not change."""

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ActivationCheckpointing, Events, Every, Phase, SupervisedStrategy, TrainingBatch
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.events.payloads import CheckpointSaved, ValidationCompleted
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder, Throughput
from pulsetrain.handlers.monitors.flop_count import shapes_of
from tests.support.engines import make_engine, validated

ROWS, BATCH, INPUTS, OUTPUTS = 32, 4, 6, 3


def make_trainer(*handlers, model=None, rows=ROWS, epochs=1, optimizer="sgd", **options):
    torch.manual_seed(0)
    inputs = torch.randn(rows, INPUTS)
    data = DataLoader(TensorDataset(inputs, torch.randn(rows, OUTPUTS)), batch_size=BATCH)
    config = TrainingConfig(max_epochs=epochs, optimizer=optimizer, learning_rate=0.1, schedule=None, seed=0, **options)
    model = nn.Linear(INPUTS, OUTPUTS) if model is None else model
    return Trainer(model, data, strategy=SupervisedStrategy("mse"), config=config, handlers=list(handlers))


def published(engine):
    """Metrics published under "throughput/" from now on, by names without the prefix."""
    seen = []

    @engine.on(Events.METRICS_LOGGED)
    def note(engine, event):
        own = {n.removeprefix("throughput/"): v for n, v in event.payload.metrics.items() if n.startswith("throughput")}
        if own:
            seen.append(own)

    return seen


class Slow:
    """Batches that take 1 s each to come."""

    def __init__(self, clock, count):
        self.clock, self.count = clock, count

    def __iter__(self):
        for number in range(self.count):
            self.clock.now += 1.0
            yield number

    def __len__(self):
        return self.count


def stepping(clock, seconds):
    def step(iteration):
        clock.now += seconds
        return 0.0

    return make_engine(step)


def test_times_follow_the_clock_and_include_the_share_of_waiting_for_data(clock):
    engine = stepping(clock, 3.0)
    seen = published(engine)
    Throughput(Every(iterations=4), flops_per_sample=None, clock=clock).attach(engine)
    engine.run(Slow(clock, 9))
    expected = {"iterations_per_second": 0.25, "step_seconds": 4.0, "data_share": 0.25}
    assert seen[:2] == [expected, expected], "the first, which is counted, is left out with its wait"


def test_the_last_iterations_are_published_at_the_end(clock):
    engine = stepping(clock, 1.0)
    seen = published(engine)
    Throughput(Every(iterations=100), clock=clock).attach(engine)
    engine.run(Slow(clock, 3))
    assert [each["step_seconds"] for each in seen] == [2.0]


def test_validation_and_synchronous_checkpoints_are_left_out(clock):
    engine = stepping(clock, 2.0)
    seen = published(engine)

    def saved(seconds, background):
        payload = CheckpointSaved(path="x", iteration=1, bytes=1, seconds=seconds, is_best=False, background=background)
        engine.fire(Events.CHECKPOINT_SAVED, payload)

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def validate_and_save(engine):
        engine.on(Events.VALIDATION_STARTED)(lambda: setattr(clock, "now", clock.now + 50.0))

        @engine.on(Events.VALIDATION_COMPLETED)
        def save_the_best():
            clock.now += 7.0
            saved(7.0, background=False)  # inside the pause: to be left out once

        validated(engine, {"val/loss": 1.0})
        clock.now += 5.0
        saved(5.0, background=False)
        saved(500.0, background=True)

    Throughput(Every(iterations=5), clock=clock).attach(engine)
    engine.run([0] * 5)
    assert seen == [{"iterations_per_second": 0.5, "step_seconds": 2.0, "data_share": 0.0}]


def test_a_pause_that_a_reading_falls_into_is_split_between_two_intervals(clock):
    engine = stepping(clock, 2.0)
    seen = published(engine)

    @engine.on(Events.ITERATION_COMPLETED(once=3), phase=Phase.COMPUTE)
    def begin(engine):
        engine.fire(Events.VALIDATION_STARTED)
        clock.now += 50.0

    @engine.on(Events.ITERATION_COMPLETED(once=3), phase=Phase.PERSIST)
    def end(engine):
        clock.now += 7.0
        engine.fire(Events.VALIDATION_COMPLETED, ValidationCompleted(metrics={}, seconds=57.0))

    Throughput(Every(iterations=3), clock=clock).attach(engine)
    engine.run([0] * 6)
    assert [each["step_seconds"] for each in seen] == [2.0, 2.0]


def test_the_time_of_an_interruption_is_left_out(clock):
    engine = stepping(clock, 2.0)
    seen = published(engine)
    engine.on(Events.ITERATION_COMPLETED(once=2))(engine.interrupt)
    Throughput(Every(iterations=4), clock=clock).attach(engine)
    engine.run([0] * 4)
    clock.now += 1000.0
    engine.run([0] * 4)
    assert [each["step_seconds"] for each in seen] == [2.0]


def test_a_linear_layer_has_the_operations_computed_by_hand(clock):
    """Forward 2BIO, and as many for the weights' gradient; the inputs need none."""
    trainer = make_trainer(Throughput(Every(iterations=4), peak_flops=1e6, clock=clock))
    trainer.on(Events.ITERATION_STARTED)(lambda: setattr(clock, "now", clock.now + 0.5))
    seen = published(trainer)
    trainer.train()
    flops = 2 * 2 * BATCH * INPUTS * OUTPUTS
    assert seen[1]["flops_per_second"] == pytest.approx(flops / 0.5)
    assert seen[1]["mfu"] == pytest.approx(flops / 0.5 / 1e6)


def test_a_deep_model_has_6_operations_per_weight_and_sample_except_in_the_first_layer():
    hidden = 16
    model = nn.Sequential(nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, OUTPUTS))
    throughput = Throughput()
    make_trainer(throughput, model=model).train()
    expected = BATCH * (4 * INPUTS * hidden + 6 * hidden * OUTPUTS)
    assert list(throughput._flops_of.values()) == [expected]


def test_the_optimizers_operations_are_not_counted():
    throughput = Throughput()
    model = nn.Linear(INPUTS, OUTPUTS, bias=False)
    make_trainer(throughput, model=model, optimizer="muon").train()
    assert list(throughput._flops_of.values()) == [2 * 2 * BATCH * INPUTS * OUTPUTS]


def test_flops_per_sample_replaces_counting(clock):
    throughput = Throughput(Every(iterations=4), flops_per_sample=100.0, peak_flops=4e3, clock=clock)
    trainer = make_trainer(throughput)
    trainer.on(Events.ITERATION_STARTED)(lambda: setattr(clock, "now", clock.now + 0.5))
    seen = published(trainer)
    trainer.train()
    assert [each["mfu"] for each in seen] == [pytest.approx(BATCH * 100 / 0.5 / 4e3)] * 2
    assert throughput._flops_of == {}


def test_counting_changes_no_weight():
    weights = []
    for handlers in ([], [Throughput()]):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Dropout(0.2), nn.TransformerEncoderLayer(16, 2, 16), nn.Linear(16, 3)
        )
        model = nn.Sequential(nn.Unflatten(1, (1, INPUTS)), *model)
        make_trainer(*handlers, model=model, optimizer="adamw", clip_grad_norm=1.0, accumulate=2).train()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for mine, other in zip(*weights, strict=True):
        assert torch.equal(mine, other)


def test_each_shape_of_batch_is_counted_once():
    throughput = Throughput()
    make_trainer(throughput, rows=ROWS + 1, epochs=3).train()  # the last batch has one row
    full = 2 * 2 * BATCH * INPUTS * OUTPUTS
    assert sorted(throughput._flops_of.values()) == [full // BATCH, full]


def test_another_model_is_counted_again():
    throughput = Throughput()
    counted = []
    for outputs in (OUTPUTS, 2 * OUTPUTS):
        model = nn.Sequential(nn.Linear(INPUTS, outputs), nn.Linear(outputs, OUTPUTS))
        make_trainer(throughput, model=model).train()
        counted += throughput._flops_of.values()
        throughput.detach()
    assert counted[0] < counted[1]


def test_the_steps_of_several_optimizers_are_not_counted():
    class Turns:
        def prepare_batch(self, batch):
            return TrainingBatch(batch[0], batch[1], len(batch[0]))

        def compute_losses(self, model, batch):
            for name in ("a", "b"):
                yield name, (model[name](batch.inputs) - batch.targets).square().mean()

    throughput = Throughput()
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(8, INPUTS), torch.randn(8, OUTPUTS)), batch_size=BATCH)
    config = TrainingConfig(max_epochs=1, optimizer="muon", learning_rate=0.1, schedule=None, seed=0)
    model = {name: nn.Linear(INPUTS, OUTPUTS, bias=False) for name in ("a", "b")}
    Trainer(model, data, strategy=Turns(), config=config, handlers=[throughput]).train()
    assert list(throughput._flops_of.values()) == [2 * 2 * 2 * BATCH * INPUTS * OUTPUTS]


@pytest.mark.parametrize(("compiled", "asked"), [(False, ROWS // BATCH), (True, 1)])
def test_shapes_are_read_once_an_iteration_and_only_if_they_are_counted(compiled, asked, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "pulsetrain.handlers.monitors.throughput.shapes_of", lambda batch: calls.append(batch) or shapes_of(batch)
    )
    model = nn.Linear(INPUTS, OUTPUTS)
    if compiled:
        model.compile(backend="eager")
    make_trainer(Throughput(), model=model).train()
    assert len(calls) == asked


def test_too_many_shapes_are_reported_once_and_left_out(monkeypatch):
    monkeypatch.setattr("pulsetrain.handlers.monitors.throughput.MAX_SHAPES", 1)
    trainer = make_trainer(Throughput(Every(iterations=9), peak_flops=1.0), rows=ROWS + 1, epochs=3)
    seen = published(trainer)
    with capture_logs() as logs:
        trainer.train()
    assert [log["event"] for log in logs if "shapes" in log["event"]] == [
        "batches have more than 1 shapes, and steps are no longer counted: the share of the device's peak is left out; "
        "pass flops_per_sample="
    ]
    assert "mfu" not in seen[0]


def test_a_compiled_model_is_left_alone():
    model = nn.Linear(INPUTS, OUTPUTS)
    model.compile(backend="eager")
    throughput = Throughput(peak_flops=1.0)
    with capture_logs() as logs:
        make_trainer(throughput, model=model).train()
    assert throughput._flops_of == {}
    assert any("compiled" in log["event"] for log in logs)


def test_a_cpu_has_no_share_and_no_warning():
    trainer = make_trainer(Throughput(Every(iterations=2)))
    seen = published(trainer)
    with capture_logs() as logs:
        trainer.train()
    assert all("mfu" not in each and "flops_per_second" in each for each in seen)
    assert not [log for log in logs if log["log_level"] == "warning"]


def test_an_unknown_device_has_no_share_and_one_warning(monkeypatch):
    monkeypatch.setattr("pulsetrain.handlers.monitors.throughput.device_of", lambda engine: torch.device("meta"))
    trainer = make_trainer(Throughput(Every(iterations=2)))
    seen = published(trainer)
    with capture_logs() as logs:
        trainer.train()
    assert all("mfu" not in each and "flops_per_second" in each for each in seen)
    assert len([log for log in logs if "peak_flops=" in log["event"]]) == 1


def test_a_step_that_fails_while_it_is_counted_leaves_nothing():
    model = nn.Linear(INPUTS, OUTPUTS)
    throughput = Throughput()
    trainer = make_trainer(throughput, model=model)
    hook = model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    hook.remove()
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    trainer.train()
    assert len(throughput._flops_of) == 1


def test_detaching_in_mid_step_leaves_nothing():
    model = nn.Linear(INPUTS, OUTPUTS)
    throughput = Throughput()
    trainer = make_trainer(throughput, model=model)
    model.register_forward_hook(lambda *_: throughput.detach())
    trainer.train()
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert throughput._flops_of == {}


def test_the_trainers_own_rates_keep_their_names():
    trainer = make_trainer(Throughput(Every(iterations=2)), log_every_n_steps=2)
    names = []
    trainer.on(Events.METRICS_LOGGED)(lambda engine, event: names.extend(event.payload.metrics))
    trainer.train()
    assert names.count("samples_per_second") == names.count("throughput/step_seconds") == 4


def test_a_recording_does_not_expect_its_numbers_again(tmp_path):
    make_trainer(Throughput(Every(iterations=2)), EventRecorder(tmp_path)).train()
    own = [event for event in EventLog(tmp_path).read() if "throughput/step_seconds" in str(event.payload)]
    assert own
    assert all(event.ord < 0 for event in own)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"Throughput\(flops_per_sample=5\).*'trainer' counts no state.samples"
    ):
        Throughput(flops_per_sample=5).attach(make_engine())
    recorder = EventRecorder(tmp_path)
    make_trainer(recorder).train()
    recorder.detach()
    with pytest.raises(RecordingError, match=r"Throughput.*no process that trains"):
        Throughput().attach(Replay(tmp_path))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "many"])
@pytest.mark.parametrize("name", ["flops_per_sample", "peak_flops"])
def test_wrong_numbers_are_refused_when_constructing(name, value):
    with pytest.raises(ConfigurationError, match=rf"Throughput\({name}=.*needs a positive number"):
        Throughput(**{name: value})


def test_what_is_not_a_cadence_is_refused():
    with pytest.raises(TypeError, match=r"Throughput\(every=5\): needs an Every"):
        Throughput(5)


def test_where_activations_are_recomputed_that_is_counted_and_the_share_has_the_other_name():
    counted, weights = {}, {}
    for names in (None, "0", ActivationCheckpointing("0", keep=["addmm"])):
        throughput = Throughput(Every(iterations=4), peak_flops=1e9)
        model = nn.Sequential(nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Dropout(0.5)), nn.Linear(16, OUTPUTS))
        trainer = make_trainer(throughput, model=model, activation_checkpointing=names)
        seen = published(trainer)
        trainer.train()
        (counted[names],) = throughput._flops_of.values()
        weights[names] = model[1].weight.detach().clone()
        assert ("hfu" in seen[0], "mfu" in seen[0]) == (names is not None, names is None)
    assert counted["0"] - counted[None] == 2 * BATCH * INPUTS * 16
    assert counted[names] == counted[None]  # the product is kept


def test_an_interruption_in_mid_count_leaves_nothing():
    throughput = Throughput()
    trainer = make_trainer(throughput)
    trainer.on(Events.ITERATION_STARTED(once=1))(trainer.interrupt)
    trainer.train()
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    trainer.train()
    assert trainer.state.iteration == ROWS // BATCH
    assert len(throughput._flops_of) == 1
