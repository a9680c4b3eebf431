"""What `functools.lru_cache` keeps is state that no checkpoint holds: a cache that fills is named, wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pulsetrain.engine import SupervisedStrategy
from tests.support.cases import Make
from tests.support.models import regression_model
from tests.support.runs import cut_after
from tests.support.runs_hidden_state import (
    BATCH,
    CUT,
    CasesOfHiddenState,
    check_that_what_has_changed_is_resumed_or_named,
    run,
    warned,
)
from tests.support.stateful_parts import Rows

CASES = CasesOfHiddenState()
case = CASES.case


def noisy(rows: Rows, row: int) -> Any:
    inputs, targets = rows.pairs[row]
    return inputs + torch.randn(4), targets


class CachedRows(Rows):
    @cache  # noqa: B019
    def __getitem__(self, row: int) -> Any:
        return noisy(self, row)


class RowsWithACachedLoader(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.load = cache(self._load)

    def _load(self, row: int) -> Any:
        return noisy(self, row)

    def __getitem__(self, row: int) -> Any:
        return self.load(row)


class Indirect(Rows):
    """Has caches in each kind of method; the run reaches them through the attribute of a dataset."""

    @classmethod
    @cache
    def of_class(cls, key: object) -> Tensor:
        return torch.randn(4)

    @staticmethod
    @cache
    def static(key: object) -> Tensor:
        return torch.randn(4)

    @property
    @cache  # noqa: B019
    def shift(self) -> Tensor:
        return torch.randn(4)

    def __getitem__(self, row: int) -> Any:
        inputs, targets = self.pairs[row]
        return inputs + self.of_class(self) + self.static(self) + self.shift, targets


class Projecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = regression_model()

    @cache  # noqa: B019
    def _projection(self, width: int) -> Tensor:
        return torch.randn(width)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs * self._projection(inputs.shape[1]))
        return outputs


def of_rows(rows: Rows, **options: Any) -> dict[str, Any]:
    return {"train_loader": DataLoader(rows, BATCH, shuffle=True, **options)}


@case("dataset.__getitem__ (lru_cache)")
def a_dataset_caches_its_rows() -> dict[str, Any]:
    return of_rows(CachedRows())


@case("dataset.__getitem__ (lru_cache)", slow=True)
def a_dataset_caches_its_rows_in_workers() -> dict[str, Any]:
    return of_rows(CachedRows(), num_workers=1, persistent_workers=True)


@case("dataset.load")
def a_dataset_holds_a_cached_method() -> dict[str, Any]:
    return of_rows(RowsWithACachedLoader())


@case("dataset.of_class (lru_cache)", "dataset.static (lru_cache)", "dataset.shift (lru_cache)")
def a_dataset_caches_in_methods_of_each_kind() -> dict[str, Any]:
    return of_rows(Indirect())


@case("model._projection (lru_cache)")
def a_model_draws_a_projection_when_it_is_first_needed() -> dict[str, Any]:
    return {"model": Projecting()}


@case("strategy._loss")
def a_loss_has_a_cached_function_in_its_closure() -> dict[str, Any]:
    @cache
    def weights(rows: int) -> Tensor:
        return torch.rand(rows, 1)

    return {"strategy": SupervisedStrategy(lambda outputs, targets: ((outputs - targets) ** 2 * weights(BATCH)).mean())}


@cache
def rate_of(number: int, run: object) -> float:
    return 0.05 * float(torch.rand(()))


class SettingRates:
    def __call__(self, engine: Any) -> None:
        engine.optimizer.param_groups[0]["lr"] = rate_of(engine.state.epoch, engine)


@case("handler SettingRates: rate_of")
def a_handler_calls_a_cached_function_of_its_module() -> dict[str, Any]:
    return {"always": SettingRates()}


@pytest.mark.parametrize(("make", "lacks"), CASES)
def test_a_cache_that_fills_is_named(make: Make, lacks: tuple[str, ...], tmp_path: Path):
    check_that_what_has_changed_is_resumed_or_named(make, lacks, tmp_path)


class Asking(Rows):
    """Asks a cached function for each row."""

    def __init__(self, ask: Callable[[object], object]) -> None:
        super().__init__()
        self.ask = ask

    def __getitem__(self, row: int) -> Any:
        self.ask(row)
        return self.pairs[row]


def full() -> Callable[[object], object]:
    """It holds all rows before the run begins."""
    ask = cache(str)
    for row in range(100):
        ask(row)
    return ask


def of_a_library() -> Callable[[object], object]:
    from fnmatch import _compile_pattern  # type: ignore[attr-defined]  # which the standard library caches

    return lambda row: _compile_pattern(f"{row}")


def refuse(row: object) -> object:
    raise ValueError("a row")


def without_an_entry() -> Callable[[object], object]:
    ask = cache(refuse)

    def ask_in_vain(row: object) -> None:
        with pytest.raises(ValueError, match="a row"):
            ask(row)

    return ask_in_vain


@pytest.mark.parametrize("make", [full, of_a_library, lambda: lru_cache(0)(str), without_an_entry])
def test_a_cache_that_does_not_fill_is_not_named(make: Callable[[], Callable[[object], object]], tmp_path: Path):
    with capture_logs() as logs:
        cut_after(run(tmp_path, lambda: of_rows(Asking(make()))), CUT)
    assert warned(logs, "are in no checkpoint") == []
