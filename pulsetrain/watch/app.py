"""The screen of `pulsetrain watch`, which polls the logs four times a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, Input, Static

from pulsetrain.engine.errors import PulsetrainError
from pulsetrain.engine.recording.log.predicate import predicate
from pulsetrain.watch.sections import mark_lines, process_lines, progress_line, speed_line
from pulsetrain.watch.watched import Watched
from pulsetrain.watch.widgets import COLOURS, CurveGrid, EventList

__all__ = ["POLL", "WatchApp"]

POLL = 0.25  # seconds between two looks at the logs
_PART = 0.2  # seconds to read a long log before the screen is drawn again
_ANOMALIES, _CHECKPOINTS = 8, 30  # that are listed at most


class WatchApp(App[None]):
    """Shows runs until the user quits.

    Args:
        runs: the runs.
        where: the condition by which their events are selected, as text; the runs have it already.
        poll: seconds between two looks at the logs.
    """

    where: str
    is_paused: bool
    compares: bool
    logarithmic: bool
    chosen: int

    ENABLE_COMMAND_PALETTE: ClassVar[bool] = False
    CSS: ClassVar[str] = """
    Screen { layout: vertical; }
    #runs { height: auto; max-height: 8; padding: 0 1; }
    #problems { height: auto; max-height: 6; padding: 0 1; color: $warning; display: none; }
    #middle { height: 1fr; }
    #curves { width: 2fr; border: round $panel; }
    #side { width: 1fr; min-width: 62; border: round $panel; padding: 0 1; }
    #curves:focus, #side:focus, #events:focus { border: round $accent; }
    #events { height: 30%; min-height: 6; border: round $panel; }
    #condition { display: none; }
    #wrong { height: auto; display: none; color: $error; padding: 0 1; }
    .-narrow #middle { layout: vertical; }
    .-narrow #curves, .-narrow #side { width: 100%; min-width: 0; }
    .-narrow #side { height: 8; }
    """
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (130, "-wide")]  # noqa: RUF012  # its type
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space,p", "pause", "Pause"),
        Binding("c", "compare", "Compare"),
        Binding("n", "next_run", "Next run"),
        Binding("l", "scale", "Log scale"),
        Binding("slash,f", "ask", "Filter"),
        Binding("escape", "leave", "Close the filter", show=False),
        Binding("tab", "app.focus_next", "Scroll"),
        Binding("q,ctrl+c", "quit", "Quit", priority=False),
    ]

    def __init__(self, runs: Sequence[Watched], where: str = "", *, poll: float = POLL) -> None:
        super().__init__()
        self.runs: list[Watched] = list(runs)
        self.where, self._poll = where, poll
        self.is_paused = False
        self.compares = len(self.runs) > 1
        self._texts: dict[str, Text] = {}  # that are on the screen
        self._is_drawn = False  # whether the curves were drawn
        self.logarithmic = False  # the scale of the curves
        self.chosen = 0  # the run that is shown, where runs are not compared

    def compose(self) -> ComposeResult:
        yield Static(id="runs", markup=False)
        yield Static(id="problems", markup=False)
        with Horizontal(id="middle"):
            yield CurveGrid(id="curves")
            with VerticalScroll(id="side"):
                yield Static(id="facts", markup=False)
        yield EventList(id="events")
        yield Static(id="wrong", markup=False)
        yield Input(self.where, id="condition", placeholder='a condition, such as event == "validation_completed"')
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#curves").focus()
        self.set_interval(self._poll, self.look)
        self.set_timer(0.01, self.look)

    @property
    def shown(self) -> list[Watched]:
        """The runs whose curves are drawn."""
        return self.runs if self.compares else [self.runs[self.chosen]]

    def look(self) -> None:
        """Read what is new, and show it."""
        if self.is_paused or not self.query("#runs"):  # the application ends
            return
        changed = [each.update(_PART / len(self.runs)) for each in self.runs]
        is_partial = any(each.run.share_read < 1.0 for each in self.runs)
        self.show(curves=not is_partial and (any(changed) or not self._is_drawn))
        if is_partial:  # the keys and the screen come first
            self.set_timer(0.01, self.look)

    def show(self, *, curves: bool = True) -> None:
        """Draw the screen; without `curves`, only what changes with time."""
        problems = [line for each in self.runs for line in each.problems]
        self._put("#runs", self._headlines())
        self._put("#problems", Text("\n".join(problems)))
        self.query_one("#problems").display = bool(problems)
        self._put("#facts", Text("\n").join(self._facts()))
        if curves:
            self._is_drawn = True
            numbers = [self.runs.index(each) for each in self.shown]
            self.query_one(CurveGrid).show(self.shown, numbers, logarithmic=self.logarithmic)
            self.query_one(EventList).show(self.shown)

    def _put(self, place: str, text: Text) -> None:
        """Replace a text, unless it is the same; the screen is laid out again only where that takes other lines."""
        before, box = self._texts.get(place, Text()), self.query_one(place, Static)
        if before != text:
            self._texts[place] = text
            box.update(text, layout=_rows(before, box.size.width) != _rows(text, box.size.width))

    def _headlines(self) -> Text:
        paused = Text("paused, while the runs continue; press space to catch up", style="reverse")
        lines = [paused] if self.is_paused else []
        for number, each in enumerate(self.runs):
            style = COLOURS[number % len(COLOURS)]
            sign = "●" if each in self.shown else "○"
            lines.append(Text.assemble((f"{sign} ", style), progress_line(each), (f"  {speed_line(each)}", "dim")))
        return Text("\n").join(lines)

    def _facts(self) -> list[Text]:
        lines: list[Text] = []
        for each in self.shown:
            if len(self.shown) > 1:
                lines.append(Text(each.name, style=COLOURS[self.runs.index(each) % len(COLOURS)]))
            lines += [Text(line, style="bold red" if "wait" in line else "") for line in process_lines(each)]
            anomalies = mark_lines(each, "anomalies", _ANOMALIES)
            lines += [Text(), Text("anomalies", style="bold"), *(Text(line, style="red") for line in anomalies)]
            lines += [Text("         none", style="dim")] if not anomalies else []
            saved = mark_lines(each, "checkpoints", _CHECKPOINTS)
            lines += [Text(), Text("checkpoints", style="bold"), *map(Text, saved)]
            lines += [Text("         none", style="dim")] if not saved else []
        return lines

    def action_pause(self) -> None:
        """Stop reading, or catch up with what was written meanwhile."""
        self.is_paused = not self.is_paused
        self.show(curves=False)
        self.look()

    def action_compare(self) -> None:
        """Draw all runs, or one."""
        if len(self.runs) > 1:
            self.compares = not self.compares
            self.show()

    def action_next_run(self) -> None:
        """Draw the next run alone."""
        self.chosen = (self.chosen + (not self.compares)) % len(self.runs)
        self.compares = False
        self.show()

    def action_scale(self) -> None:
        """Draw the curves on a logarithmic scale, or a linear one."""
        self.logarithmic = not self.logarithmic
        self.show()

    def action_ask(self) -> None:
        """Ask for a condition."""
        box = self.query_one("#condition", Input)
        box.display = True
        box.focus()

    def action_leave(self) -> None:
        """Close the filter; its condition stays."""
        box, wrong = self.query_one("#condition", Input), self.query_one("#wrong", Static)
        box.value = self.where
        box.display = wrong.display = False
        self.query_one("#curves").focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Select the events."""
        wrong, text = self.query_one("#wrong", Static), event.value.strip()
        try:
            for each in self.runs:
                each.run.filter(predicate(text) if text else None)
        except (PulsetrainError, OSError) as error:  # the condition is none, or the log cannot be read any more
            wrong.update(str(error))
            wrong.display = True
            return
        self.where = text
        self.action_leave()
        self.query_one(EventList).show(self.shown)


def _rows(text: Text, width: int) -> int:
    """About how many rows the text takes."""
    return sum(1 + line.cell_len // max(width, 1) for line in text.split(allow_blank=True))
