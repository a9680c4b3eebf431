"""Class paths: finding the class or function that a configuration names, beside the configuration file first."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import extract_tb

from pulsetrain.configuration.messages import unknown
from pulsetrain.configuration.names_0_1 import current_module, current_path
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.familiar_names import no_strategy

__all__ = ["Factory", "distribution", "find", "look_in", "outdated_import"]

Factory = Callable[..., object]  # a class or function that a class path names
_DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python", "skimage": "scikit-image", "sklearn": "scikit-learn"}


def find(path: object, location: str, shipped: Mapping[str, Factory]) -> Factory:
    """Import the class or function of this path.

    Args:
        path: a class path, or what it would name.
        location: of the path in the configuration, for messages.
        shipped: names that need no path.

    Raises:
        ConfigurationError: nothing has this name.
    """
    if callable(path):
        return path
    named = f"{location}: class_path={path!r}"
    module_name, _, name = current_path(str(path)).rpartition(".")
    if not module_name:
        if name in shipped:
            return shipped[name]
        if location == "strategy" and (rule := no_strategy(name, in_file=True)):
            raise ConfigurationError(f"{named}: {rule}")
        if shipped:
            raise unknown(named, "name", name, shipped)
        raise ConfigurationError(f"{named}: needs a path with a module, such as model.{name or 'Model'}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise _not_imported(named, module_name, error) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise unknown(named, f"name in {module_name}", name, _callables(module))
    return found  # type: ignore[no-any-return]


def _not_imported(named: str, module: str, error: Exception) -> ConfigurationError:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return ConfigurationError(
            f"{named}: there is no module {error.name!r}; "
            "it is looked for beside the configuration file, then among the installed packages"
        )
    failed = f"{named}: importing {module} failed: "
    if outdated := outdated_import(error):
        return ConfigurationError(f"{failed}{outdated}")
    if isinstance(error, ModuleNotFoundError):
        return ConfigurationError(f"{failed}{error}{_remedy(error.name or '')}")
    return ConfigurationError(f"{failed}{type(error).__name__}: {error}")


def _remedy(missing: str) -> str:
    top = missing.partition(".")[0]
    if top in _DISTRIBUTIONS:
        return f"; pip install {distribution(top)}"
    return f"; install the package that provides {missing!r}, or put the module beside the configuration file"


def distribution(module: str) -> str:
    """What pip installs for a module, where the names differ.

    >>> distribution("sklearn"), distribution("pytest")
    ('scikit-learn', 'pytest')
    """
    return _DISTRIBUTIONS.get(module, module)


def outdated_import(error: BaseException) -> str:
    """What is wrong where a user's module imports a name of version 0.1, with the file and the line; else "".

    Raised by an import, the error's traceback ends in the import system or in another's loader (pytest's rewrites the
    modules of an installed package); the last frame before them is the user's.
    """
    if not isinstance(error, ImportError) or error.name is None or (new := current_module(error.name)) is None:
        return ""
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen ")]
    ours = [frame for frame in frames if frame.filename.endswith(("engine/__init__.py", "handlers/__init__.py"))]
    users = [frame for frame in frames if frame not in ours and frame.name != "exec_module"]
    at = f"{users[-1].filename}, line {users[-1].lineno}: " if users else ""
    return f"{at}{error.name!r} is a name of version 0.1; import {new}"


def _callables(module: types.ModuleType) -> list[str]:
    """Names that a class path may end with: the module's public ones, or what it or its submodules define."""
    present = vars(module)
    if hasattr(module, "__all__"):  # a name that is imported when it is first used is left alone
        return [each for each in module.__all__ if each not in present or callable(present[each])]
    return [
        each
        for each, value in present.items()
        if callable(value)
        and not each.startswith("_")
        and f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
    ]


_loaded_before: dict[Path, frozenset[str]] = {}  # by a configuration's folder: the modules that were there before it


def look_in(base: Path) -> None:
    """Look up class paths beside the configuration file first.

    Modules that came from another configuration's folder are forgotten: both may call theirs `model`.
    """
    folder = base.resolve()
    for other in [path for path in _loaded_before if path != folder]:
        before = _loaded_before.pop(other)
        added = [name for name in sys.modules if name not in before]
        for name in [name for name in added if _is_in(sys.modules.get(name.partition(".")[0]), other)]:
            del sys.modules[name]
        sys.path[:] = [entry for entry in sys.path if entry != str(other)]
    if folder not in _loaded_before:
        _loaded_before[folder] = frozenset(sys.modules)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    importlib.invalidate_caches()  # the file may be younger than the import system's listing of its folder


def _is_in(module: types.ModuleType | None, folder: Path) -> bool:
    files = list(getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""])
    return any(Path(file).parent == folder for file in files)
