"""Common to all tests: one thread for torch, in this process and its children."""

import gc
import os
import re
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)

# before torch is imported. Tests run two at a time, and their products are small: threads would wait for each other.
# A test that is about threads sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# no example has to be fast: other processes share the machine
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Without `-m gpu` the tests see no GPU: the others compare what runs on the default device with the CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector: it would look through all that is imported two dozen times, and find nothing.

    What is there afterwards is frozen, or each full collection of a test would look through it, too: 0.7 s each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m 'not slow'` does not even import a file whose tests are all slow: some import packages for seconds."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if ALL_SLOW.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is repeated for JAX is slow: each case compiles. The tests of the backend itself stay in `make test`."""
    for item in items:
        if re.search(r"(?<![a-z])jax(?![a-z])", item.name) and item.path.name != "test_jax_backend.py":
            item.add_marker(pytest.mark.slow)
