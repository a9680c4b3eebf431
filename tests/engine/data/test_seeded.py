"""Random numbers that are drawn aside: `seeded` and `Draws` leave every generator of the process as it was."""

import random
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from pulsetrain.engine.data.numpy_stream import NumpyStream, current, use
from pulsetrain.engine.data.rng import Draws, capture, restore, seed_everything, seeded


def drawn() -> list[float]:
    """Numbers of every generator, an odd count of those that are made in pairs."""
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), np.random.rand(), torch.rand(()).item()]


def drawn_aside(seed: int) -> list[float]:
    """The same, as any seeding of the three generators gives them."""
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    torch.default_generator.manual_seed(seed)
    return drawn()


@pytest.mark.parametrize("before", [0, 1, 2])  # normal numbers: numpy keeps the second of a pair
@pytest.mark.parametrize("depth", [1, 3])
def test_seeded_draws_the_same_as_ever_and_the_generators_continue(before: int, depth: int):
    seed = 2**61 + 12345
    expected = drawn_aside(seed)
    seed_everything(5)
    np.random.randn(before)
    uninterrupted = drawn() + drawn()
    seed_everything(5)
    np.random.randn(before)
    found = drawn()
    with ExitStack() as stack:
        for number in range(depth):
            stack.enter_context(seeded(seed + depth - 1 - number))
        assert drawn() == expected
    assert found + drawn() == uninterrupted


def test_a_failure_inside_leaves_the_generators_as_they_were():
    seed_everything(5)
    expected = [drawn(), drawn()]
    seed_everything(5)
    found = [drawn()]
    for _ in range(2):
        with pytest.raises(IndexError), seeded(7):
            drawn()[99]
    assert [*found, drawn()] == expected


def test_a_stream_continues_where_it_was_left_also_between_the_numbers_of_a_pair():
    expected = drawn_aside(9) + drawn() + drawn()
    seed_everything(5)
    outside = [drawn(), drawn(), drawn()]
    seed_everything(5)
    found, between, draws = [], [], Draws(seed=9)
    for _ in range(3):
        between.append(drawn())
        with draws:
            found += drawn()
    assert (found, between) == (expected, outside)


def test_another_global_generator_of_numpy_is_left_in_its_place():
    before = current()
    use(NumpyStream(np.random.Philox(3)))
    try:
        expected = np.random.Generator(np.random.Philox(3)).random(2).tolist()
        found = [np.random.random_sample()]
        with seeded(7):
            np.random.rand()
        assert [*found, np.random.random_sample()] == pytest.approx(expected)
    finally:
        use(before)


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_source_may_draw_late_and_each_of_its_items_is_made_inside_the_stream(name: str):
    draw = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item()}[name]

    def items(draws_from: int):
        for number in range(40):
            yield draw() if number >= draws_from else 0.0

    def taken(draws_from: int) -> tuple[list[float], float]:
        seed_everything(1)
        found = list(Draws(seed=2).around(items(draws_from)))
        return found, draw()

    seed_everything(1)
    outer = draw()
    seed_everything(1)
    for first in (1, 4, 30):
        inside, after = taken(first)
        assert after == outer
        assert len(set(inside[first:])) == 40 - first


def test_a_capture_after_drawing_aside_is_of_the_generators_in_place():
    seed_everything(3)
    np.random.randn(1)
    saved = capture()
    with seeded(4):
        drawn()
    assert capture()["numpy"]["has_gauss"] == saved["numpy"]["has_gauss"] == 1
    expected = drawn()
    restore(saved)
    assert drawn() == expected
