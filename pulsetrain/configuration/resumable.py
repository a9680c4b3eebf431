"""Whether a run of a configuration can resume, which a job or a trial does after an interruption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pulsetrain.configuration.class_paths import find, look_in
from pulsetrain.configuration.instantiate import spec_of
from pulsetrain.configuration.names_0_1 import current_path
from pulsetrain.configuration.rebuild import base_of
from pulsetrain.configuration.shipped_handlers import HANDLERS
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.handlers import Checkpointer

__all__ = ["check_resumable"]


def check_resumable(config: Mapping[str, Any], path: Path, *, imports: bool = True) -> None:
    """Refuse a configuration without exactly one Checkpointer. A function that makes a handler may make one.

    Args:
        config: as `read_config` returns it.
        path: its file.
        imports: whether this machine has the code that the configuration names; else a handler of the user's may be a
            Checkpointer, too.

    Raises:
        ConfigurationError: it has none or several, or a handler cannot be imported.
    """
    if imports:
        look_in(base_of(path.parent))
    found = dict(_checkpointers(config, imports=imports))
    certain = [name for name, is_one in found.items() if is_one]
    needs = f"{path}: handlers: a run that is interrupted resumes from its checkpoints, and "
    if not found:
        raise ConfigurationError(f"{needs}there is no Checkpointer; add Checkpointer to `handlers`")
    if len(certain) > 1:
        raise ConfigurationError(
            f"{needs}there are {len(certain)} Checkpointers: {', '.join(certain)}; leave one, from which it resumes"
        )


def _checkpointers(config: Mapping[str, Any], *, imports: bool) -> Iterator[tuple[str, bool]]:
    """The settings that make a Checkpointer, True, or may make one, False."""
    if (config.get("training") or {}).get("save_every_n_epochs") is not None:
        yield "training.save_every_n_epochs", True
    for index, spec in enumerate(config["handlers"] or ()):
        location = f"handlers[{index}]"
        class_path = current_path(str(spec_of(spec, location, f"{location}.init_args")[0]))
        if class_path.partition(".")[0] == "pulsetrain" or "." not in class_path:  # shipped; none is a subclass
            if class_path.rpartition(".")[2] == Checkpointer.__name__:
                yield location, True
        elif not imports or not isinstance(made_by := find(class_path, location, HANDLERS), type):
            yield location, False
        elif issubclass(made_by, Checkpointer):
            yield location, True
