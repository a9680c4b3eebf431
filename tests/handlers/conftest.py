import pytest

from tests.support.driving import ManualClock


@pytest.fixture
def clock():
    return ManualClock()
