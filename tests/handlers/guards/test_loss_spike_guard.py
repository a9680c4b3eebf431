"""LossSpikeGuard without an engine: many losses at once."""

from __future__ import annotations

import numpy as np
import pytest

from pulsetrain.handlers import LossSpikeGuard


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.filterwarnings("ignore:invalid value")
def test_many_losses_at_once_are_judged_as_one_by_one(seed: int):
    random = np.random.default_rng(seed)
    count, window, patience = (int(random.integers(*limits)) for limits in ((1, 3000), (8, 130), (1, 12)))
    threshold = float(random.choice([1, 3, 10]))
    losses = np.exp(-np.arange(count) / 1000) + random.normal(0, 0.1, count) * random.choice([0, 0.01, 1])
    losses[random.integers(0, count, random.integers(0, 20))] *= random.choice([10, 100, np.nan, np.inf])
    if seed % 3 == 0:
        losses[count // 2 :] += 5  # another level
    single, batched = (LossSpikeGuard(threshold, window, patience=patience) for _ in range(2))
    expected = [single.step(float(loss)) for loss in losses]
    half = int(random.integers(0, count))
    found = [*batched.steps(losses[:half]), *batched.steps(losses[half:])]
    assert found == expected
    assert repr(batched.state_dict()) == repr(single.state_dict())


def test_few_windows_are_sorted_in_vain_where_many_losses_are_spikes(monkeypatch: pytest.MonkeyPatch):
    losses = 1 + np.random.default_rng(0).laplace(scale=0.1, size=20_000)
    guard, judged = LossSpikeGuard(2.0), list[int]()
    real = guard._pass

    def counting(part: np.ndarray) -> int:
        judged.append(len(part))
        return real(part)

    monkeypatch.setattr(guard, "_pass", counting)
    assert guard.steps(losses).mean() > 0.05
    assert sum(judged) < len(losses)
