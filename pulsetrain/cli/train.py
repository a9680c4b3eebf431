"""`pulsetrain train`: a configuration file becomes a run."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from engine import Events
from engine.errors import ConfigurationError, PulsetrainError
from engine.payloads import Preempted
from pulsetrain.assembly import Assembly, assemble, read_config
from pulsetrain.run_folder import resolve_folder

__all__ = ["add_parser"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train what a configuration file describes",
        description="Train what a configuration file describes. Any of its settings can be given here as well: "
        "--training.learning_rate 3e-4, --model.init_args.width 64. Ctrl-C stops at the next safe point with a "
        "checkpoint; a second Ctrl-C stops at once.",
        epilog="Exit status: 0 done; 1 the run failed; 2 wrong input; 128 + n stopped cleanly by signal n.",
    )
    parser.add_argument("config", type=Path, help="the configuration, YAML")
    parser.add_argument(
        "--run", dest="folder", metavar="FOLDER", help="the run folder; '{n}' in it is the next free number"
    )
    parser.add_argument(
        "--resume", metavar="latest|PATH", help="go on from the newest valid checkpoint, or from this one"
    )
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Assemble the run, train, and say where the results are."""
    from pulsetrain.cli import FAILED, USAGE, report

    started = time.perf_counter()
    assembly: Assembly | None = None
    try:
        config = read_config(arguments.config, overrides(rest))
        folder = resolve_folder(arguments.folder or config["run"], resume=arguments.resume is not None)
        assembly = assemble(config, arguments.config.parent, folder, resuming=arguments.resume is not None)
        print(f"run folder: {folder}", file=sys.stderr)
        with signals_posted(assembly.trainer) as received:
            assembly.trainer.train(resume=arguments.resume)
    except (PulsetrainError, OSError, ImportError) as error:
        if arguments.traceback:
            traceback.print_exc()
        return report(error)
    except Exception as error:
        if arguments.traceback:
            traceback.print_exc()
        elif assembly is not None:
            crash = assembly.folder / "crash.txt"
            crash.write_text("".join(traceback.format_exception(error)))
            error.add_note(f"the traceback is in {crash}")
        early = assembly is None or assembly.trainer.state.update == 0
        return report(error, USAGE if early else FAILED)
    print(summary(assembly, time.perf_counter() - started))
    return 128 + received[0] if received else 0


def overrides(rest: list[str]) -> dict[str, str]:
    """`--a.b value` and `--a.b=value` as {"a.b": "value"}.

    Raises:
        ConfigurationError: anything else.
    """
    found: dict[str, str] = {}
    words = iter(rest)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in key:
            raise ConfigurationError(f"{word}: unknown argument; settings are given as --training.learning_rate 3e-4")
        if not equals:
            value = next(words, "")
            if not value:
                raise ConfigurationError(f"{word}: needs a value")
        found[key] = value
    return found


@contextmanager
def signals_posted(trainer: Any) -> Iterator[list[int]]:
    """The first SIGINT, SIGTERM or SIGUSR1 becomes PREEMPTED at a safe point; a second one acts as it always does."""
    received: list[int] = []

    def post(number: int, frame: FrameType | None) -> None:
        if received:
            signal.signal(number, previous[signal.Signals(number)])
            signal.raise_signal(signal.Signals(number))
            return
        received.append(number)
        print("\nstopping at the next safe point; once more stops at once", file=sys.stderr)
        trainer.post(Events.PREEMPTED, Preempted(signal=signal.Signals(number).name))

    previous = {number: signal.signal(number, post) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def summary(assembly: Assembly, seconds: float) -> str:
    """What came out, and where it is."""
    trainer, folder = assembly.trainer, assembly.folder
    state = trainer.state
    unit = getattr(trainer.strategy, "loss_unit", "")
    counts = f"{state.iteration:,} iterations, {state.update:,} updates, {state.epoch} epoch(s)"
    if state.tokens:
        counts += f", {state.tokens:,} tokens"
    lines = ["", f"{'stopped':<20}{state.stop_reason or 'at its bound'}", f"{'trained':<20}{counts}, {seconds:.0f} s"]
    for name, value in state.metrics.items():
        lines.append(f"{name:<20}{value:.4f}{' ' + unit if unit and name.endswith('/loss') else ''}")
    for handler in trainer.handlers:
        if callable(getattr(handler, "summary", None)):
            lines.append(handler.summary())
    curve = folder / "plots" / "loss.png"
    if curve.exists():
        lines.append(f"{'loss curve':<20}{curve}")
    lines.append(f"{'run folder':<20}{folder}")
    if state.stop_reason and "was received" in state.stop_reason:
        lines.append(f"{'go on':<20}pulsetrain train {assembly.source} --run {folder} --resume latest")
    return "\n".join(lines)
