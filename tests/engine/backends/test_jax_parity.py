"""The JAX backend computes what torch does, whatever the model is written in."""

import numpy as np
import pytest
import torch

from pulsetrain.engine import SupervisedStrategy, TorchBackend
from pulsetrain.engine.backends.core import TrainerCore

pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
pytest.importorskip("flax", reason="pip install 'pulsetrain[jax]'")

from tests.support.models import KINDS, batches, core_of, linen_model, nnx_model, torch_model
from tests.support.runs_backends import programs_kept

pytestmark = pytest.mark.slow

STEPS = 100
OPTIMIZERS = {"sgd": 0.05, "adam": 0.01, "adamw": 0.01, "rmsprop": 0.01}
DECAY = 0.1


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


@pytest.fixture(scope="module")
def torchs():
    """The losses of a plain loop in torch, by the optimizer's name."""
    kinds = {
        "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=DECAY),
        "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr, weight_decay=DECAY),
        "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr, weight_decay=DECAY),
        "rmsprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr, weight_decay=DECAY),
    }
    found = {}
    for name, rate in OPTIMIZERS.items():
        model = torch_model()
        optimizer = kinds[name](model.parameters(), rate)
        found[name] = []
        for inputs, targets in batches(STEPS):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            found[name].append(loss.item())
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_torchs_losses(kind, optimizer, torchs):
    core = core_of(clip_grad_norm=0.5)
    state = core.init(
        KINDS[kind](torch_model().state_dict()),
        optimizer,
        learning_rate=OPTIMIZERS[optimizer],
        weight_decay=DECAY,
    )
    losses = []
    core.train_epoch(batches(STEPS), state, lambda result: losses.append(float(result.loss)))
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, torchs[optimizer], rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [nnx_model, linen_model], ids=["nnx", "linen"])
def test_batch_norm_has_torchs_statistics(make):
    model = torch.nn.Sequential(torch_model()[0], torch.nn.BatchNorm1d(8, momentum=0.1), torch_model()[1:])
    weights = torch_model().state_dict()
    torchs, mine = TrainerCore(TorchBackend(functional=True, device="cpu"), SupervisedStrategy()), core_of()
    theirs, ours = (
        torchs.init(model, "sgd", learning_rate=0.01),
        mine.init(make(weights, norm=True), "sgd", learning_rate=0.01),
    )
    for batch in batches(20):
        expected, result = torchs.train_step(batch, theirs), mine.train_step(batch, ours)
        theirs, ours = expected.state, result.state
        assert float(result.loss) == pytest.approx(expected.loss.item(), abs=1e-5)
    mean = next(leaf for path, leaf in mine.backend.paths(ours.weights["buffers"]).items() if path.endswith("mean"))
    # torch's running variance is the unbiased one, so that losses in evaluation differ; its means are the same
    np.testing.assert_allclose(mean, theirs.weights["buffers"]["1.running_mean"], rtol=0, atol=1e-5)
    assert "parameters" in ours.weights
    assert not any("mean" in path for path in mine.backend.paths(ours.weights["parameters"]))
