import pytest
from driving import ManualClock


@pytest.fixture
def clock():
    return ManualClock()
