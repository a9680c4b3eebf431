"""Processes join: what they agree on, and what is said of one that is late, differs or fails."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import HashStore

from pulsetrain.engine import ConfigurationError
from pulsetrain.engine.distributed import joining
from pulsetrain.engine.distributed.joining import check_alike, check_apart, join, leave
from pulsetrain.engine.distributed.pulse import Pulse, StopRequest
from tests.support.ranks import in_processes


@pytest.mark.parametrize("own_group", [False, True], ids=["from the environment", "group of the user's"])
def test_ranks_agree_in_a_group_beside_torchs(own_group: bool):
    def body(rank: int) -> Any:
        control = join()
        weights = torch.full((3,), float(rank))
        control.broadcast_tensors([weights])
        found = (
            control.sum([rank, 0.5]), control.gather(f"rank {rank}"), control.broadcast(rank), weights.tolist(),
            join() is control,
        )  # fmt: skip
        control.barrier()
        leave()
        return *found, torch.distributed.is_initialized()

    for ended in in_processes(body, own_group=own_group):
        assert ended.error == ""
        assert ended.value == ([1.0, 1.0], ["rank 0", "rank 1"], 0, [0.0] * 3, True, own_group)


def _collective_threads() -> int:
    """How many threads of gloo there are, which release tensors after a collective."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo_runloop" in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by name in /proc")
@pytest.mark.parametrize("own_group", [False, True], ids=["from the environment", "group of the user's"])
def test_no_thread_of_the_group_is_left_while_python_shuts_down(own_group: bool):
    def body(rank: int) -> Any:
        control = join()
        control.gather(rank)
        during = _collective_threads()
        leave()
        after = _collective_threads()
        if own_group:  # which may live on
            assert 0 < after < during
            torch.distributed.destroy_process_group()
        return during > 0, _collective_threads(), control.ranks.world_size

    found = in_processes(body, own_group=own_group)
    assert [(each.error, each.value) for each in found] == [("", (True, 0, 2))] * 2


def test_a_process_leaves_after_its_user_has_made_another_default_group():
    def body(rank: int) -> None:
        join().barrier()
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        leave()
        torch.distributed.barrier()

    assert [each.error for each in in_processes(body, own_group=True)] == ["", ""]


def test_a_process_leaves_while_a_collective_waits_for_another_one():
    def body(rank: int) -> float:
        control = join()
        control.barrier()
        if rank == 0:
            control.start_sum([1.0])  # to which the other rank never comes
        else:
            time.sleep(3.0)
        leave()
        return time.monotonic()

    (first, first_error), (second, second_error) = [(each.value, each.error) for each in in_processes(body)]
    assert (first_error, second_error) == ("", "")
    assert first < second, "it has waited until the other process ended"


@pytest.mark.slow
def test_a_decision_of_the_main_process_may_take_longer_than_the_timeout_where_that_is_said():
    def body(rank: int) -> Any:
        control = join()
        control.barrier()
        control.timeout = 1.0

        def refuse() -> None:
            raise ConfigurationError("not like this")

        found = control.main_decides(lambda: time.sleep(2.5) or rank, patient=True)
        with pytest.raises(ConfigurationError, match="not like this"):
            control.main_decides(refuse, patient=True)
        return found

    assert [(each.error, each.value) for each in in_processes(body)] == [("", 0)] * 2


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes_is_named(absent: int):
    def body(rank: int) -> None:
        if rank == absent:
            return
        join(timeout=1.0)

    ended = in_processes(body)[1 - absent]
    assert "PeerFailed" in ended.error
    assert ("rank 0 has not come to 127.0.0.1" if absent == 0 else "of 2 processes, rank 1 has not come") in ended.error
    assert "within 1 s" in ended.error


def test_a_main_process_that_ends_while_others_wait_to_meet_it_is_named(tmp_path: Path):
    def body(rank: int) -> None:
        met = tmp_path / "met"
        if rank == 0:

            def end() -> None:
                while not met.exists():
                    time.sleep(0.01)
                os._exit(1)

            threading.Thread(target=end).start()
        else:
            await_all = joining._absent_after

            def noted(*words: Any) -> list[int]:
                met.touch()
                return await_all(*words)

            joining._absent_after = noted
        join()

    _, other = in_processes(body, 3, started=2)  # the third never comes
    assert "PeerFailed: rank 0 has ended while the processes were to meet at 127.0.0.1" in other.error


@pytest.mark.slow
def test_a_rank_that_is_late_for_a_collective_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.engine.distributed.collectives._SILENT", 0.1)

    def body(rank: int) -> None:
        control = join()
        control.barrier()
        control.timeout = 1.0
        if rank == 1:
            time.sleep(8)
            os._exit(0)
        control.sum([1.0])

    ended = in_processes(body)[0]
    said = r"PeerFailed: rank 1 has not come to a sum, collective no\. 2 on this rank, within [1-9] s"
    assert re.search(said, ended.error)


