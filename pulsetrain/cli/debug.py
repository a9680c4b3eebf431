"""`pulsetrain debug`: steps through a recorded run, forward and back, at a prompt."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pulsetrain.cli.reports import OK, report, report_damage, until_closed
from pulsetrain.cli.results import logs_on_stderr
from pulsetrain.debugger.bundle import bundle_commands, bundle_summary, open_recorded
from pulsetrain.debugger.commands import Command, Commands, printable
from pulsetrain.debugger.recorded import Debugger
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.handlers.crash.crash_files import FACTS

__all__ = ["run", "converse"]

PROMPT = "(debug) "
HISTORY = "debug_history"

Read = Callable[[str], str]  # reads the next line after a prompt; EOFError at the end


def run(arguments: argparse.Namespace) -> int:
    """Open the run, and run commands until there are no more."""
    debugger, bundle = open_recorded(arguments.folder, arguments.engine, arguments.rank)
    if arguments.at is not None and not arguments.live:
        raise ConfigurationError("--at: needs --live; at the prompt, use: goto iteration N")
    status = OK
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()  # otherwise each collection walks all that torch has imported, which takes longer than any command
    try:
        with until_closed():
            extra = {} if bundle is None else bundle_commands(bundle)
            if bundle is not None:
                print("\n".join(map(printable, bundle_summary(bundle))))
            if len(debugger.ranks) > 1:
                others = ", ".join(str(each) for each in debugger.ranks if each != debugger.log.rank)
                print(f"this is the log of rank {debugger.log.rank}; --rank N opens that of another one: {others}")
            status = _live(arguments, debugger, extra) if arguments.live else converse(Commands(debugger, extra))
    finally:
        if not was_frozen:  # else what the caller has frozen would be unfrozen, too
            gc.unfreeze()
    damaged = report_damage(debugger.log.damage)
    return status or damaged


def _live(arguments: argparse.Namespace, recorded: Debugger, extra: Mapping[str, Command]) -> int:
    """Step through the computation itself, from the last checkpoint before an iteration."""
    from pulsetrain.configuration.rebuild import rebuild
    from pulsetrain.debugger.live import LiveDebugger
    from pulsetrain.engine.checkpoint.reader import step_of
    from pulsetrain.reproduce.processes import processes_of
    from pulsetrain.reproduce.rerun import checkpoint_before

    folder, iteration = recorded.folder, arguments.at
    if (folder / FACTS).exists():
        raise ConfigurationError(f"--live: {folder} is a crash bundle, which has no checkpoints; name its run folder")
    if iteration is None and recorded.faults:
        iteration = recorded.faults[-1].event.iteration  # where the fault started
    if iteration is not None and iteration < 1:
        raise ConfigurationError(f"--at {iteration}: needs the number of an iteration, at least 1")
    checkpoint = checkpoint_before(folder, iteration) if iteration is not None else None
    first = 1 if checkpoint is None else step_of(checkpoint) + 1
    count = next(each.processes for each in processes_of(folder) if each.last is None or each.last >= first)
    if count > 1:
        raise ConfigurationError(
            f"--live: {folder} was trained by {count} processes, and --live computes in one, with other shares of each "
            "batch; leave it out, and --rank N shows what a process has recorded"
        )
    with logs_on_stderr():
        live = LiveDebugger(lambda temporary: rebuild(folder, temporary).trainer, checkpoint, folder)
        try:
            if iteration is not None:
                live.goto(iteration=iteration)
            return converse(Commands(live, {**extra, **live.commands()}))
        finally:
            live.close()


def converse(commands: Commands) -> int:
    """Read commands and print their results, at a terminal or from a pipe, until `quit` or the end of input.

    At a terminal Ctrl-C interrupts the command, or clears the line, and the program continues; Ctrl-D ends it.

    Returns:
        The exit status: 0, or 2 where a command from a pipe failed.

    Raises:
        ConfigurationError: input comes from a terminal, and prompt_toolkit is not installed.
    """
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    read = _terminal(commands) if at_terminal else _pipe
    status = OK
    status |= _say(commands.opening(), at_terminal)
    while not commands.ended:
        try:
            line = read(PROMPT)
        except EOFError:
            break
        except KeyboardInterrupt:
            if at_terminal:
                continue
            raise
        status |= _say(commands.run(line if line.strip() or not at_terminal else commands.repeat()), at_terminal)
    return OK if at_terminal else status


def _say(lines: Iterator[str], at_terminal: bool) -> int:
    """Print lines as they come; an error is reported, and more commands may follow."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        if not at_terminal:
            raise
        print("interrupted")
    except Exception as error:
        sys.stdout.flush()
        return report(error)
    return OK


def _pipe(prompt: str) -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode(errors="replace")


def _terminal(commands: Commands) -> Read:
    """A prompt with history and completion."""
    try:
        toolkit, completion = import_module("prompt_toolkit"), import_module("prompt_toolkit.completion")
        history = import_module("prompt_toolkit.history")
    except ImportError as error:
        raise ConfigurationError(
            f"debug: a prompt at a terminal needs a package that is not installed ({error}); "
            "pip install 'pulsetrain[debug]', or pipe the commands in"
        ) from error
    kept = _history_file()
    session = toolkit.PromptSession(
        history=history.FileHistory(str(kept)) if kept is not None else history.InMemoryHistory(),
        completer=_Completer(commands, completion.Completion),
        complete_while_typing=False,
    )
    return lambda prompt: str(session.prompt(prompt))


class _Completer:
    """A completer for prompt_toolkit, with its interface instead of its base class: the package is optional."""

    def __init__(self, commands: Commands, completion: Callable[..., object]) -> None:
        self._commands, self._completion = commands, completion

    def get_completions(self, document: Any, event: Any) -> Iterable[Any]:
        text = document.text_before_cursor
        typed = 0 if not text or text[-1].isspace() else len(text.split()[-1])
        return [self._completion(word, start_position=-typed) for word in self._commands.complete(text)]

    async def get_completions_async(self, document: object, event: object) -> AsyncIterator[object]:
        for each in self.get_completions(document, event):
            yield each


def _history_file() -> Path | None:
    """The file in the user's state folder; None where it cannot be written."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state) / "pulsetrain" / HISTORY
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError:
        return None
    return path
