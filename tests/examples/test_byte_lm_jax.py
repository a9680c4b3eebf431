"""The GPT of examples/byte_lm_jax: from the same weights it matches the torch one in every number and update."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from examples.byte_lm.data import ByteWindows, standard_library
from examples.byte_lm.model import ByteGPT as TorchGPT
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, JaxBackend, PretrainStrategy
from pulsetrain.engine.backends import TorchBackend
from pulsetrain.engine.recording import EventLog
from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

from examples.byte_lm_jax.model import ByteGPT  # noqa: E402  # it imports them
from examples.byte_lm_jax.weights import load_torch_weights, torch_weights  # noqa: E402

CONTEXT = 16
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": CONTEXT}


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    """Accelerators multiply float32 matrices with fewer bits, and the limits here are float32's.

    One thread is enough for torch: its threads and JAX's would wait for each other's cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    torch.set_num_threads(threads)


def torch_model(**changes: Any) -> TorchGPT:
    """A torch model whose norms are not the identity, so that one left out would show."""
    torch.manual_seed(0)
    model = TorchGPT(**{**SIZES, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def like(model: TorchGPT, **changes: Any) -> Any:
    """The JAX model with the same weights."""
    copy = ByteGPT(**{**SIZES, **changes})
    load_torch_weights(copy, model.state_dict())
    return copy


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


@nnx.jit  # without jit, each op would be compiled separately: seconds for every new shape
def _forward(model: Any, tokens: Any) -> Any:
    return model(tokens)


def logits(model: Any, tokens: Tensor) -> np.ndarray:
    return np.asarray(_forward(model, tokens.numpy()))


def torch_loss(model: TorchGPT, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def jax_loss(model: Any, windows: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(windows[:, :-1]), windows[:, 1:]).mean()


class TestSameNumbers:
    @pytest.mark.parametrize(
        ("length", "changes"),
        [(1, {}), (CONTEXT, {}), (CONTEXT // 2, {"layers": 3, "width": 48, "heads": 4, "vocabulary": 300})],
    )
    def test_logits_are_equal(self, length: int, changes: dict[str, int]) -> None:
        model, tokens = torch_model(**changes), random_bytes(3, length)
        expected = model(tokens).detach().numpy()
        np.testing.assert_allclose(logits(like(model, **changes), tokens), expected, rtol=0, atol=1e-5)

    def test_the_loss_and_its_gradients_are_equal(self) -> None:
        model, windows = torch_model(), random_bytes(4, CONTEXT + 1)
        copy = like(model)
        expected = torch_loss(model, windows)
        expected.backward()
        loss, gradients = nnx.jit(nnx.value_and_grad(jax_loss))(copy, windows.numpy())
        assert float(loss) == pytest.approx(expected.item(), abs=1e-5)
        nnx.update(copy, gradients)  # in the weights' places, so that they come out by torch's names
        given = torch_weights(copy)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.abs().max() > 1e-4, name
            torch.testing.assert_close(given[name], parameter.grad, rtol=0, atol=1e-5, msg=name)

    def test_no_position_sees_what_follows_it(self) -> None:
        model, tokens = like(torch_model()), random_bytes(1, CONTEXT)
        before = logits(model, tokens)
        for position in range(CONTEXT):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % 256
            after = logits(model, changed)
            np.testing.assert_allclose(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
            assert (np.abs(after - before)[:, position:].max(-1) > 1e-6).all()


class TestFirstWeights:
    def test_the_first_weights_have_torchs_distribution(self) -> None:
        sizes = {"layers": 2, "width": 64, "heads": 4, "context": CONTEXT}
        ours, torchs = torch_weights(ByteGPT(**sizes)), TorchGPT(**sizes).state_dict()
        assert ours.keys() == torchs.keys()
        for name, tensor in torchs.items():
            if tensor.dim() == 1:
                torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)
            else:  # of 4,096 numbers at least, whose deviation is known within 1.1%
                assert ours[name].std() == pytest.approx(tensor.std().item(), rel=0.08), name
                assert abs(ours[name].mean()) < 0.1 * tensor.std(), name

    def test_the_seed_decides_the_first_weights(self) -> None:
        first, again, other = (torch_weights(ByteGPT(**SIZES, seed=seed)) for seed in (1, 1, 2))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["head.weight"], other["head.weight"])
        assert not torch.equal(first["blocks.0.mix.weight"], first["blocks.1.mix.weight"])


class TestDropout:
    def test_dropout_is_active_only_in_training_mode(self) -> None:
        model, tokens = ByteGPT(**SIZES, dropout=0.5), random_bytes(2, CONTEXT)
        assert not np.array_equal(logits(model, tokens), logits(model, tokens))
        model.eval()
        np.testing.assert_array_equal(logits(model, tokens), logits(model, tokens))
        model.train()
        assert not np.array_equal(logits(model, tokens), logits(model, tokens))

    def test_dropout_is_inactive_in_evaluation_as_in_torch(self) -> None:
        model, tokens = torch_model(dropout=0.5).eval(), random_bytes(2, CONTEXT)
        copy = like(model, dropout=0.5)
        copy.eval()
        np.testing.assert_allclose(logits(copy, tokens), model(tokens).detach(), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("seed", [1, 2])
    def test_the_seed_decides_what_is_dropped(self, seed: int) -> None:
        weights, tokens = torch_model(dropout=0.5), random_bytes(2, CONTEXT)
        first, again = (logits(like(weights, dropout=0.5, seed=each), tokens) for each in (1, seed))
        assert np.array_equal(first, again) is (seed == 1)


class TestWeights:
    def test_weights_go_to_jax_and_back_unchanged(self) -> None:
        model = torch_model()
        weights = torch_weights(like(model))
        assert weights.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0)
        TorchGPT(**SIZES).load_state_dict(weights)

    def test_weights_are_copied_in_both_directions(self) -> None:
        model = torch_model()
        copy = like(model)
        before = torch_weights(copy)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for tensor in torch_weights(copy).values():
            tensor.zero_()
        for name, tensor in torch_weights(copy).items():
            assert torch.equal(tensor, before[name]), name

    def test_half_precision_weights_are_converted(self) -> None:
        model = torch_model().bfloat16()
        weights = torch_weights(like(model))
        assert torch.equal(weights["head.weight"], model.head.weight.float())

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"layers": 1}, r"lacks \[\], and the model has no \['blocks\.1\.attention_norm\.bias', "),
            ({"layers": 3}, r"lacks \['blocks\.2\.attention_norm\.bias', .*\], and the model has no \[\]; "),
            ({"width": 64}, r"\['[a-z0-9_.]+'\] of shape \(.*32.*\)\): the model's is \(.*64.*\); "),
            ({"vocabulary": 300}, r"\['[a-z0-9_.]+'\] of shape \(256, 32\)\): the model's is \(300, 32\); "),
        ],
    )
    def test_weights_of_other_sizes_are_refused_before_any_is_copied(self, sizes: dict[str, int], message: str) -> None:
        model = ByteGPT(**{**SIZES, **sizes})
        before = torch_weights(model)
        with pytest.raises(ValueError, match=message):
            load_torch_weights(model, torch_model().state_dict())
        for name, tensor in torch_weights(model).items():
            assert torch.equal(tensor, before[name]), name


