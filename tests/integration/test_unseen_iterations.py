"""Iterations that a damaged log lacks are named by all that read it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pulsetrain import Replay, Trainer, diff, verify
from pulsetrain.cli import main
from pulsetrain.engine import Events
from pulsetrain.engine.recording import EventLog
from pulsetrain.engine.recording.log.files import log_files
from pulsetrain.handlers import EventRecorder
from tests.support.models import loader, regression_model, trainer


def build(folder: Path) -> Trainer:
    settings = {"max_epochs": 60, "optimizer": "sgd", "seed": 3}
    recorder = EventRecorder(folder, grad_norm=True)
    return trainer(settings, model=regression_model(0.0), train_loader=loader(), handlers=[recorder])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    build(folder).train()
    return folder


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def cut_out(content: bytes) -> bytes:
    return content[: len(content) // 3] + content[2 * len(content) // 3 :]


@pytest.mark.parametrize(
    "damage", [flip_a_bit, *(pytest.param(each, marks=pytest.mark.slow) for each in (cut, cut_out))]
)
def test_they_are_named_and_the_exit_status_is_3(
    damage: Callable[[bytes], bytes], recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(recorded, tmp_path / "damaged")
    sealed, _ = log_files(folder / "events")
    sealed.write_bytes(damage(sealed.read_bytes()))
    seen = {each.iteration for each in EventLog(folder).read(event="iteration_completed")}
    unseen = {each.iteration for each in EventLog(recorded).read(event="iteration_completed")} - seen
    assert unseen

    with capture_logs() as logs:
        replay = Replay(folder)
        replay.add_event_handler(Events.ITERATION_COMPLETED, lambda: None)  # what nobody subscribes to is not read
        replay.run()
    assert covers(" ".join(str(line.get("damage")) for line in logs), unseen)
    found = verify(folder, build)
    assert not found
    assert covers(str(found), unseen)
    compared = diff(recorded, folder)
    ranges = [header.engines["trainer"].iteration for header in EventLog(folder).headers]  # with digests, which agree
    not_compared = {i for i in unseen if not any(first <= i <= last for first, last in ranges)}
    assert bool(compared.unread) == bool(not_compared)
    assert covers(str(compared), not_compared)
    for command in (["events", str(folder), "--check"], ["replay", str(folder), "--handler", "LossSpikeGuard"]):
        assert main(command) == 3, command
        output = capsys.readouterr()
        assert covers(output.out + output.err, unseen), command


def lose_lines(content: bytes) -> bytes:
    lines = content.split(b"\n")
    return b"\n".join([*lines[:40], *(b"" for _ in lines[40:60]), *lines[60:]]).ljust(len(content), b"\n")


def tear_lines(content: bytes) -> bytes:
    lines = content.split(b"\n")
    return b"\n".join([*lines[:40], *(line[:-1] + b" " for line in lines[40:60]), *lines[60:]])


@pytest.mark.parametrize("damage", [lose_lines, tear_lines, cut], ids=lambda each: each.__name__)
def test_those_of_the_tail_of_a_killed_run_are_named(
    damage: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, killed = build(tmp_path / "run"), tmp_path / "killed"

    @run.on(Events.ITERATION_COMPLETED(once=300))
    def kill() -> None:
        shutil.copytree(tmp_path / "run", killed)
        run.terminate()

    run.train()
    before = {each.iteration for each in EventLog(killed).read(event="iteration_completed")}
    _, tail = log_files(killed / "events")
    tail.write_bytes(damage(tail.read_bytes()))
    unseen = before - {each.iteration for each in EventLog(killed).read(event="iteration_completed")}
    assert unseen or damage is cut  # which may take empty lines alone
    assert main(["events", str(killed), "--check"]) == 3
    assert covers(capsys.readouterr().out, unseen or {max(before)})


def covers(text: str, iterations: set[int]) -> bool:
    """Whether each iteration is inside of a range that the text names."""
    ranges = re.findall(r"iterations? (\d+) (?:to|and) (\d+|the end)", text)
    return all(any(int(a) <= i and (b == "the end" or i <= int(b)) for a, b in ranges) for i in iterations)
