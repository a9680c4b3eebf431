"""The parts of the screen that scroll: curves, and events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from pulsetrain.engine.plain_text import plain
from pulsetrain.runs.live import LiveEvent
from pulsetrain.watch.braille import draw
from pulsetrain.watch.sections import curve_title
from pulsetrain.watch.texts import event_line
from pulsetrain.watch.watched import Watched, curve_names

__all__ = ["COLOURS", "CurveGrid", "CurveView", "EventList"]

COLOURS = ("dodger_blue1", "dark_orange", "green3", "medium_purple1", "cyan", "hot_pink", "yellow3", "grey62")
_EVENTS = 500  # lines of the list
_LINE = 1000  # characters to which a line can be scrolled
_ROWS = 9  # of a curve, with its title


class CurveView(Widget):
    """One metric of the runs; it is drawn only where it is visible.

    Args:
        metric: the name of the curve.
    """

    logarithmic: bool

    DEFAULT_CSS = f"CurveView {{ height: {_ROWS}; margin: 0 1 1 1; }}"

    def __init__(self, metric: str) -> None:
        super().__init__()
        self.metric = metric
        self.runs: list[tuple[int, Watched]] = []  # with their numbers, which decide the colours
        self.logarithmic = False
        self._drawn: Sequence[object] = ()  # the newest points

    def render(self) -> Text:
        """The title with the newest value of each run, and the curves."""
        width, height = self.size.width, self.size.height - 1
        found = Text(plain(self.metric), style="bold") if len(self.runs) > 1 else Text()
        points = []
        for number, each in self.runs:
            curve = each.run.curves.get(self.metric)
            if curve is None:
                continue
            title = curve_title(each, self.metric)
            value = title.removeprefix(plain(self.metric)) if len(self.runs) > 1 else title
            found.append(value, style=COLOURS[number % len(COLOURS)])
            points.append((number, curve.points(4 * width)))
        found.truncate(width, overflow="ellipsis")
        for row in draw([each for _, each in points], width, height, logarithmic=self.logarithmic):
            found.append("\n")
            for curve, cells in groupby(row, key=lambda cell: cell.curve):
                colour = "dim" if curve is None else COLOURS[points[curve][0] % len(COLOURS)]
                found.append("".join(cell.character for cell in cells), style=colour)
        return found

    def draw(self, runs: list[tuple[int, Watched]], logarithmic: bool) -> None:
        """Draw these runs, unless they are drawn already as they are."""
        curves = [each.run.curves.get(self.metric) for _, each in runs]
        state: list[object] = [
            (each.name, None if curve is None else curve.last) for (_, each), curve in zip(runs, curves, strict=True)
        ]
        if state != self._drawn or logarithmic != self.logarithmic:
            self._drawn, self.runs, self.logarithmic = state, runs, logarithmic
            self.refresh()


class CurveGrid(VerticalScroll):
    """The curves of all metrics, below each other."""

    def show(self, runs: Sequence[Watched], numbers: Sequence[int], *, logarithmic: bool) -> None:
        """Draw these runs.

        Args:
            runs: the runs.
            numbers: of each, which decides its colour.
            logarithmic: the scale of the values, where all are positive.
        """
        names = curve_names(runs)
        views = {view.metric: view for view in self.query(CurveView)}
        for name, view in views.items():
            if name not in names:
                view.remove()
        before: CurveView | None = None
        for name in names:
            found = views.get(name)
            if found is None:
                found = CurveView(name)
                self.mount(found, after=before) if before is not None else self.mount(
                    found, before=0 if views else None
                )
            found.draw(list(zip(numbers, runs, strict=True)), logarithmic)
            before = found


class EventList(ScrollView, can_focus=True):
    """The newest events, or the newest ones that a condition selects.

    It stays at the end, or at the same events if it is scrolled up. Only the visible lines are made: a fast run has
    hundreds of events between two looks.
    """

    follows: bool
    virtual_size: Size

    DEFAULT_CSS: ClassVar[str] = "EventList { scrollbar-size: 1 1; scrollbar-size-horizontal: 0; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.events: list[tuple[Watched, LiveEvent]] = []
        self.follows = True  # stays at the end
        self._several = False  # runs

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Note whether the list was scrolled away from its end."""
        super().watch_scroll_y(old_value, new_value)
        self.follows = round(new_value) >= self.max_scroll_y

    def show(self, runs: Sequence[Watched]) -> None:
        """List the events of these runs."""
        found = [(each, event) for each in runs for event in _newest(each)]
        self._several = len(runs) > 1
        if self._several:
            found = sorted(found, key=lambda each: each[1].event.t)[-_EVENTS:]
        top = round(self.scroll_offset.y)
        seen = self.events[top][1] if top < len(self.events) else None
        self.events = found
        self.virtual_size = Size(_LINE, len(found))
        if self.follows:
            self.call_after_refresh(self.scroll_end, animate=False, immediate=True, x_axis=False)
        else:
            there = next((number for number, (_, event) in enumerate(found) if event is seen), 0)
            self.scroll_to(y=there, animate=False, immediate=True, force=True)
        self.refresh()

    def line(self, number: int) -> str:
        """The text of a line."""
        each, event = self.events[number]
        name = f"{each.name}  " if self._several else ""
        return name + event_line(event, with_rank=len(each.run.ranks) > 1)

    def render_line(self, y: int) -> Strip:
        """A line of the visible part."""
        left, top = self.scroll_offset
        number = top + y
        if number >= len(self.events):
            return Strip.blank(self.size.width, self.rich_style)
        style = self.rich_style
        if self.events[number][1].event.event in _ALARMS:
            style += Style(color="red")
        return Strip([Segment(self.line(number), style)]).crop_extend(left, left + self.size.width, self.rich_style)


_ALARMS = frozenset({"anomaly_detected", "exception_raised", "handler_failed", "ranks_diverged", "log_lost"})


def _newest(each: Watched) -> list[LiveEvent]:
    found = each.run.matches if each.run.has_condition else each.run.newest
    return list(found)[-_EVENTS:]
