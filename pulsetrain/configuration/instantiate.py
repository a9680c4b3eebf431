"""From a class path with arguments to an object: the arguments checked against their annotations, the callable called.

jsonargparse checks and converts each argument. It is given one argument's value at a time, with what the value
describes already made: its errors about something inside a value are text of several lines, without the location, the
names to choose from, or the value as the file has it (tests/pulsetrain/configuration/test_why_own_parsing.py).
"""

from __future__ import annotations

import inspect
import sysconfig
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any

import jsonargparse

from pulsetrain.configuration.class_paths import Factory, find, outdated_import
from pulsetrain.configuration.messages import as_yaml, entry, unknown
from pulsetrain.engine.argument_checks import remedies_of
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError

__all__ = ["checked_arguments", "instantiate", "named_parameters", "signature_parser", "spec_of"]

WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Path: "a path",
}


def instantiate(
    spec: object,
    location: str,
    shipped: Mapping[str, Factory] | None = None,
    *,
    settings: str | None = None,
    **given: object,
) -> Any:  # whatever the configuration names
    """Call what a `class_path` with `init_args` names, its arguments checked against their annotations.

    Args:
        spec: a class path, or a mapping with class_path and init_args.
        location: of the spec in the configuration, for messages.
        shipped: names that need no path.
        settings: location of the arguments; by default `location.init_args`.
        given: arguments filled in where the callable takes them and the configuration leaves them out.

    Raises:
        PulsetrainError: the name is not found, an argument is unknown, missing or of the wrong type, or the call
            itself failed: then its error is the cause.

    >>> instantiate({"class_path": "fractions.Fraction", "init_args": {"numerator": 3}}, "model")
    Fraction(3, 1)
    """
    settings = settings or f"{location}.init_args"
    class_path, init_args = spec_of(spec, location, settings)
    factory = find(class_path, location, shipped or {})
    name = getattr(factory, "__name__", str(factory))
    arguments = checked_arguments(factory, name, settings, init_args, given)
    try:
        return factory(**arguments)
    except PulsetrainError as error:
        raise _located(error, name, location, settings, init_args) from error
    except Exception as error:
        outdated = outdated_import(error)
        text = outdated or str(error)
        kind = "" if text.startswith(f"{name}(") or text != str(error) else f"{type(error).__name__}: "
        raise ConfigurationError(f"in {location}: {kind}{text}{'' if outdated else _raised_in(error)}") from error


def _raised_in(error: Exception) -> str:
    """The line of the user's code in which the error was raised; "" if it was raised in no such code."""
    paths = sysconfig.get_paths()
    installed = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for frame in reversed(extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", str(Path(__file__).parents[1]), *installed)):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _located(
    error: PulsetrainError, name: str, location: str, settings: str, init_args: Mapping[str, object]
) -> PulsetrainError:
    """The error with the location of the argument where the callable itself rejected one, else of the callable."""
    if error.place != name:
        return error.with_text(f"in {location}: {error}")
    if error.argument is None:
        return error.with_text(f"{settings}={as_yaml(init_args)}: {error.rule}")
    return error.reworded(lambda argument, value: entry(f"{settings}.{argument}", value), as_yaml)


def spec_of(spec: object, location: str, settings: str) -> tuple[object, Mapping[str, Any]]:
    """The class path and the arguments that a configuration gives.

    Raises:
        ConfigurationError: the spec is neither a class path nor a mapping with one.
    """
    if isinstance(spec, str):
        spec = {"class_path": spec}
    if not isinstance(spec, Mapping) or "class_path" not in spec:
        raise ConfigurationError(
            f"{location}={spec!r}: needs a class path, or a mapping with class_path and, where it takes any, init_args"
        )
    for key in spec.keys() - {"class_path", "init_args"}:
        raise unknown(f"{location}.{key}", "key", key, ("class_path", "init_args"))
    init_args = {} if spec.get("init_args") is None else spec["init_args"]
    if not isinstance(init_args, Mapping):
        raise ConfigurationError(f"{settings}={init_args!r}: needs a mapping of argument: value")
    return spec["class_path"], init_args


def checked_arguments(
    factory: Factory, name: str, settings: str, init_args: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, Any]:
    """The arguments of the call; the objects that a configuration describes among them are made.

    Raises:
        ConfigurationError: an argument is unknown, missing or of the wrong type.
    """
    accepted = inspect.signature(factory).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    hints = _annotations(factory)
    arguments: dict[str, object] = {}
    for key, value in init_args.items():
        if key not in accepted and not takes_any:
            if remedy := remedies_of(factory).get(key):
                raise ConfigurationError(f"{settings}.{key}: unknown argument of {name}; {remedy}")
            raise unknown(f"{settings}.{key}", f"argument of {name}", key, accepted)
        arguments[key] = _nested(value, hints.get(key, Any), f"{settings}.{key}")
    for key, value in given.items():
        if key in accepted:
            arguments.setdefault(key, value)
    named = named_parameters(factory)
    missing = [key for key, each in named.items() if key not in arguments and each.default is each.empty]
    if missing:
        raise ConfigurationError(f"{settings}: {name} needs {', '.join(missing)} as well")
    return _converted(factory, name, settings, arguments, hints)


def _nested(value: object, hint: object, location: str) -> object:
    """The object that a mapping describes, made here: an error inside it then has its own location."""
    kinds = _alternatives(hint)
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return int(value)  # 1e6: YAML has no exponents for whole numbers
    if not isinstance(value, Mapping) or any(_is_kind(kind, Mapping) for kind in kinds):
        return value
    if "class_path" in value and Any not in kinds:
        return instantiate(value, location)
    classes = [kind for kind in kinds if is_dataclass(kind)]
    if len(classes) == 1:  # without a class path: Every as {epochs: 1}
        return instantiate({"class_path": classes[0], "init_args": value}, location, settings=location)
    return value


