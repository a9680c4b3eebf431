"""The programs of examples/ported against the same programs written by hand, or with Lightning: result and length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from torch import nn

import pulsetrain
from examples.byte_lm.model import ByteGPT
from examples.ported import data, models
from pulsetrain.engine.data.keyed_loader import KeyedLoader
from pulsetrain.engine.data.rng import derive, preserve_rng, seeded
from tests.examples.originals import actor_critic
from tests.support.programs_examples import EXAMPLES, lines_of_code

ORIGINALS = Path(__file__).parent / "originals"
NAMES = sorted(path.stem for path in ORIGINALS.glob("*.py"))
SEED = 0  # of every program


class InOurOrder:
    """The batches of a loader as a Trainer reads them; reading them draws no random numbers.

    A pass begins with its first batch: Lightning makes iterators that it does not use.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._length, self._passes = KeyedLoader(loader, SEED), len(loader), 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        with preserve_rng():
            batches = list(self._loader.begin(self._passes))
        yield from batches


class SeededCartPole(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Begins each episode as EnvironmentRollouts does in its environment of this number."""

    def __init__(self, number: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._number, self._episodes = number, 0

    def reset(self, **options: Any) -> Any:
        seed = derive(SEED, self._number, self._episodes) % 2**31
        self._episodes += 1
        return super().reset(seed=seed, **options)


class SeededActors(actor_critic.Actors):
    """Draws the actions of each rollout as EnvironmentRollouts does."""

    rollouts = 0

    def collect(self, *arguments: Any) -> Any:
        self.rollouts += 1
        with seeded(derive(SEED, 1, self.rollouts - 1)):
            return super().collect(*arguments)


def make_gan() -> dict[str, nn.Module]:
    return {"generator": models.generator(), "discriminator": models.discriminator()}


TOLERANCE = {  # all others agree bit for bit
    "actor_critic": 1e-6,  # its mean is over the steps in another order
    "gpt": 1e-6,  # it adds up the gradients before it divides them
}

# the model, its data, and a shorter run than the program's own
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, int]]] = {
    "actor_critic": (models.ActorCritic, lambda: "CartPole-v1", {"rollouts": 30}),
    "digits": (models.Classifier, data.digits, {"epochs": 3}),
    "gan": (make_gan, data.real_images, {"epochs": 4}),
    "gpt": (lambda: ByteGPT(layers=2, width=64, context=64), data.text, {"updates": 30, "evaluate_every": 10}),
    "hugging_face_lm": (models.llama, data.text, {"epochs": 2}),
    "lightning_autoencoder": (models.Autoencoder, data.images, {"epochs": 3}),
    "vae": (models.VariationalAutoencoder, data.images, {"epochs": 3}),
    "word_lm": (lambda: models.WordModel(data.WORDS), data.words, {"epochs": 3}),
}


def shared(found: Any) -> Any:
    """The same data, in the same order and without draws, for the original."""
    if isinstance(found, tuple):
        return tuple(map(InOurOrder, found))
    if isinstance(found, str):
        return iter(map(SeededCartPole, range(8))).__next__
    return InOurOrder(found)


def run_ours(name: str, folder: Path, seed: int = SEED) -> Any:
    """The model after the program; the seed is that of its first weights."""
    make_model, make_data, length = PROGRAMS[name]
    torch.manual_seed(seed)
    model = make_model()
    import_module(f"examples.ported.{name}").train(model, make_data(), str(folder), **length)
    return model


def run_original(name: str, folder: Path, seed: int = SEED) -> Any:
    """The same for the original, with the same random numbers."""
    make_model, make_data, length = PROGRAMS[name]
    torch.manual_seed(seed)
    model = make_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_critic, "Actors", SeededActors)
        import_module(f"tests.examples.originals.{name}").train(model, shared(make_data()), str(folder), **length)
    return model


def weights(model: nn.Module | dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    whole = nn.ModuleDict(model) if isinstance(model, dict) else model
    return {name: value.detach() for name, value in whole.state_dict().items()}


def difference(model: Any, other: Any) -> float:
    """The largest difference between two weights."""
    mine, others = weights(model), weights(other)
    assert mine.keys() == others.keys()
    return max(float((mine[name] - others[name]).abs().max()) for name in mine)


def best_difference(name: str, ours: Path, theirs: Path) -> float:
    """The same for the weights that each has kept as the best; 0 for a program that has no measure of them."""
    make_model = PROGRAMS[name][0]
    if name == "gan":
        return 0.0
    if name == "hugging_face_lm":
        model = make_model()
        found = [type(model).from_pretrained(each) for each in (ours / "pretrained" / "best", theirs / "best")]
        return difference(*found)
    best = make_model()
    if name == "lightning_autoencoder":
        saved = torch.load(theirs / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
        best.load_state_dict({key.removeprefix("model."): value for key, value in saved.items()})
    else:
        best.load_state_dict(torch.load(theirs / "best.pt"))
    return difference(pulsetrain.load(ours / "best", make_model()), best)


def test_every_program_has_an_original_and_the_other_way_round() -> None:
    programs = {path.stem for path in (EXAMPLES / "ported").glob("*.py")} - {"__init__", "data", "models"}
    assert programs == set(NAMES) == set(PROGRAMS)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_has_at_most_half_of_the_lines_of_its_original(name: str) -> None:
    ours, theirs = lines_of_code(EXAMPLES / "ported" / f"{name}.py"), lines_of_code(ORIGINALS / f"{name}.py")
    print(f"{name}: {ours} lines, original {theirs}")
    assert 2 * ours <= theirs


@pytest.mark.parametrize("name", NAMES)
def test_both_take_models_and_data_from_the_same_modules(name: str) -> None:
    """Neither defines for itself what the other imports."""

    def imported(folder: Path) -> set[str]:
        lines = (folder / f"{name}.py").read_text().splitlines()
        return {line.split()[1] for line in lines if line.startswith("from examples.")}

    assert imported(EXAMPLES / "ported") == imported(ORIGINALS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*LeafSpec.*:FutureWarning")  # Lightning
@pytest.mark.parametrize("name", NAMES)
def test_both_end_with_the_same_weights_and_the_same_best_ones(name: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    model, original = run_ours(name, ours), run_original(name, theirs)
    print(f"{name}: {difference(model, original):.3g} apart, best {best_difference(name, ours, theirs):.3g}")
    assert difference(model, original) <= TOLERANCE.get(name, 0.0)
    assert best_difference(name, ours, theirs) <= TOLERANCE.get(name, 0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*LeafSpec.*:FutureWarning")  # Lightning
@pytest.mark.parametrize("name", NAMES)
def test_both_resume(name: str, tmp_path: Path) -> None:
    """A second run, from other weights, continues after the last checkpoint, where nothing is left to train."""
    for run in (run_ours, run_original):
        folder = tmp_path / run.__name__
        assert difference(run(name, folder), run(name, folder, seed=1)) == 0.0


@pytest.mark.slow
def test_the_gan_learns_and_draws(tmp_path: Path) -> None:
    found = make_gan()
    import_module("examples.ported.gan").train(found, data.real_images(), str(tmp_path), epochs=12)
    with torch.no_grad():
        fake, (real,) = found["generator"](torch.randn(512, models.NOISE)), next(iter(data.real_images()))
        loss = models.discriminator_loss(found["discriminator"](fake), found["discriminator"](real))
    assert loss < 2 * math.log(2)  # that of a discriminator that only guesses
    assert (fake.mean(0) - real.mean(0)).abs().mean() < real.mean(0).abs().mean()  # that of images in plain grey
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")
