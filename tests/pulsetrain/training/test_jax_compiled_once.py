"""How often a run in JAX is compiled: once for training and once for evaluation, with any handlers.

Counted by the backend, which counts what is traced; by the caches of the compiled functions; and by what JAX itself
reports of its compiler.
"""

from collections import Counter

import pytest
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, JaxBackend
from pulsetrain.handlers import Checkpointer, EventRecorder, LRFinder, ReduceLROnPlateau

pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
pytest.importorskip("flax", reason="pip install 'pulsetrain[jax]'")

import jax.monitoring

from tests.support.models import batches, function_model, linen_model, nnx_model, torch_model
from tests.support.runs_backends import programs_kept

pytestmark = pytest.mark.slow

ONCE = {"train": 1, "evaluate": 1}
IN_PARTS = {"gradients": 1, "finish": 1, "apply": 1, "evaluate": 1}


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    """JAX reports a program that it finds there as one that it has compiled."""
    with programs_kept():
        yield


@pytest.fixture
def compiled():
    """The names of the functions that JAX has compiled since."""
    names = []

    def listen(event, seconds, **details):
        if event.endswith("backend_compile_duration"):
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def trainer(handlers=(), make=function_model, data=None, **settings):
    return Trainer(
        make(torch_model().state_dict()),
        batches(20) if data is None else data,
        batches(5),
        backend=JaxBackend(),
        config=TrainingConfig(**{"max_epochs": 2, "learning_rate": 0.01, "device": "cpu", **settings}),
        handlers=handlers,
    )


def was_compiled(run, compiled, expected):
    """The backend's programs; each has one entry in its cache for each time it was compiled."""
    counted = {name: count for name, count in run.backend.compiled.items() if count}
    cached = Counter(dict.fromkeys(counted, 0))
    for key, program in run.backend._programs.items():
        cached[key[0]] += program._cache_size()
    assert counted == dict(cached) == expected
    assert compiled.count("jit(counted)") == sum(expected.values())


@pytest.mark.parametrize(
    "make",
    [
        function_model,
        lambda weights: nnx_model(weights, 0.3, norm=True),
        lambda weights: linen_model(weights, 0.3, norm=True),
    ],
    ids=["function", "nnx", "linen"],
)
def test_two_epochs_with_validation_compile_each_program_once(make, compiled):
    run = trainer(make=make)
    run.train()
    assert run.state.iteration == 40
    was_compiled(run, compiled, ONCE)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "cosine", "warmup_steps": 5, "clip_grad_norm": 1.0, "clip_grad_value": 0.1}, ONCE),
        # the first batch of an update has nothing to be added to
        ({"accumulate": 3, "clip_grad_norm": 1.0}, {"gradients": 2, "finish": 1, "apply": 1, "evaluate": 1}),
    ],
    ids=str,
)
def test_each_setting_compiles_the_expected_programs(settings, expected, compiled):
    run = trainer(**settings)
    run.train()
    was_compiled(run, compiled, expected)


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (lambda folder: ReduceLROnPlateau(patience=1), ONCE),
        (lambda folder: LRFinder(iterations=20), ONCE),  # its steps are the trainer's
        (EventRecorder, ONCE),  # recording causes no work
        (lambda folder: EventRecorder(folder, grad_norm=True), IN_PARTS),  # an update then has three parts
    ],
    ids=["plateau", "lr finder", "recorder", "recorder of norms"],
)
def test_each_handler_compiles_the_expected_programs(handler, expected, compiled, tmp_path):
    run = trainer([handler(tmp_path)])
    run.train()
    was_compiled(run, compiled, expected)


def test_gradients_measured_now_and_then_add_one_program(compiled):
    """An update that clips by a norm which was measured differs from one that does not need it."""
    run = trainer()
    received = []
    run.add_event_handler(Events.GRADIENTS_READY(every=10), lambda engine: received.append(engine.state.update))
    run.train()
    assert received == list(range(10, 41, 10))
    was_compiled(run, compiled, {**IN_PARTS, "apply": 2})


def test_a_smaller_last_batch_adds_one_program(compiled):
    inputs, targets = batches(1)[0]
    run = trainer(data=[*batches(5), (inputs[:7], targets[:7])])
    run.train()
    was_compiled(run, compiled, {"train": 2, "evaluate": 1})


def test_weights_written_between_two_epochs_compile_nothing_again(compiled):
    run = trainer()

    @run.on(Events.EPOCH_COMPLETED)
    @torch.no_grad()
    def shrink(engine):
        for parameter in engine.model.parameters():
            parameter.mul_(0.5)

    run.train()
    was_compiled(run, compiled, ONCE)


def test_a_run_resumed_twice_compiles_nothing_again(compiled, tmp_path):
    trainer([Checkpointer(tmp_path)]).train()
    del compiled[:]
    run = trainer([Checkpointer(tmp_path)], max_epochs=4)
    run.train(resume="latest")
    assert run.state.iteration == 80
    run.load_checkpoint(next((tmp_path / "checkpoints").glob("*040-*")))
    run.train()
    assert run.state.iteration == 80
    was_compiled(run, compiled, ONCE)


def test_states_from_other_sources_compile_nothing_again():
    """An ensemble's member, a state that went to the host and back, an optimizer's own state: as good as the first."""
    run = trainer()
    run.train()
    state = run.model_state
    result = run.train_step(batches(1)[0], state)
    again = run.train_step(batches(1)[0], result.state)
    assert run.backend.compiled["train"] == 2, "a pure step keeps the memory of what it was given; a trainer's does not"
    for program in run.backend._programs.values():
        assert program._cache_size() == 1
    assert again.state.metadata["step"] == 42