class TestGenerate:
    def test_it_generates_what_torch_generates(self) -> None:
        model = torch_model()
        text = model.generate(b"def", 3 * CONTEXT, temperature=0.0)
        assert like(model).generate(b"def", 3 * CONTEXT, temperature=0.0) == text

    def test_it_generates_any_number_of_bytes_even_beyond_the_context(self) -> None:
        model = ByteGPT(**SIZES)
        assert [len(model.generate(b"x", length)) for length in (0, 1, 2 * CONTEXT)] == [0, 1, 2 * CONTEXT]
        assert len(model.generate(b"x" * 3 * CONTEXT, 1)) == 1

    def test_the_seed_decides_the_sample(self) -> None:
        model = ByteGPT(**SIZES)
        first, again, other = (model.generate(b"x", 20, seed=seed) for seed in (1, 1, 2))
        assert first == again != other
        assert len(set(first)) > 5

    def test_it_disables_dropout_and_restores_the_mode(self) -> None:
        model, tokens = torch_model(dropout=0.5), random_bytes(2, CONTEXT)
        copy = like(model, dropout=0.5)
        text = model.generate(b"def", CONTEXT, temperature=0.0)
        assert copy.generate(b"def", CONTEXT, temperature=0.0) == text
        assert not np.array_equal(logits(copy, tokens), logits(copy, tokens))

    def test_it_draws_bytes_from_other_vocabularies(self) -> None:
        sizes = {"layers": 1, "width": 8, "heads": 1, "context": 4}
        assert len(ByteGPT(**sizes, vocabulary=300).generate(b"x", 50)) == 50
        assert max(ByteGPT(**sizes, vocabulary=128).generate(b"x", 50)) < 128

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"prompt": b"", "length": 1}, "at least 1 byte to continue"),
            ({"prompt": b"x", "length": -1}, "length=-1.*must not be negative"),
            ({"prompt": b"x", "length": 1, "temperature": -0.5}, "temperature=-0.5"),
            ({"prompt": b"x", "length": 1, "temperature": math.nan}, "temperature=nan"),
            ({"prompt": b"\xff", "length": 1}, "bytes past the vocabulary of 255"),
        ],
    )
    def test_bad_arguments_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ByteGPT(**SIZES, vocabulary=255).generate(**arguments)


