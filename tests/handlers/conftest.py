import pytest

from tests.support.engines import ManualClock


@pytest.fixture
def clock():
    return ManualClock()
