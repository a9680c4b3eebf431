"""GradientMonitor: norms, histograms and update ratios against numpy, at the cadence alone."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, GradientsReady, SupervisedStrategy
from pulsetrain.engine.backends import torch as torch_backend
from pulsetrain.engine.errors import ConfigurationError, RecordingError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EventRecorder, GradientMonitor
from tests.support.engines import make_engine


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 1)
        self.offset = nn.Parameter(torch.zeros(1))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.second(self.first(x).tanh()) + self.offset


def make_trainer(*handlers, updates=4, **options):
    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    config = TrainingConfig(max_updates=updates, optimizer="sgd", learning_rate=0.1, schedule=None, seed=0, **options)
    return Trainer(Model(), data, strategy=SupervisedStrategy("mse"), config=config, handlers=list(handlers))


class Seen:
    """The published metrics, with the gradients and weights at that time."""

    def __init__(self, trainer):
        self.metrics, self.media, self.gradients, self.weights = [], [], [], []
        trainer.add_event_handler(Events.METRICS_LOGGED, self._metrics)
        trainer.add_event_handler(Events.MEDIA_LOGGED, lambda engine, event: self.media.append(event.payload))
        trainer.add_event_handler(Events.GRADIENTS_READY, self._gradients)

    def _metrics(self, engine, event):
        own = {name: value for name, value in event.payload.metrics.items() if "/" in name and "train" not in name}
        if own:
            self.metrics.append((engine.state.update, own))

    def _gradients(self, engine):
        named = dict(engine.model.named_parameters())
        self.gradients.append({n: p.grad.numpy().copy() for n, p in named.items() if p.grad is not None})
        self.weights.append({n: p.detach().numpy().copy() for n, p in named.items()})


def run(monitor, **options):
    trainer = make_trainer(monitor, **options)
    seen = Seen(trainer)
    trainer.train()
    return trainer, seen


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_the_norm_of_each_gradient_is_numpys_and_is_of_the_gradient_before_clipping(norm_type):
    _, seen = run(GradientMonitor(Every(updates=2), norm_type=norm_type), clip_grad_norm=1e-4)
    assert [update for update, _ in seen.metrics] == [2, 4]
    for update, metrics in seen.metrics:
        gradients = seen.gradients[update - 1]
        assert list(metrics) == [f"grad_norm/{name}" for name in gradients]
        assert "grad_norm/unused" not in metrics
        for name, gradient in gradients.items():
            assert metrics[f"grad_norm/{name}"] == pytest.approx(np.linalg.norm(gradient.ravel(), norm_type), rel=1e-5)


def test_by_module_it_is_the_norm_over_all_of_the_modules_own_parameters():
    _, seen = run(GradientMonitor(Every(updates=4), by="module"))
    ((_, metrics),) = seen.metrics
    gradients = seen.gradients[3]
    joined = np.concatenate([gradients["first.weight"].ravel(), gradients["first.bias"]])
    assert set(metrics) == {"grad_norm/first", "grad_norm/second", "grad_norm/(root)"}
    assert metrics["grad_norm/first"] == pytest.approx(np.linalg.norm(joined), rel=1e-5)


def test_histograms_are_numpys():
    _, seen = run(GradientMonitor(Every(updates=4), histograms=True, bins=5))
    assert {media.name for media in seen.media} == {f"grad/{name}" for name in seen.gradients[3]}
    for media in seen.media:
        counts, edges = media.value
        gradient = seen.gradients[3][media.name.removeprefix("grad/")]
        expected_counts, expected_edges = np.histogram(gradient.astype(np.float64), bins=5)
        assert media.kind == "histogram"
        assert counts == expected_counts.tolist()
        assert edges == pytest.approx(expected_edges.tolist(), rel=1e-6)


def test_the_update_ratio_is_what_the_update_added_over_what_was_there():
    trainer, seen = run(GradientMonitor(Every(updates=4), updates=True), clip_grad_norm=0.5)
    ((_, metrics),) = seen.metrics
    before = seen.weights[3]
    for name, parameter in trainer.model.named_parameters():
        if name == "unused":
            continue
        difference = np.linalg.norm(parameter.detach().numpy() - before[name])
        expected = difference / np.linalg.norm(before[name])
        assert metrics[f"update_ratio/{name}"] == pytest.approx(expected, rel=1e-4)
        assert f"grad_norm/{name}" in metrics


def test_top_publishes_only_the_largest():
    _, seen = run(GradientMonitor(Every(updates=4), top=2, histograms=True))
    ((_, metrics),) = seen.metrics
    norms = sorted(float(np.linalg.norm(gradient)) for gradient in seen.gradients[3].values())
    assert sorted(metrics.values()) == pytest.approx(norms[-2:])
    assert {f"grad_norm/{media.name.removeprefix('grad/')}" for media in seen.media} == set(metrics)


def test_the_gradient_norm_is_computed_at_its_own_updates_and_no_others(monkeypatch):
    computed = []
    trainer = make_trainer(GradientMonitor(Every(updates=3)), updates=7)
    true = torch_backend.grad_norm

    def counting(parameters):
        computed.append(trainer.state.update + 1)
        return true(parameters)

    monkeypatch.setattr(torch_backend, "grad_norm", counting)
    trainer.train()
    assert 3 in computed
    assert 6 in computed
    assert set(computed) <= {1, 3, 6}  # the first is asked about, to find when the next is due


def test_a_run_with_it_ends_with_the_same_weights():
    watched, _ = run(GradientMonitor(Every(updates=1), histograms=True, updates=True))
    plain = make_trainer()
    plain.train()
    for mine, other in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_norm_and_stays_out_of_the_histogram(bad):
    model = nn.Linear(3, 1, bias=False)
    model.weight.grad = torch.tensor([[1.0, bad, 3.0]])
    engine = engine_with(make_engine(), model)
    seen = Seen(engine)
    GradientMonitor(Every(updates=1), histograms=True, bins=2).attach(engine)
    engine.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=torch.tensor(1.0)))
    assert not math.isfinite(seen.metrics[0][1]["grad_norm/weight"])
    assert seen.media[0].value == ([1, 1], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("value", [0.0, 2.0, math.nan])
def test_a_gradient_of_one_value_has_a_histogram_as_numpy_makes_it(value):
    model = nn.Linear(3, 1, bias=False)
    model.weight.grad = torch.full((1, 3), value)
    engine = engine_with(make_engine(), model)
    seen = Seen(engine)
    GradientMonitor(Every(updates=1), histograms=True, bins=4).attach(engine)
    engine.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=torch.tensor(1.0)))
    finite = np.full(3, value) if math.isfinite(value) else np.zeros(0)
    counts, edges = np.histogram(finite, bins=4, range=None if finite.size else (-0.5, 0.5))
    assert seen.media[0].value == (counts.tolist(), edges.tolist())


def test_a_sparse_gradient_and_one_of_half_precision_are_measured():
    model = nn.ModuleDict({"table": nn.Embedding(10, 2, sparse=True), "narrow": nn.Linear(2, 1, bias=False).bfloat16()})
    model["table"](torch.tensor([1, 1, 4])).sum().backward()
    model["narrow"].weight.grad = torch.full((1, 2), 300.0, dtype=torch.bfloat16)
    engine = engine_with(make_engine(), model)
    seen = Seen(engine)
    engine.remove_event_handler(seen._gradients, Events.GRADIENTS_READY)
    GradientMonitor(Every(updates=1), histograms=True).attach(engine)
    engine.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=torch.tensor(1.0)))
    expected = {"grad_norm/table.weight": math.sqrt(10.0), "grad_norm/narrow.weight": 300 * math.sqrt(2)}
    assert seen.metrics[0][1] == pytest.approx(expected, rel=1e-6)


def engine_with(engine, model):
    engine.model = model
    return engine


def test_a_given_model_replaces_the_engines():
    model = nn.Linear(1, 1)
    model.bias.grad = torch.tensor([2.0])
    engine = make_engine()
    seen = Seen(engine)
    engine.remove_event_handler(seen._gradients, Events.GRADIENTS_READY)
    GradientMonitor(Every(updates=1), model=model).attach(engine)
    engine.fire(Events.GRADIENTS_READY, GradientsReady(grad_norm=torch.tensor(1.0)))
    assert seen.metrics == [(1, {"grad_norm/bias": 2.0})]


def test_a_detached_monitor_needs_no_gradient_norm():
    trainer = make_trainer(monitor := GradientMonitor(Every(updates=1), updates=True))
    assert trainer.hears(Events.GRADIENTS_READY)
    monitor.detach()
    assert not trainer.hears(Events.GRADIENTS_READY)


def test_an_engine_without_a_model_is_refused_and_so_is_a_replay(tmp_path):
    with pytest.raises(ConfigurationError, match=r"GradientMonitor\(model=None\): 'trainer' has no torch model; pass"):
        GradientMonitor().attach(make_engine())
    recorder = EventRecorder(tmp_path)
    make_trainer(recorder).train()
    recorder.detach()
    with pytest.raises(RecordingError, match=r"GradientMonitor.*no gradients.*attach this handler to a run"):
        GradientMonitor().attach(Replay(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": Every(iterations=5)}, r"every=Every\(iterations=5.*: gradients are complete only at an update; use"),
        ({"every": Every(updates=5, epochs=1)}, r"gradients are complete only at an update"),
        ({"every": 5}, r"every=5\): gradients"),
        ({"by": "layer"}, r"by='layer'\): unknown; choose one of module, parameter"),
        ({"norm_type": 3}, r"norm_type=3\): needs 1, 2 or inf"),
        ({"bins": 0}, r"bins=0\): needs a whole number of at least 1"),
        ({"top": 0}, r"top=0\): needs"),
        ({"histograms": "yes"}, r"histograms='yes'\): needs True or False"),
        ({"updates": 1}, r"updates=1\): needs True or False"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, message):
    with pytest.raises(ConfigurationError, match=rf"GradientMonitor\(.*{message}"):
        GradientMonitor(**arguments)


def test_what_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match=r"GradientMonitor\(model=3\): needs a torch.nn.Module"):
        GradientMonitor(model=3)