class TestErrors:
    @pytest.mark.parametrize(
        "sizes",
        [
            {"layers": 0},
            {"width": -8},
            {"context": 0},
            {"heads": 0},
            {"vocabulary": 0},
            {"width": 63, "heads": 4},
            {"width": 12, "heads": 4},
            {"dropout": 1.0},
            {"dropout": math.nan},
        ],
    )
    def test_sizes_that_do_not_fit_are_refused_as_in_torch(self, sizes: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"ByteGPT\(") as torchs:
            TorchGPT(**sizes)
        with pytest.raises(ValueError, match=r"ByteGPT\(") as ours:
            ByteGPT(**sizes)
        assert str(ours.value) == str(torchs.value)

    @pytest.mark.parametrize("shape", [(CONTEXT,), (1, CONTEXT + 1), (1, 1, 1)])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_tokens_of_another_shape_are_refused(self, shape: tuple[int, ...], compiled: bool) -> None:
        model = ByteGPT(**SIZES)
        forward = nnx.jit(lambda tokens: model(tokens)) if compiled else model
        with pytest.raises(ValueError, match=rf"tokens of shape .*needs \(batch, length\), length at most {CONTEXT}"):
            forward(random_bytes(*shape).numpy())


def test_the_script_trains_records_saves_and_writes_a_sample(tmp_path: Path) -> None:
    script = ("-m", "examples.byte_lm_jax.train", "--iterations", 6, "--run-dir", tmp_path / "run")
    output = "\n".join(run(EXAMPLES.parent, *script).output)  # from the folder that its first lines name
    found = re.search(r"^validation: (\d\.\d{3}) bits per byte$", output, re.MULTILINE)
    assert found is not None, output
    assert float(found[1]) < 7.5  # 8 are those of a model that knows nothing
    assert len(output[found.end() :]) > 100, "no sample"
    assert [place.name for place in (tmp_path / "run" / "checkpoints").iterdir()] == ["000000006-checkpoint"]
    log = EventLog(tmp_path / "run").read(event="iteration_completed")
    completed = [event for event in log if event.engine == "trainer"]
    assert [event.iteration for event in completed] == [1, 2, 3, 4, 5, 6]
    assert completed[-1].output["loss"] < completed[0].output["loss"]


