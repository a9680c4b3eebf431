"""The sender of loggers while its service is healthy, slow, down, or rejects entries."""

import gc
import threading
import time
import weakref

import pytest
from structlog.testing import capture_logs

from pulsetrain.handlers.loggers.sending import Sender
from tests.support import programs


class Service:
    """Accepts entries while it is open; raises `error` if that is set."""

    def __init__(self, at_once=1):
        self.taken, self.reported, self.calls = [], [], 0
        self.error = None
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()
        self.at_once = at_once

    def deliver(self, entries):
        self.calls += 1
        self.asked.set()
        self.open.wait(10)
        if self.error is not None:
            raise self.error
        taken = list(entries[: self.at_once])
        if "bad" in taken:
            raise ValueError("no such thing")
        self.taken += taken
        return len(taken)

    def sender(self, room=10**6):
        return Sender(
            "Logger",
            self.deliver,
            is_refusal=lambda error: isinstance(error, ValueError),
            report=self.reported.append,
            room=room,
            flush_seconds=5.0,
        )


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come about within 10 seconds"
        time.sleep(0.005)


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_everything_arrives_in_order_before_the_end(at_once):
    service = Service(at_once)
    sender = service.sender()
    for n in range(500):
        sender.put(n, 1)
    assert sender.finish(10) == 0
    assert service.taken == list(range(500))
    assert (sender.lost, sender.reported, service.reported) == (0, False, [])


def test_nothing_runs_before_the_first_entry_or_after_the_end():
    before = threading.active_count()
    sender = Service().sender()
    assert threading.active_count() == before
    assert sender.finish(10) == 0
    sender = Service().sender()
    sender.put(1, 1)
    assert sender.finish(10) == 0
    assert threading.active_count() == before


def test_putting_never_waits_for_a_service_that_does_not_answer():
    service = Service()
    service.open.clear()
    sender = service.sender()
    for n in range(1000):
        sender.put(n, 1)  # would never return
    service.open.set()
    assert sender.finish(10) == 0
    assert service.taken == list(range(1000))


def test_when_the_queue_is_full_the_oldest_are_lost_and_counted():
    service = Service()
    service.open.clear()
    sender = service.sender(room=10)
    sender.put(0, 1)
    assert service.asked.wait(10)
    for n in range(1, 30):
        sender.put(n, 1)
    service.open.set()
    sender.finish(10)
    assert service.taken == [0, *range(20, 30)]  # 0 was on its way when its place was taken
    assert sender.lost == 19


def test_an_entry_larger_than_the_queue_is_still_sent():
    service = Service()
    sender = service.sender(room=10)
    sender.put("picture", 100)
    sender.finish(10)
    assert service.taken == ["picture"]


def test_the_start_and_end_of_an_outage_are_reported_with_what_was_lost():
    service = Service()
    service.error = ConnectionError("nobody there")
    sender = service.sender(room=5)
    with capture_logs() as logs:
        for n in range(8):
            sender.put(n, 1)
        wait_until(lambda: service.calls >= 3)
        service.error = None
        assert sender.finish(10) == 0
    assert service.taken == [3, 4, 5, 6, 7]
    assert [str(error) for error in service.reported] == ["nobody there"]
    assert [entry["event"] for entry in logs] == [
        "Logger: cannot reach the service; training continues, and what it logs waits",
        "Logger: reached the service again",
    ]
    assert logs[0]["error"] == "nobody there"
    assert sender.lost == 3
    assert logs[1]["lost_entries"] <= 3  # includes entries dropped before the outage was known


def test_the_end_waits_as_long_as_configured_and_reports_what_was_discarded():
    service = Service()
    service.error = ConnectionError("nobody there")
    sender = service.sender()
    with capture_logs() as logs:
        sender.put(1, 1)
        sender.put(2, 1)
        wait_until(lambda: service.reported)
        begun = time.monotonic()
        assert sender.finish(0.3) == 2
        assert time.monotonic() - begun < 3
    assert logs[-1]["event"] == "Logger: discarded what could not be sent"
    assert logs[-1]["entries"] == 2
    wait_until(lambda: not any(thread.name == "Logger" for thread in threading.enumerate()))


def test_the_end_tries_once_more_at_once_however_long_the_outage_has_lasted(monkeypatch):
    monkeypatch.setattr("pulsetrain.handlers.loggers.sending._RETRIES", (1000.0, 1000.0))
    service = Service()
    service.error = ConnectionError("nobody there")
    sender = service.sender()
    sender.put(1, 1)
    wait_until(lambda: service.reported)
    service.error = None
    assert sender.finish(10) == 0
    assert service.taken == [1]


def test_a_refused_entry_is_lost_alone_and_reported_once():
    service = Service()
    sender = service.sender()
    with capture_logs() as logs:
        for entry in (1, "bad", 2, "bad", 3):
            sender.put(entry, 1)
        assert sender.finish(10) == 0
    assert service.taken == [1, 2, 3]
    assert sender.lost == 2
    assert [entry["event"] for entry in logs] == [
        "Logger: the service rejects an entry; it and others like it are lost"
    ]
    assert [str(error) for error in service.reported] == ["no such thing"]


@pytest.mark.slow
def test_a_finished_sender_is_freed():
    sender = Service().sender()
    sender.put(1, 1)
    sender.finish(10)
    known = weakref.ref(sender)
    del sender
    gc.collect()
    assert known() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deliver", "said"),
    [("lambda entries: print(*entries) or len(entries)", "1 2"), ("lambda entries: time.sleep(1000)", "discarded")],
)
def test_the_end_of_the_process_waits_for_what_has_not_been_sent_but_not_for_ever(deliver, said):
    program = f"""
import time
from pulsetrain.handlers.loggers.sending import Sender
from tests.support import programs
seconds = 2.0 if "1" in {said!r} else 0.3
sender = Sender("Logger", {deliver}, is_refusal=bool, report=print, room=9, flush_seconds=seconds)
sender.put(1, 1)
sender.put(2, 1)
"""
    done = programs.run("-c", program, timeout=60)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout.replace("\n", " ")


def paused(monkeypatch, longest=4.0):
    """For how long the sender would have waited before each retry; it waits a moment."""
    monkeypatch.setattr("pulsetrain.handlers.loggers.sending._RETRIES", (1.0, longest))
    pauses = []
    monkeypatch.setattr(Sender, "_pause", lambda self, seconds: pauses.append(seconds) or time.sleep(0.001))
    return pauses


def test_an_outage_is_waited_out_with_growing_pauses_and_the_next_one_starts_over(monkeypatch):
    pauses, taken = paused(monkeypatch), []
    answers = iter([False] * 4 + [True] + [False] * 2 + [True])

    def deliver(entries):
        if not next(answers):
            raise ConnectionError("nobody there")
        taken.append(entries[0])
        return 1

    sender = Sender("Logger", deliver, is_refusal=lambda error: False, report=print, room=100, flush_seconds=5.0)
    for n in (1, 2):
        sender.put(n, 1)
    wait_until(lambda: taken == [1, 2])
    assert sender.finish(10) == 0
    assert pauses == [1.0, 2.0, 4.0, 4.0, 1.0, 2.0]


def test_at_the_end_an_outage_is_tried_again_soon(monkeypatch):
    pauses = paused(monkeypatch, longest=1000.0)
    service = Service()
    service.error = ConnectionError("nobody there")
    sender = service.sender()
    sender.put(1, 1)
    wait_until(lambda: len(pauses) > 5)
    assert pauses[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert sender.finish(0.1) == 1
    assert pauses[-1] == 1.0
