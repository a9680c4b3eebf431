"""The words of the debugger's prompt: what each does to that which is stepped through, and what it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pulsetrain.engine.errors import ConfigurationError, unknown_name
from pulsetrain.engine.recording import LoggedEvent
from pulsetrain.engine.recording.log.predicate import FIELDS
from pulsetrain.export.event_formats import FORMATS

__all__ = ["Command", "Commands", "Described", "Steppable", "printable"]

ALIASES = {"n": "next", "b": "back", "c": "continue", "rc": "reverse-continue", "s": "state", "w": "where",
           "e": "events", "h": "help", "?": "help", "q": "quit", "exit": "quit"}  # fmt: skip
MOVES = frozenset({"next", "back", "continue", "reverse-continue"})  # that an empty line does once more
SHOWN = 5  # events before and behind
MOST_SHOWN = 1000
READ_AT_ONCE = 256 * 2**20  # bytes of a checkpoint, for what is told unasked


class Described(Protocol):
    """What tells of itself in lines."""

    def lines(self) -> Iterator[str]: ...


class Steppable(Protocol):
    """What the commands drive: a recorded run, or one that computes. Its errors are PulsetrainErrors."""

    watches: list[str]
    hit: Any  # the break that it stopped at, if any
    faults: list[Any]  # what went wrong, as text: the first is where it begins

    @property
    def breaks(self) -> Mapping[int, Any]: ...  # what stands for each as text
    @property
    def end(self) -> str: ...  # what is said where there is nothing more
    @property
    def event(self) -> LoggedEvent | None: ...
    @property
    def here(self) -> str: ...
    @property
    def event_names(self) -> Sequence[str]: ...
    @property
    def metric_names(self) -> Mapping[str, Any]: ...
    @property
    def engines(self) -> Sequence[str]: ...
    def next(self, count: int = 1) -> LoggedEvent | None: ...
    def back(self, count: int = 1) -> LoggedEvent | None: ...
    def next_to(self, event: str) -> LoggedEvent | None: ...
    def back_to(self, event: str) -> LoggedEvent | None: ...
    def goto(
        self,
        *,
        iteration: int | None = None,
        epoch: int | None = None,
        seq: int | None = None,
        start: bool = False,
        end: bool = False,
    ) -> LoggedEvent | None: ...
    def continue_(self) -> LoggedEvent | None: ...
    def reverse_continue(self) -> LoggedEvent | None: ...
    def add_break(self, event: str | None = None, condition: str | None = None) -> Any: ...
    def delete_break(self, number: int) -> None: ...
    def add_watch(self, name: str) -> None: ...
    def watched(self) -> Mapping[str, Any]: ...
    def facts(self) -> Mapping[str, Any]: ...
    def around(self, count: int = 5) -> tuple[list[LoggedEvent], list[LoggedEvent]]: ...
    def handlers(self, *, at_most: int | None = None) -> Described: ...


@dataclass(frozen=True)
class Command:
    """One word of the prompt."""

    usage: str
    help: str
    run: Callable[[str], Iterable[str]]  # given the rest of the line; says these lines
    words: Callable[[list[str]], Iterable[str]] = lambda before: ()  # that may come next, behind these


class Commands:
    """Reads lines, does what they say, and gives what there is to be said. It holds no terminal.

    Args:
        target: what is stepped through.
        extra: more commands by their names; one of a name that is here takes its place.
    """

    def __init__(self, target: Steppable, extra: Mapping[str, Command] | None = None) -> None:
        self.target = target
        self.ended = False
        self._table = {**self._own(), **(extra or {})}
        self._last = ""  # the last line that moved

    def opening(self) -> Iterator[str]:
        """Where it begins, and what went wrong there."""
        target = self.target
        if target.faults:
            yield from map(printable, ["", f"the run ended in: {target.faults[0]}"])
            for fault in target.faults[1:]:
                yield printable(f"before that: {fault}")
            yield from map(printable, target.handlers(at_most=READ_AT_ONCE).lines())
            yield ""
        yield from map(printable, self._events("") if target.faults else self._stand())

    def run(self, line: str) -> Iterator[str]:
        """Do what a line says; nothing for an empty one.

        Raises:
            PulsetrainError: there is no such command, or it cannot be done; what is stepped through stays in its place.
        """
        words = line.split(None, 1)
        if not words:
            return
        name = ALIASES.get(words[0], words[0])
        command = self._table.get(name)
        if command is None:
            raise unknown_name("debug", "command", words[0][:40], self._table)
        self._last = line if name in MOVES else ""
        yield from map(printable, command.run(words[1].strip() if len(words) > 1 else ""))

    def again(self) -> str:
        """What an empty line stands for at a terminal: the last line, where that moved."""
        return self._last

    def complete(self, text: str) -> list[str]:
        """The words that the last one of the text, which may be empty, can become."""
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
            "next": Command("next [N] | next to EVENT", "go on by one event, by N, or to the next of a type",
                            lambda rest: self._step(rest, target.next, target.next_to), self._steps),
            "back": Command("back [N] | back to EVENT", "go back likewise",
                            lambda rest: self._step(rest, target.back, target.back_to), self._steps),
            "goto": Command("goto iteration N | epoch N | seq N | start | end", "go to a place", self._goto,
                            lambda before: () if before else ("iteration", "epoch", "seq", "start", "end")),
            "continue": Command("continue", "go on to the next break, or to the end", self._continue),
            "reverse-continue": Command("reverse-continue", "go back to the last break, or to the beginning",
                                        self._reverse_continue),
            "break": Command('break on EVENT [if CONDITION] | break if CONDITION',
                             'stop there: break on validation_completed if metrics["val/loss"] > 3',
                             self._break, self._break_words),
            "breaks": Command("breaks", "list them",
                              lambda rest: map(str, target.breaks.values()) if target.breaks else ["no breaks"]),
            "delete": Command("delete N", "delete a break", self._delete,
                              lambda before: map(str, target.breaks)),
            "watch": Command("watch [NAME]", "show a metric or a field at each stop: watch train/loss", self._watch,
                             lambda before: [] if before else [*target.metric_names, *FIELDS]),
            "unwatch": Command("unwatch NAME", "show it no more", self._unwatch, lambda before: target.watches),
            "state": Command("state", "epoch, iteration, counters, metrics, learning rate", self._state),
            "handlers": Command("handlers", "the run's handlers, and their state in the last checkpoint before",
                                lambda rest: target.handlers().lines()),
            "events": Command("events [N]", "the last and the next N events", self._events),
            "where": Command("where", "the place", lambda rest: self._stand()),
            "help": Command("help [COMMAND]", "this", self._help, lambda before: self._table),
            "quit": Command("quit", "leave; so does Ctrl-D", self._quit),
        }  # fmt: skip

    def _stand(self) -> Iterator[str]:
        event = self.target.event
        yield self.target.here
        if event is not None:
            _, values = FORMATS["table"](iter([event]), ["values"], True)
            if values.strip():
                yield f"  {values.strip()}"
        for name, value in self.target.watched().items():
            yield f"  {name}: {_shown(value)}"

    def _step(
        self, rest: str, by: Callable[[int], LoggedEvent | None], to: Callable[[str], LoggedEvent | None]
    ) -> Iterator[str]:
        words = rest.split()
        before = self.target.event
        if words[:1] == ["to"]:
            if len(words) != 2:
                raise ConfigurationError("to: needs an event, such as: back to validation_completed")
            if to(words[1]) is None:
                yield f"no {words[1]} that way"
        elif by(_number(rest) if rest else 1) is None and before is self.target.event is not None:
            yield self.target.end
        yield from self._stand()

    def _steps(self, before: list[str]) -> Iterable[str]:
        return ["to"] if not before else self.target.event_names if before == ["to"] else ()

    def _goto(self, rest: str) -> Iterator[str]:
        words = rest.split()
        if words in (["start"], ["end"]):
            self.target.goto(start=rest == "start", end=rest == "end")
        elif len(words) == 2 and words[0] in ("iteration", "epoch", "seq"):
            place: dict[str, Any] = {words[0]: _number(words[1])}
            self.target.goto(**place)
        else:
            raise ConfigurationError(f"goto {rest[:40]}: choose {self._table['goto'].usage}")
        yield from self._stand()

    def _continue(self, rest: str) -> Iterator[str]:
        if self.target.continue_() is None:
            yield f"{'no break ahead' if self.target.breaks else 'no breaks'}; {self.target.end}"
        else:
            yield f"break {self.target.hit}"
        yield from self._stand()

    def _reverse_continue(self, rest: str) -> Iterator[str]:
        if self.target.reverse_continue() is not None:
            yield f"break {self.target.hit}"
        yield from self._stand()

    def _break(self, rest: str) -> Iterator[str]:
        event, *condition = re.split(r"(?:^|\s)if(?:\s|$)", rest, maxsplit=1)
        words = event.split()
        if words[:1] == ["on"]:
            del words[0]
        if len(words) > 1 or not (words or condition):
            raise ConfigurationError(f"break {rest[:40]}: choose {self._table['break'].usage}")
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
        self.target.delete_break(_number(rest))
        return [f"break {rest} deleted"]

    def _watch(self, rest: str) -> Iterator[str]:
        if rest:
            self.target.add_watch(rest)
        elif not self.target.watches:
            yield "nothing is watched"
        for name, value in self.target.watched().items():
            yield f"  {name}: {_shown(value)}"

    def _unwatch(self, rest: str) -> Iterable[str]:
        if rest not in self.target.watches:
            raise unknown_name("unwatch", "name", rest[:40], self.target.watches or ["nothing"])
        self.target.watches.remove(rest)
        return [f"{rest}: not watched any more"]

    def _state(self, rest: str) -> Iterator[str]:
        for name, value in self.target.facts().items():
            for key, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
                if each is not None:
                    yield f"  {name if key is None else f'{name}: {key}':<28} {_shown(each)}"

    def _events(self, rest: str) -> Iterator[str]:
        count = _number(rest) if rest else SHOWN
        if count > MOST_SHOWN:
            raise ConfigurationError(f"events {count}: shows at most {MOST_SHOWN}; `pulsetrain events` prints them all")
        before, after = self.target.around(count)
        if self.target.event is None:
            yield self.target.here
        head, *rows = FORMATS["table"](iter([*before, *after]), None, False) if before or after else ("",)
        yield f"  {head}"
        for place, row in enumerate(rows, start=1):
            yield f"{'>' if place == len(before) else ' '} {row}"

    def _help(self, rest: str) -> Iterator[str]:
        if rest and rest not in self._table:
            raise unknown_name("help", "command", rest[:40], self._table)
        for command in [self._table[rest]] if rest else self._table.values():
            yield command.usage
            yield f"    {command.help}"
        if not rest:
            short = ", ".join(f"{alias} {name}" for alias, name in ALIASES.items() if len(alias) < 3)
            yield f"in short: {short}. An empty line moves once more. Ctrl-C breaks off, Ctrl-D leaves"

    def _quit(self, rest: str) -> Iterable[str]:
        self.ended = True
        return ()


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise ConfigurationError(f"{text[:40]!r}: needs a whole number")
    return int(text)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if type(value) is int else repr(value)


def printable(text: str) -> str:
    """Without what would steer the terminal: a log holds whatever a program has written."""
    text = text.rstrip("\n")
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)