# ------------------------------------------------------------------------------------------- curves of training
# A run trains a fresh model from the given weights (a torch state dict) on the given batches, AdamW with
# LEARNING_RATE and WEIGHT_DECAY, and returns the loss of each batch. Whatever trains is one more entry of RUNS.

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
CURVE_SIZES = {"layers": 2, "width": 64, "heads": 4, "context": 64}
Weights = Mapping[str, Tensor]
Run = Callable[[Weights, list[Tensor]], list[float]]


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    """100 batches of 8 windows of 65 bytes."""
    windows = ByteWindows(standard_library()[0], context=CURVE_SIZES["context"])
    loader = DataLoader(windows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0))
    return [batch for batch, _ in zip(loader, range(100), strict=False)]


@pytest.fixture(scope="module")
def first_weights() -> Weights:
    torch.manual_seed(0)
    return TorchGPT(**CURVE_SIZES).state_dict()


@pytest.fixture(scope="module")
def torch_curve(first_weights: Weights, batches: list[Tensor]) -> list[float]:
    return torch_loop(first_weights, batches)


def torch_loop(weights: Weights, batches: list[Tensor]) -> list[float]:
    model = TorchGPT(**CURVE_SIZES)
    model.load_state_dict(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses = []
    for windows in batches:
        optimizer.zero_grad()
        loss = torch_loss(model, windows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def jax_loop(weights: Weights, batches: list[Tensor]) -> list[float]:
    model = ByteGPT(**CURVE_SIZES)
    load_torch_weights(model, weights)
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda parameters, windows: jax_loss(nnx.merge(graph, parameters, rest), windows))
    )
    update, apply = jax.jit(optimizer.update), jax.jit(optax.apply_updates)
    state, losses = optimizer.init(parameters), []
    for windows in batches:
        loss, gradients = value_and_grad(parameters, windows.numpy())
        updates, state = update(gradients, state, parameters)
        parameters = apply(parameters, updates)
        losses.append(float(loss))
    return losses


def trainer_on_torch(weights: Weights, batches: list[Tensor]) -> list[float]:
    model = TorchGPT(**CURVE_SIZES)
    model.load_state_dict(weights)
    return trained(model, TorchBackend(), batches)


def trainer_on_jax(weights: Weights, batches: list[Tensor]) -> list[float]:
    model = ByteGPT(**CURVE_SIZES)
    load_torch_weights(model, weights)
    return trained(model, JaxBackend(), batches)


def trained(model: Any, backend: Any, batches: list[Tensor]) -> list[float]:
    config = TrainingConfig(
        max_iterations=len(batches),
        optimizer="adamw",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        device="cpu",
        validate_every=None,
    )
    trainer = Trainer(model, batches, strategy=PretrainStrategy(unit="byte"), backend=backend, config=config)
    losses: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output["loss"]))
    trainer.train()
    return [float(loss) for loss in losses]


RUNS: dict[str, Run] = {
    "a plain JAX loop": jax_loop,
    "the Trainer on torch": trainer_on_torch,
    "the Trainer on JAX": trainer_on_jax,
}


@pytest.mark.parametrize("curve_of", RUNS.values(), ids=RUNS.keys())
def test_a_run_has_the_losses_of_a_plain_torch_loop(
    curve_of: Run, first_weights: Weights, batches: list[Tensor], torch_curve: list[float]
) -> None:
    curve = curve_of(first_weights, batches)
    assert len(curve) == len(torch_curve) == 100
    assert torch_curve[-1] < torch_curve[0] - 1.5, "it learns, so that equal losses say something about the updates"
    np.testing.assert_allclose(curve, torch_curve, rtol=0, atol=1e-4)
