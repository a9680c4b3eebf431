"""The commands of the debugger's prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pulsetrain.debugger.command import Command, whole_number
from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, unknown_name
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log.predicate import FIELDS
from pulsetrain.export.event_formats import FORMATS

if TYPE_CHECKING:
    from pulsetrain.debugger.live import LiveDebugger
    from pulsetrain.debugger.recorded import Debugger

__all__ = ["Command", "Commands", "printable"]

ALIASES = {"n": "next", "b": "back", "c": "continue", "rc": "reverse-continue", "s": "state", "w": "where",
           "e": "events", "h": "help", "?": "help", "q": "quit", "exit": "quit"}  # fmt: skip
MOVES = frozenset({"next", "back", "continue", "reverse-continue"})  # an empty line repeats them
SHOWN = 5  # events before and after the current one
MOST_SHOWN = 1000
READ_AT_START = 256 * 2**20  # bytes: a larger checkpoint is only read when `handlers` asks for it


class Commands:
    """Runs the lines of a prompt and returns the lines to print; the terminal is the caller's.

    Args:
        target: the debugger.
        extra: more commands by name; they override built-in ones.
    """

    ended: bool

    def __init__(self, target: Debugger | LiveDebugger, extra: Mapping[str, Command] | None = None) -> None:
        self.target = target
        self.ended = False
        self._table = {**self._own(), **(extra or {})}
        self._last = ""  # the last line that moved

    def opening(self) -> Iterator[str]:
        """The first position, and what went wrong there."""
        target = self.target
        if target.faults:
            yield from map(printable, ["", f"the run ended in: {target.faults[0]}"])
            for fault in target.faults[1:]:
                yield printable(f"before that: {fault}")
            yield from map(printable, target.handlers(max_bytes=READ_AT_START).lines())
            yield ""
        yield from map(printable, self._events("") if target.faults else self._where())

    def run(self, line: str) -> Iterator[str]:
        """Run a line; an empty one does nothing.

        Raises:
            PulsetrainError: there is no such command, or it failed; the debugger has not moved.
        """
        words = line.split(None, 1)
        if not words:
            return
        name = ALIASES.get(words[0], words[0])
        command = self._table.get(name)
        if command is None:
            raise unknown_name("debug", "command", words[0][:40], self._table)
        self._last = line if name in MOVES else ""
        try:
            yield from map(printable, command.run(words[1].strip() if len(words) > 1 else ""))
        except PulsetrainError as error:
            if not error.place or not hasattr(self.target, error.place):
                raise
            named = error.reworded(lambda argument, value: (argument, value), place=name)
            raise named.with_traceback(error.__traceback__) from error.__cause__

    def repeat(self) -> str:
        """The line that an empty line at a terminal repeats: the last one if it moved, or else none."""
        return self._last

    def complete(self, text: str) -> list[str]:
        """The completions of the text's last word, which may be empty."""
        words = text.split()
        last = words.pop() if words and not text[-1].isspace() else ""
        if not words:
            found: Iterable[str] = self._table
        else:
            command = self._table.get(ALIASES.get(words[0], words[0]))
            found = command.words(words[1:]) if command is not None else ()
        return sorted(word for word in found if word.startswith(last))

    def _own(self) -> dict[str, Command]:
        target = self.target
        return {
            "next": Command("next [N] | next to EVENT", "move forward by 1 or N events, or to the next event of a type",
                            lambda rest: self._step(rest, target.next, target.next_to), self._step_words),
            "back": Command("back [N] | back to EVENT", "move back by 1 or N events, or to the last event of a type",
                            lambda rest: self._step(rest, target.back, target.back_to), self._step_words),
            "goto": Command("goto iteration N | epoch N | seq N | start | end", "move to a position", self._goto,
                            lambda before: () if before else ("iteration", "epoch", "seq", "start", "end")),
            "continue": Command("continue", "move forward to the next break, or to the end", self._continue),
            "reverse-continue": Command("reverse-continue", "move back to the last break, or to the beginning",
                                        self._reverse_continue),
            "break": Command('break on EVENT [if CONDITION] | break if CONDITION',
                             'stop at events: break on validation_completed if metrics["val/loss"] > 3',
                             self._break, self._break_words),
            "breaks": Command("breaks", "list the breaks",
                              lambda rest: map(str, target.breaks.values()) if target.breaks else ["no breaks"]),
            "delete": Command("delete N", "delete a break", self._delete,
                              lambda before: map(str, target.breaks)),
            "watch": Command("watch [NAME]", "show a metric or a field at each stop: watch train/loss", self._watch,
                             lambda before: [] if before else [*target.metric_names, *FIELDS]),
            "unwatch": Command("unwatch NAME", "stop showing it", self._unwatch, lambda before: target.watches),
            "state": Command("state", "show epoch, iteration, counters, metrics and learning rate", self._state),
            "handlers": Command("handlers", "show the run's handlers with their states in the last checkpoint",
                                lambda rest: target.handlers().lines()),
            "events": Command("events [N]", "show the last and the next N events", self._events),
            "where": Command("where", "show the current event", lambda rest: self._where()),
            "help": Command("help [COMMAND]", "show the commands", self._help, lambda before: self._table),
            "quit": Command("quit", "leave, as Ctrl-D does", self._quit),
        }  # fmt: skip

    def _where(self) -> Iterator[str]:
        event = self.target.event
        yield self.target.here
        if event is not None:
            _, values = FORMATS["table"](iter([event]), ["values"], True)
            if values.strip():
                yield f"  {values.strip()}"
        yield from self._watched()

    def _watched(self) -> Iterator[str]:
        return (f"  {name}: {_shown(value)}" for name, value in self.target.watched().items())

    def _step(
        self, rest: str, by: Callable[[int], LoggedEvent | None], to: Callable[[str], LoggedEvent | None]
    ) -> Iterator[str]:
        words = rest.split()
        before = self.target.event
        if words[:1] == ["to"]:
            if len(words) != 2:
                raise ConfigurationError("to: needs an event, such as: back to validation_completed")
            if to(words[1]) is None:
                yield f"no {words[1]} in that direction"
        else:
            found = by(whole_number("next or back by", rest) if rest else 1)
            if found is None and before is self.target.event is not None:
                yield self.target.end
        yield from self._where()

    def _step_words(self, before: list[str]) -> Iterable[str]:
        return ["to"] if not before else self.target.event_names if before == ["to"] else ()

    def _goto(self, rest: str) -> Iterator[str]:
        match rest.split():
            case ["start" | "end" as name]:
                self.target.move_to(name, True)
            case ["iteration" | "epoch" | "seq" as name, number]:
                self.target.move_to(name, whole_number(f"goto {name}", number))
            case _:
                raise ConfigurationError(f"{f'goto {rest[:40]}'.rstrip()}: write {self._table['goto'].usage}")
        yield from self._where()

    def _continue(self, rest: str) -> Iterator[str]:
        if self.target.continue_() is None:
            yield f"{'no break ahead' if self.target.breaks else 'no breaks'}; {self.target.end}"
        else:
            yield f"break {self.target.hit}"
        yield from self._where()

    def _reverse_continue(self, rest: str) -> Iterator[str]:
        if self.target.reverse_continue() is not None:
            yield f"break {self.target.hit}"
        yield from self._where()

    def _break(self, rest: str) -> Iterator[str]:
        event, *condition = re.split(r"(?:^|\s)if(?:\s|$)", rest, maxsplit=1)
        words = event.split()
        if words[:1] == ["on"]:
            del words[0]
        if len(words) > 1 or not (words or condition):
            raise ConfigurationError(f"{f'break {rest[:40]}'.rstrip()}: write {self._table['break'].usage}")
        made = self.target.add_break(words[0] if words else None, condition[0].strip() if condition else None)
        yield f"break {made}"

    def _break_words(self, before: list[str]) -> Iterable[str]:
        if "if" in before:
            parts = [f'metrics["{name}"]' for name in self.target.metric_names]
            return [*FIELDS, *(f'"{name}"' for name in self.target.engines), *parts]
        if not before:
            return ["on", "if"]
        return self.target.event_names if before == ["on"] else ["if"]

    def _delete(self, rest: str) -> Iterable[str]:
        self.target.delete_break(whole_number("delete", rest))
        return [f"break {rest} deleted"]

    def _watch(self, rest: str) -> Iterator[str]:
        if rest:
            self.target.add_watch(rest)
        elif not self.target.watches:
            yield "nothing is watched"
        yield from self._watched()

    def _unwatch(self, rest: str) -> Iterable[str]:
        if not self.target.watches:
            raise ConfigurationError(f"unwatch {rest[:40]}: nothing is watched; watch NAME adds a value")
        if rest not in self.target.watches:
            raise unknown_name("unwatch", "name", rest[:40], self.target.watches)
        self.target.watches.remove(rest)
        return [f"{rest}: no longer watched"]

    def _state(self, rest: str) -> Iterator[str]:
        for name, value in self.target.facts().items():
            for key, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
                if each is not None:
                    yield f"  {name if key is None else f'{name}: {key}':<28} {_shown(each)}"

    def _events(self, rest: str) -> Iterator[str]:
        count = whole_number("events", rest) if rest else SHOWN
        if count > MOST_SHOWN:
            raise ConfigurationError(f"events {count}: shows at most {MOST_SHOWN}; `pulsetrain events` prints them all")
        before, after = self.target.around(count)
        if self.target.event is None:
            yield self.target.here
        head, *rows = FORMATS["table"](iter([*before, *after]), None, False) if before or after else ("",)
        yield f"  {head}"
        for number, row in enumerate(rows, start=1):
            yield f"{'>' if number == len(before) else ' '} {row}"

    def _help(self, rest: str) -> Iterator[str]:
        if rest and rest not in self._table:
            raise unknown_name("help", "command", rest[:40], self._table)
        for command in [self._table[rest]] if rest else self._table.values():
            yield command.usage
            yield f"    {command.help}"
        if not rest:
            short = ", ".join(f"{alias} {name}" for alias, name in ALIASES.items() if len(alias) < 3)
            yield f"short forms: {short}. An empty line repeats the last move. Ctrl-C interrupts, Ctrl-D leaves."

    def _quit(self, rest: str) -> Iterable[str]:
        self.ended = True
        return ()


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:,}" if type(value) is int else repr(value)


def printable(text: str) -> str:
    r"""The text with control characters escaped, since a log may hold any that a program wrote.

    >>> print(printable("a\x1b[31m"))
    a\x1b[31m
    """
    return plain(text.rstrip("\n"), keep="\n")
