"""From a class path with arguments to an object: found, checked against its annotations, and made."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jsonargparse

from pulsetrain.engine.errors import ConfigurationError, PulsetrainError

__all__ = ["build", "checked_arguments", "find", "look_in", "spec_of", "unknown"]

MANY = 80  # names, of which a message would become unreadable

WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
}


def build(
    spec: Any, place: str, shipped: Mapping[str, Any] | None = None, *, settings: str | None = None, **given: Any
) -> Any:
    """Call what a `class_path` with `init_args` names, its arguments checked against their annotations.

    Args:
        spec: a class path, or a mapping with class_path and init_args.
        place: where in the configuration this stands, for messages.
        shipped: names that need no path.
        settings: where the arguments stand; by default `place.init_args`.
        given: arguments filled in where the callable takes them and the configuration does not.

    Raises:
        ConfigurationError: the name is not found, an argument is unknown, missing or of the wrong type, or the call
            itself failed: then it is the cause.
    """
    settings = settings or f"{place}.init_args"
    class_path, init_args = spec_of(spec, place, settings)
    made_by = find(class_path, place, shipped or {})
    name = getattr(made_by, "__name__", str(made_by))
    arguments = checked_arguments(made_by, name, settings, init_args, given)
    try:
        return made_by(**arguments)
    except PulsetrainError as error:
        raise type(error)(f"in {place}: {error}") from error
    except Exception as error:
        text = str(error)
        kind = "" if text.startswith(f"{name}(") else f"{type(error).__name__}: "
        raise ConfigurationError(f"in {place}: {kind}{text}") from error


def spec_of(spec: Any, place: str, settings: str) -> tuple[Any, Mapping[str, Any]]:
    """The class path and the arguments that a configuration gives.

    Raises:
        ConfigurationError: it is no such thing.
    """
    if isinstance(spec, str):
        spec = {"class_path": spec}
    if not isinstance(spec, Mapping) or "class_path" not in spec:
        raise ConfigurationError(
            f"{place}={spec!r}: needs a class path, or a mapping with class_path and, where it takes any, init_args"
        )
    for key in spec.keys() - {"class_path", "init_args"}:
        raise unknown(f"{place}.{key}", "key", key, ("class_path", "init_args"))
    init_args = {} if spec.get("init_args") is None else spec["init_args"]
    if not isinstance(init_args, Mapping):
        raise ConfigurationError(f"{settings}={init_args!r}: needs a mapping of argument: value")
    return spec["class_path"], init_args


def unknown(where: str, what: str, name: object, choices: Iterable[str]) -> ConfigurationError:
    """The error for a key or name that is not among the choices, with the nearest one as the remedy."""
    choices = sorted(choices)
    near = get_close_matches(str(name), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    some = f"choose one of {', '.join(choices)}" if choices else "there is none to choose"
    if len(choices) > MANY:
        some = f"there are {len(choices)} others"
    return ConfigurationError(f"{where}: unknown {what}; {some}{hint}")


def checked_arguments(
    made_by: Any, name: str, settings: str, init_args: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """What the callable is called with; objects that a configuration describes among its arguments are made.

    Raises:
        ConfigurationError: an argument is unknown, missing or of the wrong type.
    """
    accepted = inspect.signature(made_by).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    hints = _annotations(made_by)
    arguments: dict[str, Any] = {}
    for key, value in init_args.items():
        if key not in accepted and not takes_any:
            raise unknown(f"{settings}.{key}", f"argument of {name}", key, accepted)
        arguments[key] = _prepare(value, hints.get(key, Any), f"{settings}.{key}")
    for key, value in given.items():
        if key in accepted:
            arguments.setdefault(key, value)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        key
        for key, each in accepted.items()
        if key not in arguments and each.default is inspect.Parameter.empty and each.kind not in variable
    ]
    if missing:
        raise ConfigurationError(f"{settings}: {name} needs {', '.join(missing)} as well")
    return _check(made_by, name, settings, arguments, hints)


def _prepare(value: Any, hint: Any, where: str) -> Any:
    """Nested objects are made here, so that what is wrong inside them is said with its own place."""
    kinds = _alternatives(hint)
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return int(value)  # 1e6: YAML knows no exponents for whole numbers
    if not isinstance(value, Mapping) or any(_is_mapping(kind) for kind in kinds):
        return value
    if "class_path" in value and Any not in kinds:
        return build(value, where)
    classes = [kind for kind in kinds if is_dataclass(kind)]
    if len(classes) == 1:  # without a class path: Every as {epochs: 1}
        return build({"class_path": classes[0], "init_args": value}, where, settings=where)
    return value


def _check(
    made_by: Any, name: str, settings: str, arguments: dict[str, Any], hints: Mapping[str, Any]
) -> dict[str, Any]:
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    # made already: jsonargparse takes such an annotation apart, and looks for a mapping
    plain = {key: hint for key, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    made = {key: value for key, value in arguments.items() if key in plain}
    for key, value in made.items():
        if not isinstance(value, plain[key]):
            raise ConfigurationError(f"{settings}.{key}={value!r}: needs {_words(plain[key])}")
    try:
        if inspect.isclass(made_by):
            parser.add_class_arguments(made_by, skip=set(made), fail_untyped=False)
        else:
            parser.add_function_arguments(made_by, skip=set(made), fail_untyped=False)
        # called instantiate from jsonargparse 4.49 on, where the older name warns
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
        checked = instantiate(parser.parse_object({key: arguments[key] for key in arguments.keys() - made.keys()}))
    except Exception as error:
        text = " ".join(str(error).split())
        found = re.match(r'Parser key "([\w.]+)"', text)
        key = found[1].partition(".")[0] if found else ""
        if key in hints and key in arguments and (words := _words(hints[key])):
            raise ConfigurationError(f"{settings}.{key}={arguments[key]!r}: needs {words}") from error
        raise ConfigurationError(f"{settings}: {name} cannot take these: {text}") from error
    return {**checked.as_dict(), **made}


def _annotations(made_by: Any) -> dict[str, Any]:
    target = made_by.__init__ if inspect.isclass(made_by) else made_by
    try:
        return typing.get_type_hints(target)
    except Exception:  # a name that only a type checker sees
        return {}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for each in typing.get_args(hint) for kind in _alternatives(each))
    return (hint,)


def _is_mapping(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return inspect.isclass(origin) and issubclass(origin, Mapping)


def _words(hint: Any) -> str:
    """What an annotation asks for, in the words of a configuration; "" where there are none."""
    found: list[str] = []
    for kind in _alternatives(hint):
        origin = typing.get_origin(kind) or kind
        if origin is typing.Literal:
            found += [str(choice) for choice in typing.get_args(kind)]
        elif kind in WORDS:
            found.append(WORDS[kind])
        elif _is_mapping(kind):
            found.append("a mapping")
        elif inspect.isclass(origin) and issubclass(origin, (Sequence, set)):
            found.append("a list")
        elif is_dataclass(kind):
            found.append(f"a mapping with {', '.join(inspect.signature(kind).parameters)}")  # type: ignore[arg-type]
        elif inspect.isclass(origin):
            found.append(f"a mapping with the class_path of a {origin.__name__}")
        else:
            return ""
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def find(path: Any, place: str, shipped: Mapping[str, Any]) -> Any:
    """The class or function of this path, imported.

    Raises:
        ConfigurationError: there is none.
    """
    if callable(path):
        return path
    module_name, _, name = str(path).rpartition(".")
    where = f"{place}: class_path={path!r}"
    if not module_name:
        if path not in shipped:
            if not shipped:
                raise ConfigurationError(f"{where}: needs a path with a module, such as model.{path or 'Model'}")
            raise unknown(where, "name", path, shipped)
        return shipped[path]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"{where}: there is no module {error.name!r}; "
                "it is looked for beside the configuration file, then among the installed packages"
            ) from None
        raise ConfigurationError(f"{where}: importing {module_name} failed: {error}") from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{where}: importing {module_name} failed: {text}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise unknown(where, f"name in {module_name}", name, _callables(module))
    return found


def _callables(module: types.ModuleType) -> list[str]:
    """What a class path may name in the module: its public names, or where it lists none what it or a part defines."""
    there = vars(module)
    if hasattr(module, "__all__"):  # one that is not there yet is imported when asked for, so leave it alone
        return [each for each in module.__all__ if each not in there or callable(there[each])]
    return [
        each
        for each, value in there.items()
        if callable(value)
        and not each.startswith("_")
        and f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
    ]


_present: dict[Path, frozenset[str]] = {}  # folder of a configuration: the modules loaded before it was looked in


def look_in(base: Path) -> None:
    """Let class paths be found beside the configuration file, also after another configuration's folder.

    Modules that came from another configuration's folder are forgotten: both may call theirs `model`.
    """
    folder = base.resolve()
    for other in [path for path in _present if path != folder]:
        before = _present.pop(other)
        theirs = [name for name in sys.modules if name not in before]
        for name in [name for name in theirs if _lies_in(sys.modules.get(name.partition(".")[0]), other)]:
            del sys.modules[name]
        sys.path[:] = [entry for entry in sys.path if entry != str(other)]
    if folder not in _present:
        _present[folder] = frozenset(sys.modules)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    importlib.invalidate_caches()  # the file may be younger than the finder's listing of its folder


def _lies_in(module: Any, folder: Path) -> bool:
    places = list(getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""])
    return any(Path(place).parent == folder for place in places)
