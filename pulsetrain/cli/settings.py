"""Settings of the configuration given on the command line: `--training.learning_rate 3e-4`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pulsetrain.configuration.sections import SECTIONS
from pulsetrain.engine.errors import ConfigurationError

__all__ = ["CONFIGURED", "LAUNCHED", "reject_settings", "split_settings"]

CONFIGURED = (
    "train",
    "config",
    "lr-find",
    "memory",
    "fork",
    "submit",
)  # the commands that take settings of a configuration
LAUNCHED = ("verify",)  # of the others, those that take --launch.nproc

EXAMPLE = "a setting is given as --training.learning_rate 3e-4"


def split_settings(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate settings of the configuration from the other words of a command line.

    A setting is an option with a dot in its name, or with the name of a section other than `run`.

    Raises:
        ConfigurationError: a setting has no value.

    >>> split_settings(["train", "config.yaml", "--training.seed", "1", "--run", "a"])
    (['train', 'config.yaml', '--run', 'a'], {'training.seed': '1'})
    """
    others: list[str] = []
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not ("." in name or (name in SECTIONS and name != "run")):
            others.append(word)
            continue
        if not equals:
            value = next(rest, "--")
        if value.startswith("--") or not value:
            raise ConfigurationError(f"--{name}: needs a value; {EXAMPLE}; null means none")
        if "." not in name and name == "training" and ":" not in value:
            raise ConfigurationError(f"--{name} {value}: names a whole section; {EXAMPLE}")
        found[name] = value
    return others, found


def reject_settings(command: str, settings: Mapping[str, str]) -> None:
    """Reject settings of a configuration for a command that takes no configuration.

    Raises:
        ConfigurationError: there is a setting.
    """
    for name in settings if command not in CONFIGURED else ():
        if command in LAUNCHED and name.startswith("launch."):
            continue
        commands = f"{', '.join(CONFIGURED[:-1])} and {CONFIGURED[-1]}"
        raise ConfigurationError(f"--{name}: {command} has no such option; {commands} take settings of a configuration")
