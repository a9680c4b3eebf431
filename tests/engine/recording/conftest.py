"""What the tests of replays share."""

import pytest

from tests.support.recordings import Writing


@pytest.fixture
def log(tmp_path):
    return Writing(tmp_path / "events")
