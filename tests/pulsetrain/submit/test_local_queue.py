"""The queue of one machine: order, devices, and whatever is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.submit import queue_process
from pulsetrain.submit.local_queue import LocalQueue, QueuedJob
from pulsetrain.submit.queue_process import QueueProcess, ensure_running
from tests.faults.queues import run
from tests.support.training_jobs import kill_all, processes_with, until

# in place of an interpreter: runs the queue's own processes, and as `pulsetrain` one of three commands
PYTHON = f"""#!/bin/bash
if [ "$2" != pulsetrain ]; then exec {sys.executable} "$@"; fi
case "$3" in
    hold) echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > "$4.timeout"; echo "$CUDA_VISIBLE_DEVICES" > "$4.started"
        while [ ! -e "$4" ]; do sleep 0.05; done ;;
    fail) exit 1 ;;
    killed) kill -9 $$ ;;
esac
"""

KEPT: list[QueueProcess] = []  # of the test that runs


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    yield tmp_path
    kill_all(str(tmp_path))
    for child in [*queue_process._started, *(runner for process in KEPT for runner in process._runners)]:
        child.wait()
    KEPT.clear()
    queue_process._started.clear()


def queue_with(folder: Path, devices: int) -> LocalQueue:
    queue = LocalQueue(folder / "queue")
    queue.devices = [""] * devices
    return queue


def add(queue: LocalQueue, words: list[str], devices: int = 1, restarts: int = 10) -> int:
    folder = queue.folder.parent
    (number,) = queue.add(
        [words], name="job", directory=folder, python=str(folder / "python"), output=folder / "output",
        devices=devices, restarts=restarts,
    )  # fmt: skip
    return number


def process_of(queue: LocalQueue) -> QueueProcess:
    KEPT.append(QueueProcess(queue))
    return KEPT[-1]


def states(queue: LocalQueue) -> list[str]:
    return [job.state for job in queue.jobs()]


def daemon(queue: LocalQueue) -> int:
    (found,) = [each for each in processes_with("queue_process") if each in processes_with(str(queue.folder))]
    return found


def test_jobs_start_in_order_when_enough_devices_are_free(folder: Path) -> None:
    queue = queue_with(folder, 3)
    first, second, third = (
        add(queue, ["hold", str(folder / str(index))], devices) for index, devices in enumerate((2, 2, 1))
    )
    process = process_of(queue)
    assert process.step()
    assert states(queue) == ["running", "waiting", "waiting"]  # the third does not overtake the second
    assert queue.job(first).assigned == (0, 1)
    (folder / "0").touch()
    until(lambda: not process.step() or queue.job(third).state == "running")
    assert states(queue) == ["done", "running", "running"]
    assert sorted(queue.job(second).assigned + queue.job(third).assigned) == [0, 1, 2]
    (folder / "1").touch()
    (folder / "2").touch()
    until(lambda: not process.step())
    assert states(queue) == ["done"] * 3


def test_a_job_sees_its_gpus_alone(folder: Path) -> None:
    queue = LocalQueue(folder / "queue")
    queue.devices = ["4", "5", "GPU-7"]
    for index in range(2):
        add(queue, ["hold", str(folder / str(index))], 1 + index)
    process = process_of(queue)
    process.step()
    until(lambda: all((folder / f"{index}.started").exists() for index in range(2)))
    until(lambda: all((folder / f"{index}.started").read_text() for index in range(2)))
    assert (folder / "0.started").read_text() == "4\n"
    assert (folder / "1.started").read_text() == "5,GPU-7\n"


def test_several_processes_get_as_long_as_one_to_stop(folder: Path) -> None:
    """By default their launcher kills them after 30 s, however long the queue waits for the launcher."""
    queue = queue_with(folder, 1)
    add(queue, ["hold", str(folder / "0")])
    process_of(queue).step()
    until(lambda: (folder / "0.timeout").exists() and (folder / "0.timeout").read_text())
    assert (folder / "0.timeout").read_text() == "110\n"


def test_a_queue_whose_file_cannot_be_written_for_a_while_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class FullDisk(LocalQueue):
        left = 3

        def start(self, number: int, assigned: Sequence[int]) -> bool:
            self.left -= 1
            if self.left >= 0:
                raise ConfigurationError("queue.sqlite: cannot be written")
            return super().start(number, assigned)

    monkeypatch.setattr(queue_process, "_RETRY", 0.0)
    queue = FullDisk(folder / "queue")
    queue.devices = [""]
    job = add(queue, ["fail"])
    process_of(queue).run()
    assert queue.job(job).state == "failed"
    assert capsys.readouterr().err.count("cannot be written") == 1
    add(queue, ["fail"])
    queue.left = 1
    queue.file.unlink()
    with pytest.raises(ConfigurationError):  # it was deleted, and nobody will write it again
        process_of(queue).run()


def test_a_job_that_fails_is_not_started_again(folder: Path) -> None:
    queue = queue_with(folder, 1)
    job = add(queue, ["fail"])
    process = process_of(queue)
    until(lambda: not process.step())
    assert (queue.job(job).state, queue.job(job).status, queue.job(job).interruptions) == ("failed", 1, 0)


def test_a_job_that_is_killed_again_and_again_fails(folder: Path) -> None:
    queue = queue_with(folder, 1)
    job = add(queue, ["killed"], restarts=2)
    process = process_of(queue)
    until(lambda: not process.step())
    assert (queue.job(job).state, queue.job(job).status, queue.job(job).interruptions) == ("failed", -9, 3)


def test_jobs_outlive_a_killed_queue_and_the_next_one_continues(folder: Path) -> None:
    queue = queue_with(folder, 1)
    first, second = (add(queue, ["hold", str(folder / str(index))]) for index in range(2))
    assert ensure_running(queue)
    until(lambda: (folder / "0.started").exists())
    assert not ensure_running(queue)  # it is there already
    os.kill(daemon(queue), signal.SIGKILL)
    (folder / "0").touch()
    until(lambda: queue.job(first).state == "done")  # without a queue
    assert queue.job(second).state == "waiting"
    (folder / "1").touch()
    until(lambda: ensure_running(queue))
    until(lambda: queue.job(second).state == "done")
    until(lambda: not list(processes_with("queue_process " + str(queue.folder))))  # it ends with the last job


def test_everything_is_killed_and_the_jobs_run_again_in_order(folder: Path) -> None:
    queue = queue_with(folder, 1)
    first, second = (add(queue, ["hold", str(folder / str(index))]) for index in range(2))
    ensure_running(queue)
    until(lambda: (folder / "0.started").exists())
    (folder / "0.started").unlink()
    kill_all(str(folder))
    until(lambda: not list(processes_with(str(folder))))
    assert states(queue) == ["running", "waiting"]
    ensure_running(queue)
    until(lambda: (folder / "0.started").exists())  # the first again, and not the second
    assert states(queue) == ["running", "waiting"]
    assert queue.job(first).interruptions == 1
    (folder / "0").touch()
    (folder / "1").touch()
    until(lambda: states(queue) == ["done", "done"])
    assert queue.job(second).interruptions == 0


def test_a_job_whose_runner_alone_was_killed_is_not_started_beside_itself(folder: Path) -> None:
    queue = queue_with(folder, 1)
    job = add(queue, ["hold", str(folder / "0")])
    process = process_of(queue)
    process.step()
    until(lambda: (folder / "0.started").exists())
    (runner,) = [each for each in processes_with("queue_runner") if each in processes_with(str(folder))]
    os.kill(runner, signal.SIGKILL)
    until(lambda: process.step() and runner not in processes_with("queue_runner"))
    for _ in range(3):
        process.step()
    assert (queue.job(job).state, queue.job(job).interruptions) == ("running", 0)
    (folder / "0").touch()
    until(lambda: not process.step())
    assert (queue.job(job).state, queue.job(job).interruptions) == ("done", 1)


def test_a_job_is_cancelled_while_it_waits_and_while_it_runs(folder: Path) -> None:
    queue = queue_with(folder, 1)
    first, second = (add(queue, ["hold", str(folder / str(index))]) for index in range(2))
    process = process_of(queue)
    process.step()
    assert queue.cancel(second).state == "cancelled"
    until(lambda: (folder / "0.started").exists())
    assert queue.cancel(first).state == "cancelling"
    until(lambda: not process.step())
    assert states(queue) == ["cancelled", "cancelled"]
    assert queue.cancel(first).state == "cancelled"  # once more changes nothing
    with pytest.raises(ConfigurationError, match="job 9: is not in the queue"):
        queue.cancel(9)


def test_a_directory_that_is_gone_fails_the_job(folder: Path) -> None:
    queue = queue_with(folder, 1)
    (number,) = queue.add(
        [["hold", "x"]], name="a", directory=folder / "gone", python=str(folder / "python"), output=folder / "output",
        devices=1, restarts=0,
    )  # fmt: skip
    process = process_of(queue)
    until(lambda: not process.step())
    job: QueuedJob = queue.job(number)
    assert job.state == "failed"
    assert "No such file or directory" in Path(job.output).read_text()


def test_an_interpreter_that_is_gone_fails_the_job_and_not_the_queue(folder: Path) -> None:
    queue = queue_with(folder, 1)
    job = add(queue, ["fail"])
    (folder / "python").unlink()
    process = process_of(queue)
    until(lambda: not process.step())
    assert queue.job(job).state == "failed"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_runs_end_as_if_nothing_had_been_killed(tmp_path: Path) -> None:
    done = run(jobs=3, kills=4, seed=2, folder=tmp_path)
    assert done["differences"] == []
    assert sum(done["kills"].values()) > 0


def test_fewer_devices_than_a_waiting_job_needs_are_refused(folder: Path) -> None:
    queue = queue_with(folder, 4)
    add(queue, ["hold", "x"], devices=3)
    with pytest.raises(ConfigurationError, match="--devices 2: job 1 needs 3"):
        queue.devices = ["", ""]
    assert queue.devices == [""] * 4


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "queue.sqlite").write_text("no database" * 100)
    with pytest.raises(ConfigurationError, match=r"queue\.sqlite: is damaged"):
        LocalQueue(tmp_path)
