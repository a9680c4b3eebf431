"""Imports packages that are needed only by some of what this package does."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from pulsetrain.engine.errors import ConfigurationError

__all__ = ["NOT_FOR_THE_ENGINE", "check_installed", "load_optional", "missing_package"]

# Installed with pulsetrain, but not needed by its engine: module -> what pip installs.
NOT_FOR_THE_ENGINE = {
    "jsonargparse": "'jsonargparse[signatures]'",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
    "yaml": "PyYAML",
}


def load_optional(place: str, module: str, extra: str | None = None) -> ModuleType:
    """Import the module. Python's random state stays as it is, though what the module imports may draw from it.

    Args:
        place: the class or command that needs it, for the message.
        module: such as "torch.utils.tensorboard".
        extra: the extra of this distribution that installs it; None if pulsetrain itself does.

    Raises:
        ConfigurationError: the module is not installed or cannot be imported.

    >>> load_optional("JSONLinesLogger", "json", "all").loads("[1]")
    [1]
    """
    import random  # here, as commands look only for names of packages

    state = random.getstate()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{place}: cannot import {module} ({error}); {_remedy(module, extra)}") from error
    finally:
        random.setstate(state)


def check_installed(place: str, module: str, extra: str | None = None) -> None:
    """Check that the module can be found, without importing it: it is needed later, or by another process.

    Raises:
        ConfigurationError: it is not installed.

    >>> check_installed("JSONLinesLogger", "json")
    """
    if not _is_there(module):
        raise ConfigurationError(f"{place}: needs {module}, which is not installed; {_remedy(module, extra)}")


def missing_package(place: str, error: ModuleNotFoundError) -> ConfigurationError | None:
    """What to report for this error if a package is missing that pulsetrain itself installs, else None.

    Its remedy names all of those that are missing: who left one out has left out the others, too.
    """
    module = (error.name or "").partition(".")[0]
    if module not in NOT_FOR_THE_ENGINE:
        return None
    missing = [package for name, package in NOT_FOR_THE_ENGINE.items() if name == module or not _is_there(name)]
    return ConfigurationError(f"{place}: needs {module}, which is not installed; pip install {' '.join(missing)}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the package that holds the module is missing
        return False


def _remedy(module: str, extra: str | None) -> str:
    package = f"'pulsetrain[{extra}]'" if extra else NOT_FOR_THE_ENGINE[module.partition(".")[0]]
    return f"pip install {package}"