def named_parameters(factory: Factory) -> dict[str, inspect.Parameter]:
    """The parameters of a class or function, without *args and **kwargs."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {key: each for key, each in inspect.signature(factory).parameters.items() if each.kind not in variable}


def signature_parser(factory: Factory, skip: AbstractSet[str] = frozenset()) -> jsonargparse.ArgumentParser:
    """Jsonargparse's parser for the parameters of a class or function."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=False)
    add = parser.add_class_arguments if inspect.isclass(factory) else parser.add_function_arguments
    add(factory, skip=set(skip), fail_untyped=False)
    return parser


def _converted(
    factory: Factory, name: str, settings: str, arguments: dict[str, object], hints: Mapping[str, object]
) -> dict[str, object]:
    # jsonargparse takes the annotation of a dataclass apart and looks for a mapping; these objects are made already
    plain = {key: hint for key, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    made = {key: value for key, value in arguments.items() if key in plain}
    for key, value in made.items():
        if not isinstance(value, plain[key]):
            raise ConfigurationError(f"needs {_words(plain[key])}", **{f"{settings}.{key}": value})
    # jsonargparse reads a text as YAML where any value is taken: "007" would be 7; a default may say what is taken
    named = named_parameters(factory)
    bare = {key: each.default for key, each in named.items() if each.annotation is each.empty}
    untyped = {key for key, default in bare.items() if default is inspect.Parameter.empty or default is None}
    made |= {
        key: value
        for key, value in arguments.items()
        if isinstance(value, str) and (key in untyped or _takes_anything(hints.get(key)))
    }
    try:
        parser = signature_parser(factory, made.keys())
        # copies: jsonargparse puts the objects that a list names into that list, and the configuration is written later
        plain_values = {key: _copied(value) for key, value in arguments.items() if key not in made}
        converted = parser.instantiate(parser.parse_object(plain_values))
    except Exception as error:
        key = _rejected(factory, arguments, made.keys())
        if key in hints and (words := _words(hints[key])):
            raise ConfigurationError(f"needs {words}", **{f"{settings}.{key}": arguments[key]}) from error
        text = " ".join(str(error).split())
        raise ConfigurationError(f"{settings}: {name} cannot take these: {text}") from error
    found = {key: value for key, value in converted.as_dict().items() if key in arguments}  # not the defaults
    return {**{key: _with_texts(arguments[key], value, hints.get(key)) for key, value in found.items()}, **made}


def _takes_anything(hint: object) -> bool:
    return [kind for kind in _alternatives(hint) if kind is not type(None)] in ([Any], [object])


def _with_texts(given: object, found: object, hint: object) -> object:
    """The value found, with texts as they were given inside of dict[str, Any] and the like."""
    if isinstance(given, str):
        return given if _takes_anything(hint) else found
    for kind in _alternatives(hint):
        inner = (typing.get_args(kind) or (None,))[-1]
        if isinstance(given, Mapping) and isinstance(found, dict) and _is_kind(kind, Mapping):
            found = {key: _with_texts(given.get(key), each, inner) for key, each in found.items()}
        elif isinstance(given, list) and isinstance(found, list) and _is_kind(kind, Sequence):
            found = [_with_texts(old, new, inner) for old, new in zip(given, found, strict=True)]
    return found


def _copied(value: object) -> object:
    """The lists and mappings of a configuration as new ones; other objects as they are."""
    if type(value) is list:
        return [_copied(each) for each in value]
    return {key: _copied(each) for key, each in value.items()} if type(value) is dict else value


def _rejected(factory: Factory, arguments: Mapping[str, object], made: AbstractSet[str]) -> str:
    """The first argument that jsonargparse takes with none of the others; "" where it takes each alone."""
    named = named_parameters(factory).keys()
    for key, value in arguments.items():
        if key not in named or key in made:
            continue
        try:
            signature_parser(factory, named - {key}).parse_object({key: value})
        except Exception:
            return key
    return ""


def _annotations(factory: Factory) -> dict[str, object]:
    target = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return typing.get_type_hints(target)
    except Exception:  # a name that only a type checker sees
        return {}


def _alternatives(hint: object) -> tuple[object, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for each in typing.get_args(hint) for kind in _alternatives(each))
    return (hint,)


def _is_kind(kind: object, of: type) -> bool:
    origin = typing.get_origin(kind) or kind
    return inspect.isclass(origin) and issubclass(origin, of)


def _words(hint: object) -> str:
    """What an annotation asks for, in the words of a configuration; "" where there are none."""
    found = [text for kind in _alternatives(hint) for text in _words_of(kind)]
    if "" in found:
        return ""
    return " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def _words_of(kind: object) -> Iterator[str]:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        yield from (str(choice) for choice in typing.get_args(kind))
    elif kind in WORDS:
        yield WORDS[kind]
    elif origin is Callable:
        yield "the import path of a function"
    elif not inspect.isclass(origin):
        yield ""
    elif issubclass(origin, Mapping):
        yield "a mapping"
    elif issubclass(origin, (Sequence, AbstractSet)):
        yield "a list"
    elif is_dataclass(origin):
        yield f"a mapping with {', '.join(inspect.signature(origin).parameters)}"
    else:
        yield f"a mapping with the class_path of a {origin.__name__}"
