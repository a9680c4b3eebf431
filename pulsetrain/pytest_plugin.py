"""Fixtures for tests of training code; pytest loads them where Pulsetrain is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader

    from pulsetrain.testing import ManualClock

__all__ = ["manual_clock", "tiny_loader", "tiny_model"]

# torch is imported by the tests that use a fixture, and not when pytest starts


@pytest.fixture
def tiny_model() -> nn.Module:
    """A new `pulsetrain.testing.tiny_model()`."""
    from pulsetrain import testing

    return testing.tiny_model()


@pytest.fixture
def tiny_loader() -> DataLoader[Any]:
    """A new `pulsetrain.testing.tiny_loader()`."""
    from pulsetrain import testing

    return testing.tiny_loader()


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock that the test sets."""
    from pulsetrain import testing

    return testing.ManualClock()
