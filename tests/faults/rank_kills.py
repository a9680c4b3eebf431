"""Kills random ranks of runs of two processes, resumes them, and compares each with a run that was never killed.

    python -m tests.faults.rank_kills --kills 100

The runs train by turns copies of the model, shards, shards that are saved in the background, and virtual ranks, where
each attempt has one or two processes. Half
of the kills come at a random moment of a random rank, half at a random call to the operating system inside a save. In
most attempts the other rank is killed shortly after; in the others it has to end by itself, within 15 s. Each run is
compared with the whole one by the bits of its weights and of the losses that it reported, its checkpoints are checked
for damage, and the logs of both ranks for damage and for differences between them. Prints what was done as JSON; exits
with 1 at the first fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer
from pulsetrain.engine import Every, TorchBackend
from pulsetrain.engine.checkpoint import CheckpointManager, disk
from pulsetrain.engine.distributed.shards import local
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.diff.ranks import diff_ranks
from pulsetrain.engine.recording.log.reader import logged_ranks
from pulsetrain.handlers import EMA, Checkpointer, EventRecorder, Fingerprints
from tests.faults.kills import MortalOs
from tests.support.models import pairs
from tests.support.ranks import Ended, in_processes
from tests.support.runs_of_ranks import make_with

EPOCHS, ROWS, BATCH = 6, 34, 4  # 54 iterations
LENGTH = 1.2  # seconds of a run, about
CALLS = 250  # that the saves of a run make at most, and more
KINDS = ("copies", "shards", "shards, in the background", "virtual ranks")
WHAT = ("weights", "means of epochs", "losses at log points")
LEAVES = 0.15  # of the attempts in which the other rank is left to itself
WAIT = 15.0  # seconds that it has


@dataclass
class Done:
    """What was done."""

    runs: int = 0
    kills: int = 0
    kills_of_rank: tuple[int, int] = (0, 0)
    kills_in_saves: int = 0
    kills_of_shards: int = 0
    left_alone: int = 0
    finished_before: int = 0  # attempts that ended before they were killed
    longest_wait: float = 0.0  # seconds until a rank that was left alone had ended


def victim(folder: Path, kind: str) -> Trainer:
    """A run whose steps draw random numbers, and which saves at each fourth iteration."""
    sharded = "shards" in kind
    topology = {"shards": Topology(shard=2), "virtual": Topology(virtual=4, reduction="tree")}.get(
        kind.replace(",", " ").split()[0]
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    handlers = [
        Checkpointer(folder, every=Every(iterations=4), keep_last=3, background="background" in kind),
        EventRecorder(folder),
        *([] if sharded else [EMA(decay=0.9)]),
        Fingerprints(Every(iterations=6)),
    ]
    return make_with(
        model,
        DataLoader(pairs(ROWS), BATCH, shuffle=True),
        None,
        *handlers,
        backend=TorchBackend("cpu", topology=topology),
        max_epochs=EPOCHS,
        optimizer="adamw",
        learning_rate=1e-2,
        accumulate=2,
        clip_grad_norm=1.0,
        log_every_n_steps=7,  # not where a checkpoint is: each rank has losses then that were not reported
    )


def bits(made: Trainer, folder: Path) -> tuple[list[bytes], list[float], list[tuple[int, float]]]:
    """The weights, or this process's part of them; the mean losses of the epochs, and those of the log points."""
    weights = [local(each.detach()).numpy().tobytes() for each in made.model.parameters()]
    rank = next(each.rank for each in made.handlers if isinstance(each, EventRecorder))
    logged = [
        (each.iteration, each.payload["metrics"]["train/loss"])
        for each in EventLog(folder, rank).read(event="metrics_logged")
        if each.payload is not None
    ]
    return weights, made.history.get_history()["train/loss"], logged