@pytest.mark.parametrize("own_group", [False, True], ids=["from the environment", "group of the user's"])
def test_the_error_of_a_rank_reaches_the_others(own_group: bool):
    def body(rank: int) -> None:
        control = join()
        control.barrier()
        if rank == 1:
            try:
                raise ValueError("the data of rank 1 is damaged")
            except ValueError as error:
                assert control.board is not None
                control.board.post(error, "iteration 7")
                raise
        control.sum([1.0])

    first, second = in_processes(body, own_group=own_group)
    assert "ValueError: the data of rank 1 is damaged" in second.error
    assert "PeerFailed: rank 1 has failed at iteration 7, so this one cannot continue:\nTraceback" in first.error
    assert "ValueError: the data of rank 1 is damaged" in first.error


def test_ranks_that_were_started_differently_are_named():
    def body(rank: int) -> None:
        check_alike(join(), {"learning_rate": 0.1 * (1 + rank), "seed": 1, "long": "x" * 100 * (1 + rank)})

    for ended in in_processes(body):
        said = ended.error.splitlines()[-1]
        assert said.startswith("pulsetrain.engine.errors.ConfigurationError: the processes have to be started alike")
        assert "rank 1 has learning_rate=0.2, rank 0 has 0.1; rank 1 has long='xxx" in said
        assert "seed" not in said
        assert "x" * 100 not in said


def test_ranks_that_would_share_a_gpu_are_named():
    def body(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joining, "_gpu", lambda device: "NVIDIA H200 0 of here")
            check_apart(join(), torch.device("cpu"))
            check_apart(join(), torch.device("cuda"))

    for ended in in_processes(body):
        said = ended.error.splitlines()[-1]
        assert "ConfigurationError: ranks 0 and 1 would both train on NVIDIA H200 0 of here" in said
        assert "start one process for each GPU" in said


def test_an_environment_that_does_not_say_where_to_meet_is_an_error(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=r"WORLD_SIZE=2 says .* start them with torchrun, or unset RANK"):
        join()


def test_a_port_that_is_in_use_is_an_error(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{port}, where .* cannot be used.* another MASTER"):
            join(timeout=2.0)


def test_a_request_of_any_rank_ends_all_at_the_same_fixed_point_and_a_signal_at_the_next_pulse():
    def body(rank: int) -> Any:
        control, found = join(), []
        for signal, asked_at in (("", 3), ("SIGTERM", 3), ("", 10), ("", 11)):
            pulse = Pulse(control, every=10, within=0.0)  # a further pulse one iteration after each
            for iteration in range(1, 41):
                if rank == 1 and iteration == asked_at:
                    pulse.ask("enough", observed=bool(signal), signal=signal)
                if pulse.is_due(iteration):
                    stop, _ = pulse.beat(iteration, fixed=iteration % 10 == 0)
                    if stop is not None:
                        found.append((iteration, stop))
                        break
        calls = control.calls
        calm = Pulse(control, every=10, within=1e9)
        calm_calls = [calm.beat(each, fixed=each % 10 == 0) for each in range(1, 101) if calm.is_due(each)]
        control.barrier()
        return found, calm_calls, control.calls - calls - 1

    first, second = in_processes(body)
    assert first.error == second.error == ""
    assert first.value == second.value
    found, calm, calls = first.value
    enough = StopRequest("enough", rank=1)
    assert found == [(10, enough), (3, StopRequest("enough", True, "SIGTERM", 1)), (10, enough), (20, enough)]
    assert (calm, calls) == ([(None, [])] * 11, 11)  # one more after the first iteration


def test_a_signal_is_agreed_on_between_two_log_points():
    def body(rank: int) -> Any:
        control = join()
        pulse = Pulse(control, every=100, within=0.01, clock=time.monotonic)
        assert pulse.beat(100, fixed=True, values=[rank, 2.0]) == (None, [1.0, 4.0])
        for iteration in range(101, 300):
            time.sleep(0.001)
            control.barrier()  # the gradients
            if rank == 1 and iteration == 205:
                pulse.ask("SIGTERM was received", observed=True, signal="SIGTERM")
            if pulse.is_due(iteration) and pulse.beat(iteration, fixed=iteration % 100 == 0)[0]:
                return iteration
        return None

    first, second = in_processes(body)
    assert first.error == second.error == ""
    assert first.value == second.value
    assert 205 <= first.value < 300


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself, which was open meanwhile
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


@pytest.mark.slow
def test_many_processes_connect_to_those_that_they_send_to_alone(monkeypatch: pytest.MonkeyPatch):
    def body(rank: int) -> Any:
        before = sockets()
        control = join()
        total = control.sum([1.0])
        connected = sockets() - before
        found = total, control.gather(rank), control.broadcast(rank), len(control.collect(rank))
        control.barrier()
        return found, connected

    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)

    def run(eager: int) -> int:
        monkeypatch.setattr("pulsetrain.engine.distributed.joining._EAGER", eager)
        ended = in_processes(body, 6)
        assert [each.error for each in ended] == [""] * 6
        for rank, each in enumerate(ended):
            assert each.value[0] == ([6.0], [*range(6)], 0, 0 if rank else 6)
        return sum(each.value[1] for each in ended)

    assert run(eager=5) < 0.7 * run(eager=6)
