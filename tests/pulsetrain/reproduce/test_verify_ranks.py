"""A run of several processes is verified by as many: each compares its own log, and all get one result."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.utils.data import DataLoader

from pulsetrain import Trainer, verify
from pulsetrain.engine import Events, Every, TorchBackend
from pulsetrain.engine.checkpoint.manifest import seal, unseal
from pulsetrain.engine.distributed.topology import Topology
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.engine.recording.log.records import without_observed
from pulsetrain.handlers import Checkpointer, EventRecorder, Fingerprints
from pulsetrain.reproduce.processes import processes_of
from tests.support.models import pairs
from tests.support.ranks import in_processes
from tests.support.runs_of_ranks import linear, make_with

ITERATIONS = 40


def build(run: Path, *handlers: Any, model: nn.Module | None = None, **config: Any) -> Trainer:
    made = [
        *(
            EventRecorder(run),
            Checkpointer(run, every=Every(iterations=7), keep_last=20),
            Fingerprints(Every(iterations=5)),
        ),
        *handlers,
    ]
    data = DataLoader(pairs(40), 4, shuffle=True)
    settings = {"max_epochs": 4, "clip_grad_norm": 1.0, "optimizer": "adamw", "learning_rate": 0.01}
    settings["log_every_n_steps"] = 15  # not where the runs are saved or stopped
    model = linear() if model is None else model
    return make_with(model, data, DataLoader(pairs(10), 4), *made, **{**settings, **config})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    assert {each.error for each in in_processes(lambda rank: len(build(folder).train()))} == {""}
    return folder


def rewrite(run: Path, rank: int, change: Callable[[LoggedEvent], LoggedEvent | None]) -> None:
    """Give a rank a log that is sound, with other events."""
    log = EventLog(run, rank)
    events, folder, run_id = [*log.read()], log.folder, log.run_id
    for file in log_files(folder, rank):
        file.unlink()
    writer = LogWriter(folder, rank, run=run_id)
    for event in events:  # those of reading, which merges measured values into the payload
        changed = change(event if event.event == "started" else without_observed(event))
        if changed is None:
            break
        writer.add(changed)
    writer.end()
    writer.close()
    assert EventLog(run, rank).verify() == []


def with_another_loss(event: LoggedEvent) -> LoggedEvent:
    if (event.event, event.iteration) != ("iteration_completed", 12):
        return event
    return replace(event, output={"loss": event.output["loss"] * (1 + 2**-23)})


def cut_at(iteration: int) -> Callable[[LoggedEvent], LoggedEvent | None]:
    """End the log after this iteration."""
    return lambda event: None if event.engine == "trainer" and event.iteration > iteration else event


def remove(run: Path, rank: int) -> None:
    for file in log_files(run / "events", rank):
        file.unlink()


def damage(run: Path, rank: int) -> None:
    file, _ = log_files(run / "events", rank)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)


def failing(run: Path, rank: int, at: int) -> Trainer:
    made = build(run)
    if rank == 1:
        made.on(Events.ITERATION_STARTED(once=at))(lambda: [][0])
    return made


def stopping(run: Path, rank: int) -> Trainer:
    """Ends in the middle, as one rank asks."""
    made = build(run)
    if rank == 1:
        made.on(Events.ITERATION_COMPLETED(once=16))(lambda: made.terminate(reason="enough"))
    return made


def results(cases: dict[str, Callable[[int], Any]], world: int = 2) -> dict[str, Any]:
    """What each case gives in every rank, by its name; the verifications have to be the same."""

    def body(rank: int) -> dict[str, Any]:
        return {name: case(rank) for name, case in cases.items()}

    ended = in_processes(body, world)
    assert [each.error for each in ended] == [""] * world, [each.stderr for each in ended]
    first = ended[0].value
    assert [{name: str(found) for name, found in each.value.items()} for each in ended] == [
        {name: str(found) for name, found in first.items()}
    ] * world
    return dict(first)


def test_every_rank_compares_its_own_log(recorded: Path, tmp_path: Path):
    """Tampered logs of rank 1: what rank 0 alone would call reproduced."""
    changes: dict[str, Callable[[Path], None]] = {
        "whole": lambda run: None,
        "part": lambda run: None,
        "another loss": lambda run: rewrite(run, 1, with_another_loss),
        "after it": lambda run: rewrite(run, 1, with_another_loss),
        "rank 0": lambda run: rewrite(run, 0, with_another_loss),
        "empty": lambda run: rewrite(run, 1, lambda event: None),
        "observed": lambda run: rewrite(run, 1, lambda event: replace(event, ord=-1)),
        "short": lambda run: rewrite(run, 1, cut_at(20)),
        "up to there": lambda run: rewrite(run, 1, cut_at(20)),
        "missing": lambda run: remove(run, 1),
        "rank 0 missing": lambda run: remove(run, 0),
        "damaged": lambda run: damage(run, 1),
        "another rate": lambda run: None,
    }
    options = {
        "part": {"from_iteration": 12, "to_iteration": 20},
        "after it": {"from_iteration": 15},
        "up to there": {"to_iteration": 20},
    }
    runs = {name: shutil.copytree(recorded, tmp_path / name) for name in changes}
    for name, change in changes.items():
        change(runs[name])

    def case(name: str) -> Callable[[int], Any]:
        rate = 0.02 if name == "another rate" else 0.01
        return lambda rank: verify(
            runs[name], lambda folder: build(folder, learning_rate=rate), **options.get(name, {})
        )

    found = results({name: case(name) for name in changes})

    whole = found["whole"]
    assert whole, str(whole)
    assert (whole.start, whole.end, whole.checkpoints) == (0, ITERATIONS, (7, 14, 21, 28, 35, 40))
    agreed = [whole.agreed, *(each.agreed for each in whole.others)]
    for rank, count in enumerate(agreed):
        assert count == sum(event.ord >= 0 for event in EventLog(recorded, rank).read())
    assert f"reproduced, {sum(agreed)} events of 2 processes agree bit for bit" in str(whole)

    part = found["part"]
    assert part, str(part)
    assert (part.start, part.end, part.checkpoints) == (7, 20, (14,))
    assert part.others[0].agreed > 13 * 5
    assert found["after it"], str(found["after it"])
    assert found["up to there"], str(found["up to there"])

    other = found["another loss"]
    assert not other
    assert (other.differs, other.rank, other.divergence.a.iteration) == (True, 1, 12)
    assert list(other.divergence.fields) == ["output.loss"]
    assert "iterations 1 to 12, rank 1: not reproduced, after" in str(other)
    assert "first difference: event " in str(other)
    assert "rank 0: not proven: " in str(other)
    assert not other.others[0].differs_here
    assert [(found["rank 0"].rank, each.rank) for each in found["rank 0"].others] == [(0, 1)]

    for name, reason in {
        "empty": "the log of rank 1 ends at iteration 0, and nothing was trained",
        "short": "the log of this process ends at iteration 20, and another one at 40",
        "observed": "the log of this process holds no event that can be compared",
        "missing": "nothing was trained: .*: has no log of rank 1; there are the logs of these ranks: 0",
        "rank 0 missing": "nothing was trained: .*: has no log of rank 0; there are the logs of these ranks: 1",
        "damaged": "the log is damaged",
    }.items():
        assert not found[name], name
        assert not found[name].differs, str(found[name])
        assert re.search(f"not proven: .*, but {reason}", str(found[name])), str(found[name])
    assert found["damaged"].rank == 1
    assert "damaged: events.rank1.jsonl.zst" in str(found["damaged"])

    rate = found["another rate"]
    assert (rate.differs, rate.rank, rate.divergence.a.iteration) == (True, 0, 1)
    assert [each.differs_here for each in rate.others] == [True]
    assert "rank 1: not reproduced, after " in str(rate)
    assert "learning_rate: 0.01 -> 0.02" in str(rate)


def test_another_number_of_processes_is_refused_before_anything_is_made(recorded: Path, tmp_path: Path):
    command = rf"--launch.nproc 2, or torchrun --nproc_per_node 2 -m pulsetrain verify {recorded}"
    with pytest.raises(ConfigurationError, match=f"was trained by 2 processes, and 1 process would.* {command}"):
        verify(recorded, lambda: pytest.fail("made a trainer"))
    one = tmp_path / "one"
    build(one).train()
    for each in in_processes(lambda rank: verify(one, lambda: os._exit(1))):
        said = each.error.splitlines()[-1]
        assert re.search(rf"by 1 process, and 2 processes would repeat it.*: pulsetrain verify {one}$", said)


@pytest.mark.slow
def test_iterations_of_several_numbers_of_processes_are_refused(tmp_path: Path):
    """Two, then one, then two again."""

    def train(rank: int, until: int) -> None:
        made = build(tmp_path)
        made.on(Events.ITERATION_COMPLETED(once=until))(lambda: made.terminate(alike=True))
        made.train(resume="latest")

    for world, until in ((2, 12), (1, 24), (2, 100)):
        assert {each.error for each in in_processes(partial(train, until=until), world)} == {""}
    assert [(each.first, each.last, each.processes) for each in processes_of(tmp_path)] == [
        (1, 12, 2), (13, 24, 1), (25, None, 2),
    ]  # fmt: skip
    said = "iterations 1 to 12 were trained by 2 processes, and iterations 13 to 24 by 1 process"
    with pytest.raises(ConfigurationError, match=said):
        verify(tmp_path, build)
    in_one = verify(tmp_path, build, from_iteration=15, to_iteration=24)
    assert in_one, str(in_one)
    found = results(
        {
            "first": lambda rank: verify(tmp_path, build, to_iteration=12),
            "last": lambda rank: verify(tmp_path, build, from_iteration=25),
        }
    )
    assert found["first"], str(found["first"])
    assert found["last"], str(found["last"])
    assert (found["last"].start, found["last"].end) == (24, ITERATIONS)


@pytest.mark.slow
def test_runs_that_were_killed_or_ended_early_are_repeated(tmp_path: Path):
    def kill(rank: int, run: Path) -> None:
        made = build(run)
        made.on(Events.ITERATION_COMPLETED(once=18))(lambda: os.kill(os.getpid(), signal.SIGKILL))
        made.train()

    def stop(rank: int, run: Path) -> None:
        stopping(run, rank).train()

    def finish(rank: int, run: Path) -> None:
        build(run).train(resume="latest")

    killed, stopped, resumed = (tmp_path / name for name in ("killed", "stopped", "resumed"))
    in_processes(lambda rank: kill(rank, killed))
    for run in (stopped, resumed):
        assert {each.error for each in in_processes(partial(stop, run=run))} == {""}
    for run in (killed, resumed):
        assert {each.error for each in in_processes(partial(finish, run=run))} == {""}
    found = results(
        {
            "killed": lambda rank: verify(killed, build),
            "stopped": lambda rank: verify(stopped, lambda folder: stopping(folder, rank)),
            "not stopped": lambda rank: verify(stopped, build),
            "resumed": lambda rank: verify(resumed, lambda folder: stopping(folder, rank)),
        }
    )
    for name in ("killed", "stopped", "resumed"):
        assert found[name], str(found[name])
        assert all(each.agreed > 4 * 16 for each in (found[name], *found[name].others))
    assert [found[name].end for name in ("killed", "stopped", "resumed")] == [ITERATIONS, 20, ITERATIONS]
    assert found["not stopped"].differs
    assert "was ended by terminate" in str(found["not stopped"])


@pytest.mark.slow
def test_errors_are_not_repeated_and_one_of_the_rerun_ends_all(recorded: Path, tmp_path: Path):
    in_processes(lambda rank: failing(tmp_path, rank, 12).train())
    found = results({"failed": lambda rank: verify(tmp_path, lambda folder: failing(folder, rank, 12))})["failed"]
    assert (bool(found), found.differs, found.end) == (False, False, 11)
    assert "an error ended rank 1 in iteration 12, which is not repeated" in str(found)
    ended = in_processes(lambda rank: verify(recorded, lambda folder: failing(folder, rank, 12)))
    assert "IndexError: list index out of range" in ended[1].error
    assert "PeerFailed: rank 1 has failed at epoch 2, iteration 12" in ended[0].error


def flip_a_bit_of_a_piece(checkpoint: Path) -> None:
    """Of the part that rank 1 has written, as if it had computed it."""
    file = checkpoint / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    manifest = unseal((checkpoint / "manifest.json").read_bytes())
    manifest["files"][file.name]["sha256"] = hashlib.sha256(content).hexdigest()
    (checkpoint / "manifest.json").write_bytes(seal(manifest))


@pytest.mark.slow
@pytest.mark.parametrize("topology", [{"shard": 2}, {"pipeline": 2}], ids=str)
def test_sharded_models_are_verified(topology: dict[str, int], tmp_path: Path):
    def make_sharded(run: Path, seed: int = 0) -> Trainer:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1))
        return build(run, model=model, backend=TorchBackend("cpu", topology=Topology(**topology)))

    run, other, bit = (tmp_path / name for name in ("run", "other", "bit"))
    assert {each.error for each in in_processes(lambda rank: len(make_sharded(run).train()))} == {""}
    shutil.copytree(run, other)
    rewrite(other, 1, with_another_loss)
    shutil.copytree(run, bit)
    flip_a_bit_of_a_piece(max((bit / "checkpoints").glob("*-checkpoint")))
    found = results(
        {
            "bit": lambda rank: verify(bit, make_sharded),
            "same": lambda rank: verify(run, make_sharded),
            "part": lambda rank: verify(run, make_sharded, from_iteration=16),
            "other": lambda rank: verify(other, make_sharded),
            "seed": lambda rank: verify(run, lambda folder: make_sharded(folder, seed=1)),
        }
    )
    assert found["same"], str(found["same"])
    assert found["same"].checkpoints == (7, 14, 21, 28, 35, 40)
    assert found["part"], str(found["part"])
    assert (found["other"].differs, found["other"].rank) == (True, 1)
    assert found["bit"].differs
    assert "1 of " in str(found["bit"].tensor)
    assert "iteration 40" in str(found["bit"].tensor)
    assert found["seed"].differs


def test_another_topology_is_the_likeliest_cause(recorded: Path):
    def again(rank: int) -> Any:
        topology = Topology(shard=2)
        return verify(recorded, lambda folder: build(folder, backend=TorchBackend("cpu", topology=topology)))

    found = results({"sharded": again})["sharded"]
    assert found.differs
    assert found.causes[0].kind == "topology"
    assert "shard: 1 -> 2" in found.causes[0].text
    assert "code" not in [each.kind for each in found.causes]
