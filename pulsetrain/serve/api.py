"""What the page asks for: runs, curves, events, differences, what-ifs. Everything is only read."""

from __future__ import annotations

import asyncio
import math
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from pulsetrain.engine.errors import ConfigurationError, PulsetrainError, RunFolderError
from pulsetrain.engine.logs import get_logger
from pulsetrain.engine.metric_words import mode_of
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.diff.compare import diff
from pulsetrain.engine.recording.log.run_file import modes_of, read_run_file
from pulsetrain.engine.recording.where import positions, stragglers
from pulsetrain.handlers.run_files.redaction import redacted
from pulsetrain.report.facts import compared, read_facts, settings_of
from pulsetrain.runs.credentials import LONGEST_PARSED, STRUCTURED, encoding_of, is_private, redacted_text
from pulsetrain.runs.listing import columns_of, reader_of
from pulsetrain.runs.where import select_runs
from pulsetrain.serve.changes import Changes
from pulsetrain.serve.event_pages import events_of
from pulsetrain.serve.series import TOKENS, drawn, tokens_at
from pulsetrain.serve.store import Series, Store, printable
from pulsetrain.serve.sweeps import sweeps_of
from pulsetrain.serve.threads import in_thread
from pulsetrain.serve.whatif import early_stopping, loss_spikes

__all__ = ["routes_of"]

_POINTS = 40_000  # of all runs in one chart together: more than a screen shows, and drawn without delay
_MOST_RUNS = 500  # in one request
_PICTURES = frozenset({".png", ".jpg", ".jpeg", ".gif", ".webp"})
_TEXTS = frozenset({".txt", ".log", ".csv", ".yaml", ".json", ".md"})
_MOST_TEXT = 200_000  # bytes of a file
_JUDGED = ("EarlyStopping", "LossSpikeGuard")
_LARGEST = 2**53  # of whole numbers in a request; larger ones are not exact as a float

Answer = Callable[[Request], Any]


def routes_of(store: Store, changes: Changes) -> list[Route]:
    """The routes below /api."""
    api = _Api(store)

    async def live(request: Request) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            async for names in changes.listen():
                if await request.is_disconnected():
                    return
                found = {name: _brief(store, name) for name in names}
                yield b"data: " + _encoded({"runs": found, "reading": store.reading}) + b"\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    answers: dict[str, Answer] = {
        "runs": api.runs, "curves": api.curves, "names": api.names, "marks": api.marks, "events": api.events,
        "diff": api.diff, "configurations": api.configurations, "whatif": api.whatif, "media": api.media,
        "where": api.where, "sweeps": api.sweeps, "file": api.file,
    }  # fmt: skip
    routes = [Route(f"/api/{name}", _answering(answer)) for name, answer in answers.items()]
    return [*routes, Route("/api/live", live)]


