"""Random numbers: the same after a seed, after a restore, and in another process."""

import io
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from pulsetrain.engine.data.rng import (
    capture,
    current_seed,
    derive,
    missing_devices,
    preserve_rng,
    restore,
    seed_everything,
)
from pulsetrain.engine.errors import CheckpointError, ConfigurationError


@pytest.fixture(autouse=True)
def leave_no_trace():
    before = capture()
    yield
    restore(before)


def draw():
    """Numbers from each generator; an odd count of normals leaves a cached one in python and numpy."""
    numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]
    if torch.cuda.is_initialized():
        numbers += torch.randn(3, device="cuda").tolist()
    return numbers


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
def test_the_same_seed_gives_the_same_numbers(seed):
    seed_everything(seed)
    first = draw()
    seed_everything(seed)
    assert draw() == first


def test_other_seeds_give_other_numbers_from_every_generator():
    drawn = []
    for seed in (0, 1, 2**32, 2**32 + 1, 2**33):
        seed_everything(seed)
        drawn.append(draw())
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn)


def test_a_small_seed_is_the_one_that_each_library_would_take():
    seed_everything(7)
    drawn = (random.random(), np.random.rand(), torch.rand(()).item())
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, True, None, "0"])
def test_what_is_not_a_seed_is_refused(seed):
    with pytest.raises(ConfigurationError, match=r"seed_everything\(seed=.*\): needs a whole number"):
        seed_everything(seed)


@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_restore_continues_where_capture_was_even_with_cached_normals(drawn_before):
    seed_everything(3)
    for _ in range(drawn_before):
        draw()
    state = capture()
    first = [draw(), draw()]
    restore(state)
    assert [draw(), draw()] == first
    restore(state)
    assert [draw(), draw()] == first


def test_a_captured_state_loads_without_pickle():
    seed_everything(3)
    draw()
    buffer = io.BytesIO()
    torch.save(capture(), buffer)
    first = draw()
    buffer.seek(0)
    restore(torch.load(buffer, weights_only=True))
    assert draw() == first


def test_capturing_draws_nothing_and_later_draws_do_not_reach_into_the_state():
    seed_everything(3)
    without = draw()
    seed_everything(3)
    state = capture()
    kept = {name: state[name]["state"].clone() for name in ("python", "numpy")}
    assert draw() == without
    for name, tensor in kept.items():
        assert torch.equal(state[name]["state"], tensor)


def test_a_state_that_lacks_a_generator_is_refused_and_changes_nothing():
    state = capture()
    del state["numpy"]
    before = capture()
    with pytest.raises(CheckpointError, match=r"restore\(state\): lacks numpy; holds python, torch, cuda"):
        restore(state)
    assert torch.equal(capture()["torch"], before["torch"])


class Devices:
    """Replaces torch.cuda, torch.xpu or torch.mps, with the given number of generators."""

    def __init__(self, *states):
        self.states = list(states)

    def is_initialized(self):
        return bool(self.states)

    is_available = is_initialized

    def device_count(self):
        return len(self.states)

    def get_rng_state_all(self):
        return list(self.states)

    def get_rng_state(self):
        return self.states[0]

    def set_rng_state(self, state, device=0):
        self.states[device] = state


def put(monkeypatch, **kinds):
    for kind, devices in kinds.items():
        monkeypatch.setattr(torch, kind, devices)
        if kind == "mps":
            monkeypatch.setattr(torch.backends, kind, devices)


def test_the_generators_of_every_kind_of_device_are_captured_and_restored(monkeypatch):
    devices = {kind: Devices(torch.tensor([number])) for number, kind in enumerate(("cuda", "xpu", "mps"))}
    put(monkeypatch, **devices)
    state = capture()
    for kind in devices:
        devices[kind].states[0] = torch.tensor([9])
    restore(state)
    assert {kind: each.states[0].item() for kind, each in devices.items()} == {"cuda": 0, "xpu": 1, "mps": 2}


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_generators_of_devices_that_are_not_seen_are_named_and_left_out(kind, monkeypatch):
    put(monkeypatch, cuda=Devices(), xpu=Devices(), mps=Devices())
    seen = Devices() if kind == "mps" else Devices(torch.tensor([7]))
    saved = [torch.tensor([1])] * (seen.device_count() + 1)
    put(monkeypatch, **{kind: seen})
    state = {**capture(), kind: saved}
    first = random.random(), np.random.rand(), torch.rand(())
    assert missing_devices(state) == [f"{kind}: {len(saved)} -> {seen.device_count()}"]
    restore(state)
    assert (random.random(), np.random.rand(), torch.rand(())) == first
    assert [each.item() for each in seen.states] == [1] * seen.device_count()


def test_no_device_is_missing_where_as_many_are_seen_or_an_older_state_knows_of_fewer_kinds(monkeypatch):
    put(monkeypatch, cuda=Devices(torch.tensor([1]), torch.tensor([2])), xpu=Devices(), mps=Devices())
    state = capture()
    assert missing_devices(state) == []
    del state["xpu"], state["mps"]
    assert missing_devices(state) == []
    restore(state)


def test_another_global_generator_of_numpy_is_refused():
    default = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        with pytest.raises(ConfigurationError, match=r"capture\(numpy='PCG64'\)"):
            capture()
    finally:
        np.random.set_bit_generator(default)


# -------------------------------------------------------------------------------------------------- derive


def test_a_derived_seed_never_changes():
    # checkpoints and data orders depend on it: a change here breaks every resume of an older run
    assert derive(0) == 4246866556266386882
    assert derive(0, 1) == 2024819301478721300
    assert derive(2**63 - 1, -1, 12345678901234567890) == 6293696156896048582


@pytest.mark.slow
def test_a_derived_seed_is_the_same_in_another_process():
    code = "from pulsetrain.engine.data.rng import derive; print(derive(1, 2, 3), hash('a'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    seed, of_a_text = map(int, done.stdout.split())
    assert of_a_text != hash("a")  # other hashes, the same seed
    assert seed == derive(1, 2, 3)


def test_derived_seeds_have_63_bits_and_do_not_collide_over_neighbours():
    seeds = {derive(seed, epoch, batch) for seed in range(10) for epoch in range(10) for batch in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_parts_of_a_seed_are_delimited():
    assert len({derive(1, 23), derive(12, 3), derive(123), derive(1, 2, 3), derive(3, 2, 1), derive(0, 123)}) == 6


def test_numpys_whole_numbers_derive_the_same_and_fractions_are_refused():
    assert derive(np.int64(5), np.int32(6)) == derive(5, 6)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        derive(1.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_restore_continues_where_every_cuda_generator_was():
    seed_everything(3)
    torch.randn(3, device="cuda")
    state = capture()
    first = torch.randn(3, device="cuda")
    restore(state)
    assert torch.equal(torch.randn(3, device="cuda"), first)


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**62])
def test_the_current_seed_is_the_one_that_was_last_asked_for(seed):
    for seed_by in (seed_everything, torch.manual_seed):
        seed_by(seed)
        torch.rand(3)
        with preserve_rng():
            seed_everything(2**40)
        assert current_seed() == seed


@pytest.mark.parametrize("seed", [-1, 2**63 + 5, 2**64 - 1])
def test_every_seed_of_torchs_can_be_that_of_a_run(seed):
    torch.manual_seed(seed)
    seed_everything(found := current_seed())
    assert current_seed() == found
