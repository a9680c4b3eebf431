"""What the files of a run with many ranks take: logs, the manifest and pieces of a checkpoint, run.json."""

from __future__ import annotations

import gc
import io
import math
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from pulsetrain.engine.checkpoint.formats import piece_file, stored_pieces
from pulsetrain.engine.checkpoint.manifest import parse_manifest, seal
from pulsetrain.engine.checkpoint.pieces import Piece, check_cover
from pulsetrain.engine.environment import describe_environment
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.engine.recording.diff.ranks import diff_ranks
from pulsetrain.engine.recording.where import positions, stragglers
from pulsetrain.handlers.run_files.run_file import _listed
from pulsetrain.report.processes import read_processes

__all__ = ["EVENTS", "bytes_of_processes", "log_bytes", "manifest_of", "pieces_of", "read_logs", "write_logs"]

EVENTS = 6  # of an iteration in each rank's log
_T = 1_790_000_000_000_000_000
_STEP = 1_000_003  # nanoseconds between two events


def write_logs(folder: Path, ranks: int, iterations: int, ends: bool = False) -> None:
    """The logs of a run; the last rank has not finished its last iteration."""
    for rank in range(ranks):
        writer = LogWriter(folder / "events", rank)
        seq = ord = 0
        for iteration in range(1, iterations + 1):
            loss = math.exp(-iteration / 1000) + rank / ranks
            events: list[tuple[str, dict[str, Any]]] = [
                ("get_batch_started", {}),
                ("get_batch_completed", {}),
                ("iteration_started", {}),
                ("gradients_ready", {"payload": {"grad_norm": 1 / iteration}}),
                ("optimizer_step_completed", {"payload": {"learning_rates": [1e-3 / iteration]}}),
                ("iteration_completed", {"output": {"loss": loss}, "lr": [1e-3 / iteration]}),
            ]
            if rank == ranks - 1 and iteration == iterations and not ends:
                del events[3:]
            for event, values in events:
                is_fetch = event.startswith("get")
                place = -1 if is_fetch else ord
                logged = LoggedEvent(place, "trainer", event, 1, iteration, seq=seq, t=_T + seq * _STEP, **values)
                writer.add(logged)
                seq, ord = seq + 1, ord + (not is_fetch)
        if ends:
            writer.end()
        writer.close()


def log_bytes(folder: Path, iterations: int) -> float:
    """Bytes that an iteration takes in the sealed log of a rank."""
    write_logs(folder, 1, iterations, ends=True)
    return (folder / "events" / "events.jsonl.zst").stat().st_size / iterations


def read_logs(folder: Path, ranks: int) -> dict[str, float]:
    """Milliseconds of processor time for each log of what reads all of them, and the memory of `where` for each."""
    found = {
        "where": _timed(partial(_where, folder, ranks)) / ranks,
        "diff --ranks": _timed(partial(_compare, folder)) / ranks,
        "report": _timed(partial(read_processes, folder)) / ranks,
    }
    tracemalloc.start()
    kept = positions(folder)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {**found, "bytes": most / len(kept)}


def _where(folder: Path, ranks: int) -> None:
    assert [each.rank for each in stragglers(positions(folder))] == [ranks - 1], "another rank is named"


def _compare(folder: Path) -> None:
    assert not diff_ranks(folder), "the logs differ"


def manifest_of(files: int) -> dict[str, float]:
    """The manifest of a checkpoint of so many ranks: bytes for each, and milliseconds to write and to read it."""
    entries = {
        "state.safetensors" if rank == 0 else f"rank-{rank:05d}.safetensors": {
            "bytes": 1_234_567_890 + rank,
            "sha256": f"{rank:064x}",
        }
        for rank in range(files)
    }
    content = {"format": 4, "step": 1, "name": "checkpoint", "ordinal": 1, "files": entries}
    sealed = seal(content)
    return {
        "bytes": len(sealed) / files,
        "write": _timed(partial(seal, content)),
        "read": _timed(partial(parse_manifest, sealed)),
    }


def pieces_of(files: int, tensors: int) -> dict[str, float]:
    """What each piece costs a process that looks through all files, as the main one does at the end of a save."""
    headers = []
    for rank in range(files):
        pieces = {f"layers.{at}.weight": Piece(torch.zeros(1), (files,), (rank,)) for at in range(tensors)}
        file = io.BytesIO()
        piece_file(pieces)(file)
        headers.append(file.getvalue())
    opened: list[Callable[[], Any]] = [partial(io.BytesIO, header) for header in headers]

    def look() -> None:
        for name, found in stored_pieces(opened).items():
            check_cover(name, (files,), torch.float32, found)

    taken = _timed(look)
    tracemalloc.start()
    kept = stored_pieces(opened)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == tensors
    return {"us": 1e3 * taken / (files * tensors), "bytes": held / (files * tensors)}


def bytes_of_processes(ranks: int) -> int:
    """What run.json holds of so many processes at each start of a run."""
    environment = describe_environment(torch.device("cpu"))
    found = [{"host": f"gpu-{rank // 8:04d}", "pid": 123_456, "environment": environment} for rank in range(ranks)]
    return len(msgspec.json.format(msgspec.json.encode(_listed(found)), indent=2))


def _timed(work: Callable[[], object]) -> float:
    """Milliseconds of processor time: the files are in the page cache."""
    gc.collect()
    gc.freeze()  # else what was made before is looked through as well
    start = time.process_time()
    work()
    taken = time.process_time() - start
    gc.unfreeze()
    return 1e3 * taken
