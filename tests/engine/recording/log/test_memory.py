"""Reading a long log takes no more memory than reading a short one."""

from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from pulsetrain.engine import Events
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter, Replay, diff

SHORT, LONG = 8_192, 65_536  # events


def write(folder: Path, events: int, *, shift: float = 0.0) -> Path:
    writer = LogWriter(folder / "events")
    for n in range(events):
        logged = LoggedEvent(n, "trainer", "iteration_completed", 1, n + 1, seq=n, t=1_790_000_000_000_000_000 + n)
        logged.output = {"loss": n * 0.37 % 7 + shift}
        writer.add(logged)
    writer.end()
    writer.close()
    return folder


def read(a: Path, b: Path) -> None:
    deque(EventLog(a).read(), maxlen=0)


def query(a: Path, b: Path) -> None:
    deque(EventLog(a).read(event="iteration_completed", where=lambda event: event.iteration % 7 == 0), maxlen=0)


def replay(a: Path, b: Path) -> None:
    replayed = Replay(a)
    heard = []
    replayed.add_event_handler(Events.ITERATION_COMPLETED(every=1000), lambda engine: heard.append(engine.state.output))
    replayed.run()
    assert len(heard) in (SHORT // 1000, LONG // 1000)


def compare(a: Path, b: Path) -> None:
    assert "iteration_completed" in diff(a, b).report()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("logs")
    return {n: (write(folder / f"a{n}", n), write(folder / f"b{n}", n, shift=1.0)) for n in (SHORT, LONG)}


@pytest.mark.slow
@pytest.mark.parametrize("reader", [read, query, replay, compare])
def test_memory_is_flat_however_long_the_log_is(
    reader: Callable[[Path, Path], None], logs: dict[int, tuple[Path, Path]]
):
    reader(*logs[SHORT])  # imports and caches
    peaks = {}
    for events, sides in logs.items():
        tracemalloc.start()
        try:
            reader(*sides)
            peaks[events] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    # the headers of blocks take a few bytes per event; an event itself takes hundreds
    assert peaks[LONG] - peaks[SHORT] < 6 * (LONG - SHORT)
