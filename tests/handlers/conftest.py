import pytest

from pulsetrain.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock()