def _answering(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that computes in a thread, and says what is wrong with a request."""

    async def endpoint(request: Request) -> Response:
        try:
            found = await in_thread(answer, request)
            if isinstance(found, Response):
                return found
            if isinstance(found, bytes):
                return Response(found, media_type="application/octet-stream")
            return Response(_encoded(found), media_type="application/json")
        except asyncio.CancelledError:  # the server ends
            return Response(status_code=503)
        except PulsetrainError as error:
            return Response(_encoded({"error": redacted(str(error))}), 400, media_type="application/json")
        except OSError as error:
            return Response(
                _encoded({"error": redacted(f"cannot be read: {error}")}), 404, media_type="application/json"
            )
        except Exception as error:
            reason = redacted(f"{type(error).__name__}: {error}")
            get_logger("serve").error("a request failed", path=request.url.path, reason=reason)
            return Response(_encoded({"error": reason}), 500, media_type="application/json")

    return endpoint


class _Api:
    def __init__(self, store: Store) -> None:
        self._store = store

    def runs(self, request: Request) -> dict[str, Any]:
        """The list, selected by `where`, with the columns that `pulsetrain runs` has."""
        listed = self._store.runs  # one reading of it: the next has other summaries of the same runs
        every = list(listed.values())
        where = request.query_params.get("where") or None
        chosen = {id(each) for each in select_runs(every, where)}
        columns = columns_of(every)
        forked = any(run.parent for run in every)
        by_folder = {str(run.folder.resolve()): name for name, run in listed.items()} if forked else {}
        by_id = {run.id: name for name, run in listed.items() if run.id} if forked else {}
        rows, readers = [], {column: reader_of(column, self._store.root) for column in columns}
        for name, run in listed.items():
            if id(run) in chosen:
                cells = {column: redacted(read(run), column) for column, read in readers.items()}
                parent = dict[str, Any](redacted(run.parent or {}))
                if run.parent is not None:  # which may have been moved, or copied
                    there, its_id = by_folder.get(str(run.parent["run"])), str(run.parent.get("id"))
                    is_it = there is not None and listed[there].id == its_id
                    parent["listed"] = there if is_it else by_id.get(its_id, there)
                rows.append({"id": name, **_status(run), "cells": cells, "parent": parent or None})
        return {"root": str(self._store.root), "columns": columns, "runs": rows, "reading": self._store.reading}

    def names(self, request: Request) -> dict[str, Any]:
        """The names of the curves of some runs, and which runs are still being read."""
        names, validated, pending, errors = dict[str, None](), dict[str, None](), list[str](), dict[str, str]()
        counted = False
        for run, series in self._chosen(request):
            if series is None:
                pending.append(run)
            elif isinstance(series, str):
                errors[run] = series
            else:
                names |= dict.fromkeys(series.about.names)
                validated |= dict.fromkeys([*series.about.validated, *series.about.rolled_out])
                counted = counted or series.about.lengths[-1] > 0
        gone = [run for run in _runs(request) if run not in self._store.runs]
        return {
            "names": list(names), "validated": list(validated), "pending": pending, "errors": errors, "gone": gone,
            "tokens": counted,
        }  # fmt: skip

    def curves(self, request: Request) -> bytes:
        """The points of some curves of some runs between two places, as the page has them in memory."""
        x = request.query_params.get("x", "iteration")
        if x not in ("iteration", "tokens", "time"):
            raise ConfigurationError(f"x={x!r}: has to be iteration, tokens or time")
        low, high = _number(request, "low"), _number(request, "high")
        chosen = [(run, each) for run, each in self._chosen(request) if each is not None and not isinstance(each, str)]
        limit = max(200, min(2000, _POINTS // max(len(chosen), 1)))
        charts: dict[str, dict[str, tuple[NDArray[Any], NDArray[Any]]]]
        charts = {name: {} for name in request.query_params.getlist("name")}
        uncounted = []
        for run, each in chosen:
            series = each.opened()  # dropped with what it has mapped before the next one
            found = {name: points for name in charts if (points := series.points(name)) is not None}
            counted = series.points(TOKENS) if x == "tokens" else None
            if found and x == "tokens" and (counted is None or not len(counted[0])):
                uncounted.append(run)
                continue
            for name, (at, seconds, values) in found.items():
                places = tokens_at(counted, at) if counted is not None else at if x == "iteration" else seconds
                charts[name][run] = drawn(places, values, low, high, limit)
        lines = {name: [(run, len(at)) for run, (at, _) in chart.items()] for name, chart in charts.items()}
        numbers = [part for chart in charts.values() for line in chart.values() for part in line]
        head = _encoded({"charts": lines, "uncounted": uncounted})
        head += b" " * (-len(head) % 8)
        return b"".join([len(head).to_bytes(8, "little"), head, *(each.tobytes() for each in numbers)])

    def marks(self, request: Request) -> dict[str, Any]:
        """What happened when, of some runs."""
        return {
            run: _moments(series)
            for run, series in self._chosen(request)
            if series is not None and not isinstance(series, str)
        }

    def events(self, request: Request) -> dict[str, Any]:
        """A page of a run's events, by the condition language of `pulsetrain events`."""
        asked = request.query_params
        log = EventLog(self._store.run(asked.get("run", "")).folder, _whole(request, "rank", 0))
        before = _number(request, "before")
        return events_of(
            log, where=asked.get("where", ""), types=asked["event"].split(",") if asked.get("event") else None,
            superseded=asked.get("superseded") == "1", after=_whole(request, "after", 0),
            before=None if before is None else int(before), newest=asked.get("newest") == "1",
        )  # fmt: skip

    def diff(self, request: Request) -> dict[str, Any]:
        """The first event in which two runs differ, and how the difference grows."""
        a, b = (EventLog(self._store.run(request.query_params.get(side, "")).folder) for side in "ab")
        found = diff(a, b, rtol=_number(request, "rtol") or 0.0)
        return {"report": redacted(found.report(growth=True)), **redacted(found.as_dict())}

    def configurations(self, request: Request) -> list[dict[str, Any]]:
        """The settings of some runs side by side; those that differ come first."""
        facts = [read_facts(self._store.run(run).folder) for run in _runs(request)]
        rows = [*compared(settings_of(facts)), *compared([each.environment for each in facts])]
        return [{"key": row.key, "values": redacted(list(row.values), row.key), "differs": row.differs} for row in rows]

    def whatif(self, request: Request) -> dict[str, Any]:
        """What a handler would have done in some runs."""
        asked, answers = request.query_params, dict[str, Any]()
        if (handler := asked.get("handler", _JUDGED[0])) not in _JUDGED:
            raise ConfigurationError(f"handler={handler!r}: is not judged here; choose {' or '.join(_JUDGED)}")
        for run, series in self._chosen(request):
            if series is None or isinstance(series, str):
                answers[run] = {"error": series or "is being read"}
            elif handler == "LossSpikeGuard":
                numbers = _number(request, "threshold"), _whole(request, "window", 100), _whole(request, "patience", 10)
                answers[run] = loss_spikes(
                    series.opened(), asked.get("metric", "loss"), numbers[0] or 10.0, *numbers[1:]
                )
            else:
                metric = asked.get("metric", "val/loss")
                modes = modes_of(read_run_file(self._store.run(run).folder))
                given = asked.get("mode") or mode_of(metric, modes)
                patience, least = _whole(request, "patience", 5), _number(request, "min_delta") or 0.0
                answers[run] = early_stopping(series.opened(), metric, patience, least, given)
        return answers

    def media(self, request: Request) -> dict[str, Any]:
        """Pictures and texts of a run."""
        name = request.query_params.get("run", "")
        folder = self._store.run(name).folder
        files = []
        for path in islice(sorted(folder.rglob("*")), 20_000):
            within = path.relative_to(folder)
            if "checkpoints" not in within.parts and _is_open(path, folder):
                kind = "picture" if path.suffix.lower() in _PICTURES else "text"
                status = path.stat()
                size, changed = status.st_size, status.st_mtime
                files.append({"path": within.as_posix(), "kind": kind, "size": size, "changed": changed})
        series = self._store.series(name)
        texts = redacted(dict(series.happened().texts)) if series is not None and not isinstance(series, str) else {}
        return {"files": files, "texts": texts}

    def file(self, request: Request) -> Response:
        """A picture or a text of a run; nothing else, and nothing outside of its folder."""
        folder = self._store.run(request.query_params.get("run", "")).folder
        path = folder / request.query_params.get("path", "")
        if not _is_open(path, folder):
            return Response(_encoded({"error": "is not a picture or a text of the run"}), 404)
        if path.suffix.lower() in _PICTURES:
            return Response(path.read_bytes(), media_type=mimetypes.guess_type(path.name)[0])
        is_structured = path.suffix.lower() in STRUCTURED
        with path.open("rb") as opened:
            content = opened.read(LONGEST_PARSED if is_structured else _MOST_TEXT)
            content += opened.readline(_MOST_TEXT)  # a credential at the end is whole
            size = path.stat().st_size
        text = redacted_text(content.decode(encoding_of(content), errors="replace"), path.suffix).encode()
        shown = text[:_MOST_TEXT]
        left = len(text) - len(shown) + max(0, size - len(content))
        more = f"\n... and {left:,} more bytes" if left else ""
        return Response(shown.decode(errors="ignore") + more, media_type="text/plain; charset=utf-8")

    def where(self, request: Request) -> list[dict[str, Any]]:
        """Where each process of a run is; of one that hangs, the newest stack that it has recorded."""
        found = positions(self._store.run(request.query_params.get("run", "")).folder)
        last = stragglers(found)
        return [
            {
                "rank": each.rank, "event": each.event.event, "iteration": each.event.iteration,
                "time": each.event.t / 1e9, "activity": each.activity, "ended": each.ended,
                "stack": [] if each.stall is None else [redacted(line) for line in each.stall.stack],
                "waited_for": each in last,
            }
            for each in found
        ]  # fmt: skip

    def sweeps(self, request: Request) -> list[dict[str, Any]]:
        """The sweeps below the folder."""
        return sweeps_of(self._store.sweeps, dict(self._store.runs), self._store.root)

    def _chosen(self, request: Request) -> Sequence[tuple[str, Series | str | None]]:
        """The curves of the runs that are asked for, without those that were removed meanwhile."""
        found = []
        for run in _runs(request):
            with suppress(RunFolderError):
                found.append((run, self._store.series(run)))
        return found


def _moments(series: Series) -> dict[str, Any]:
    found, about = series.happened(), series.about
    times = {"first": about.first, "last": about.last}
    return {"marks": redacted(found.marks), "custom": redacted(found.custom), **times}


def _runs(request: Request) -> list[str]:
    found = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(found) > _MOST_RUNS:
        raise ConfigurationError(f"run={len(found)} runs: at most {_MOST_RUNS} are drawn at once; select fewer")
    return found


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigurationError(f"{name}={text!r}: has to be a number")
    return number


def _whole(request: Request, name: str, default: int) -> int:
    number = _number(request, name)
    if number is not None and abs(number) > _LARGEST:
        text = request.query_params[name]
        raise ConfigurationError(f"{name}={text!r}: is too large; choose a whole number of at most {_LARGEST}")
    return default if number is None else int(number)


def _is_open(path: Path, folder: Path) -> bool:
    """Whether a file may be shown: a picture or a text inside of the folder, also after links are followed."""
    if path.suffix.lower() not in _PICTURES | _TEXTS or is_private(path.name):
        return False
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # a name that no file can have
        return False


def _status(run: Any) -> dict[str, Any]:
    return {
        "status": run.status.value, "reason": redacted(run.reason), "epoch": run.epoch, "iteration": run.iteration,
        "progress": run.progress, "updated": run.updated, "best": run.best, "last": run.last,
        "tags": redacted(list(run.tags)),
    }  # fmt: skip


def _brief(store: Store, name: str) -> dict[str, Any] | None:
    run = store.runs.get(name)
    return None if run is None else _status(run)


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(_utf8(value))  # values that are not finite become null


def _utf8(value: Any) -> Any:
    """Texts that UTF-8 can hold: names of folders may be any bytes."""
    if isinstance(value, str):
        return value if value.isascii() else printable(value)
    if isinstance(value, dict):
        return {_utf8(key): _utf8(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], float | int):
        return value
    return [_utf8(each) for each in value] if isinstance(value, list | tuple) else value