def attempt(folder: Path, kind: str, dice: random.Random, done: Done) -> list[Ended]:
    """One attempt to finish the run, in which a rank may be killed."""
    world = dice.choice((1, 2)) if kind == "virtual ranks" else 2
    who, in_save, left = dice.randrange(world), dice.random() < 0.5, dice.random() < LEAVES
    who = 0 if in_save and "shards" not in kind else who  # the main process saves
    delay, calls = dice.uniform(0.05, LENGTH), dice.randrange(1, CALLS)
    died = folder.parent / "died"
    died.unlink(missing_ok=True)

    def die() -> None:
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def follow() -> None:
        while not died.exists():
            time.sleep(0.01)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    def body(rank: int) -> Any:
        if world == 1:
            del os.environ["RANK"], os.environ["WORLD_SIZE"]
        if rank == who and in_save:
            disk.os = MortalOs(calls, die)  # type: ignore[assignment]
        elif rank != who and not left:
            threading.Thread(target=follow, daemon=True).start()
        made = victim(folder, kind)
        if rank == who and not in_save:  # once they have met: else the other one says that it has not come
            threading.Timer(delay, die).start()
        with structlog.testing.capture_logs():
            made.train(resume="latest")
        return bits(made, folder)

    ended = in_processes(body, world, limit=LENGTH * 10 + WAIT + 10)
    if ended[who].status == -signal.SIGKILL:
        done.kills += 1
        done.kills_in_saves += in_save
        done.kills_of_shards += "shards" in kind
        done.kills_of_rank = (done.kills_of_rank[0] + (who == 0), done.kills_of_rank[1] + (who == 1))
        if left and world > 1:
            done.left_alone += 1
            done.longest_wait = max(done.longest_wait, time.time() - died.stat().st_mtime)
    elif not any(each.error for each in ended):
        done.finished_before += 1
    return ended


def faults(folder: Path, kind: str, ended: list[Ended], expected: list[Ended]) -> list[str]:
    """What is wrong with a run that has been finished."""
    found = []
    for rank, each in enumerate(ended):
        parts = list(zip(WHAT, each.value, expected[rank].value, strict=True))
        if rank and kind == "virtual ranks":  # it was left out in some attempts, which its log lacks
            parts.pop()
        found += [f"rank {rank}: other {what}" for what, mine, whole in parts if mine != whole]
    manager = CheckpointManager(folder / "checkpoints")
    if not manager.valid():
        found.append("no valid checkpoint")
    logged = logged_ranks(folder)
    for rank in logged:
        found += [f"log of rank {rank}: {each}" for each in EventLog(folder, rank).verify()]
    difference = diff_ranks(folder) if len(logged) > 1 else None
    return [*found, str(difference)] if difference else found


def damaged(folder: Path) -> list[str]:
    """Checkpoints of a killed run that are there and not valid."""
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir():
        return []
    valid = {each.name for each in CheckpointManager(checkpoints).valid()}
    present = {each.name for each in checkpoints.iterdir() if each.name[0].isdigit()}
    return sorted(present - valid)


def kill_and_resume(kills: int, seed: int, memory: Path) -> tuple[Done, list[str]]:
    """Until so many ranks were killed, or something is wrong."""
    dice, done = random.Random(seed), Done()
    whole = {kind: in_processes(lambda rank, kind=kind: bits_of_run(memory / kind, kind)) for kind in KINDS}  # type: ignore[misc]
    for each in (each for pair in whole.values() for each in pair):
        assert not each.error, each.error
    while done.kills < kills:
        folder = memory / f"run-{done.runs}" / "run"
        folder.mkdir(parents=True)
        kind = KINDS[done.runs % len(KINDS)]
        done.runs += 1
        while True:
            ended = attempt(folder, kind, dice, done)
            if (broken := damaged(folder)) != []:
                return done, [f"damaged: {broken}"]
            if not any(each.error or each.status for each in ended):
                break
            failed = [each.error for each in ended if each.status not in (0, -signal.SIGKILL)]
            strange = [error for error in failed if "PeerFailed" not in error]
            if strange:
                return done, strange
        if wrong := faults(folder, kind, ended, whole[kind]):
            return done, [f"{kind}: {each}" for each in wrong]
        shutil.rmtree(folder.parent)
    return done, []


def bits_of_run(folder: Path, kind: str) -> Any:
    """Those of a run that nobody kills."""
    made = victim(folder, kind)
    with structlog.testing.capture_logs():
        made.train()
    return bits(made, folder)


def main() -> int:
    """Kill, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as memory:
        done, wrong = kill_and_resume(options.kills, options.seed, Path(memory))
    print(json.dumps({**asdict(done), "seconds": round(time.monotonic() - begun), "faults": wrong}, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
