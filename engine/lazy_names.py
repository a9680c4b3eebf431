"""Public names of a package that are imported when they are first used, so that importing the package costs nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

__all__ = ["lazy_names", "no_garbage_collection"]


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__all__`, `__getattr__` and `__dir__` of a package.

    The package says the same to type checkers with imports under TYPE_CHECKING; tests/test_imports.py compares the two.

    Args:
        package: its name, as in `__name__`.
        modules: the public names that each module defines.

    >>> names, find, _ = lazy_names("doctest", {"math": ("sqrt", "pi")})
    >>> names, find("sqrt")(16)
    (['pi', 'sqrt'], 4.0)
    >>> find("cbrt")
    Traceback (most recent call last):
    AttributeError: module 'doctest' has no attribute 'cbrt'
    """
    module_of = {name: module for module, names in modules.items() for name in names}
    exported = sorted(module_of)

    def find(name: str) -> Any:
        module = module_of.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with no_garbage_collection():
            value = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exported})

    return exported, find, listed


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Make objects that stay, without searching them for garbage, which takes 6% of the time of importing torch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
