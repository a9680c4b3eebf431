"""The configuration file: reading it, overriding its settings, comparing two configurations.

jsonargparse reads YAML too, but keeps the last of two equal keys, and it overrides settings by their dotted names only
where it knows the type: not inside a section that any class path may fill
(tests/pulsetrain/configuration/test_why_own_parsing.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pulsetrain.configuration.messages import unknown
from pulsetrain.configuration.sections import NAMED, SECTIONS
from pulsetrain.configuration.yaml_text import load_yaml, one_line, read_yaml
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.handlers.run_files.redaction import REDACTED, redacted_settings

__all__ = ["differences", "read_config", "redacted_options"]

STANDARD_HANDLERS = ("Checkpointer", "EventRecorder", "CSVLogger", "Plots", "ProgressBar", "CrashBundle")


def read_config(path: os.PathLike[str], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Read the file and apply the overrides.

    Args:
        path: the file; messages call it what `str(path)` is.
        overrides: values as YAML text, by dotted key: {"training.learning_rate": "3e-4"}.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, or has an unknown section or lacks one.
    """
    config = read_yaml(path)
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: needs the sections {', '.join(SECTIONS)}")
    for section in config:
        if section not in SECTIONS:
            raise unknown(f"{path}: {section}", "section", section, SECTIONS)
    for key, text in overrides.items():
        _override(config, key, text)
    for section in ("model", "data"):
        if config.get(section) is None:
            raise ConfigurationError(
                f"{path}: the section {section!r} is missing; it names a class or function to call"
            )
    _check_kinds(path, config)
    for section, value in (("run", f"runs/{Path(path).stem}-{{n}}"), ("strategy", "supervised"), ("backend", "torch")):
        if config.get(section) is None:
            config[section] = value
    if "handlers" not in config:
        adds_one = (config.get("training") or {}).get("save_every_n_epochs") is not None
        config["handlers"] = [name for name in STANDARD_HANDLERS if name != "Checkpointer" or not adds_one]
    return config


def differences(before: object, now: object, key: str = "") -> Iterator[str]:
    """The settings in which two configurations differ.

    >>> list(differences({"training": {"seed": 0}}, {"training": {"seed": 1}}))
    ['training.seed: 0 -> 1']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*before, *(name for name in now if name not in before)]:
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{key}[{index}]")
    elif before != now:
        yield f"{key}: {before!r} -> {now!r}"


def redacted_options(config: object) -> list[str]:
    """The options, without "--", which give the values again that are "[redacted]"; lists are given as a whole.

    >>> redacted_options({"data": {"init_args": {"token": "[redacted]"}}, "handlers": [{"api_key": "[redacted]"}]})
    ['data.init_args.token', 'handlers']
    """
    part = re.compile(rf"\.(?:\d+(?=\.|$)|[^.]*{re.escape(REDACTED)}).*")  # of a list; a key that is a credential
    return list(dict.fromkeys(part.sub("", name) for name in redacted_settings(config)))


def _override(config: dict[str, object], key: str, text: str) -> None:
    section, *rest = key.split(".")
    if section not in SECTIONS:
        raise unknown(f"--{key}", "section", section, SECTIONS)
    if not all(rest):
        raise ConfigurationError(f"--{key}: an empty name between two dots; write --training.learning_rate 3e-4")
    try:
        value = load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--{key} {text!r}: not valid YAML: {one_line(error)}") from error
    if section in NAMED and rest and isinstance(config.get(section), str):
        config[section] = {"class_path": config[section]}
    parent, name = config, section
    for index, child in enumerate(rest):
        inner = parent.get(name)
        if inner is None:
            inner = parent[name] = {}
        if not isinstance(inner, dict):
            above = ".".join([section, *rest[:index]])
            kind = "a list" if isinstance(inner, list) else f"{inner!r}, not a mapping"
            raise ConfigurationError(
                f"--{key}: {above} is {kind}; set it as a whole (--{above} VALUE, in YAML) or change it in the file"
            )
        parent, name = inner, child
    parent[name] = value


def _check_kinds(path: os.PathLike[str], config: Mapping[str, object]) -> None:
    wanted: dict[str, tuple[type, str]] = {
        "run": (str, "a folder"),
        "training": (dict, "a mapping of settings"),
        "metrics": (dict, "a mapping of name: class path"),
        "handlers": (list, "a list"),
    }
    for section, (kind, words) in wanted.items():
        value = config.get(section)
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{path}: {section}={value!r}: needs {words}")
