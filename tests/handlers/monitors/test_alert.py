import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pulsetrain.engine import ConfigurationError, Events
from pulsetrain.engine.events.payloads import AnomalyDetected
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import Alert, EventRecorder
from pulsetrain.handlers.monitors.alert import _site_of
from tests.support.engines import make_engine
from tests.support.models import trainer

NOTE = """
import json, os, sys
names = ("EVENT", "ENGINE", "EPOCH", "ITERATION")
with open(sys.argv[1], "a") as file:
    print(json.dumps([json.load(sys.stdin), {name: os.environ["PULSETRAIN_" + name] for name in names}]), file=file)
"""


@pytest.fixture
def script(tmp_path):
    """A command that appends what it was given to a file, and the lines of that file."""
    program, file = tmp_path / "note.py", tmp_path / "alerts"
    program.write_text(NOTE)

    def lines():
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return [sys.executable, str(program), str(file)], lines


class Listener(ThreadingHTTPServer):
    """A server on the loopback that records its requests."""

    def __init__(self, status=200):
        super().__init__(("127.0.0.1", 0), Answer)
        self.status, self.posted, self.address = status, [], f"http://127.0.0.1:{self.server_port}/secret"
        self.hold = threading.Event()
        self.hold.set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.server.hold.wait(30)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    listener = Listener()
    yield listener
    listener.hold.set()
    listener.shutdown()
    listener.server_close()


def messages(server):
    return [message for _, _, message in server.posted]


# ------------------------------------------------------------------------------------------------------ contents


def test_a_command_gets_the_event_on_its_input_and_in_its_environment(script):
    command, lines = script
    engine = make_engine()
    Alert(command, timeout=30).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), engine.terminate, reason="enough of it")
    engine.run([0, 1, 2], max_epochs=2)
    (first, environment), (second, _) = lines()
    assert abs(first.pop("time") - time.time()) < 60
    assert first == {
        "event": "terminate",
        "engine": "trainer",
        "epoch": 1,
        "iteration": 2,
        "payload": {"reason": "enough of it", "observed": False},
    }
    assert environment == {"EVENT": "terminate", "ENGINE": "trainer", "EPOCH": "1", "ITERATION": "2"}
    assert (second["event"], second["payload"]) == ("completed", None)


def test_an_address_gets_it_as_a_post_of_json(server):
    engine = make_engine()
    Alert(webhook=server.address, timeout=30).attach(engine)
    anomaly = AnomalyDetected(kind="nan", value=float("nan"), batch_indices=(3, 5))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: engine.fire(Events.ANOMALY_DETECTED, anomaly))
    engine.run([0, 1], max_epochs=1)
    (path, kind, message), *_ = server.posted
    assert (path, kind) == ("/secret", "application/json")
    assert message["event"] == "anomaly_detected"
    assert message["payload"]["value"] == "nan"
    assert message["payload"]["batch_indices"] == [3, 5]
    assert [each["event"] for each in messages(server)] == ["anomaly_detected", "completed"]


def test_an_error_of_the_run_is_reported_before_the_caller_has_it(server):
    def fail(iteration):
        raise OSError("the disk is full")

    engine = make_engine(fail)
    Alert(webhook=server.address, timeout=30).attach(engine)
    with pytest.raises(OSError, match="the disk is full"):
        engine.run([0], max_epochs=1)
    (message,) = messages(server)
    assert (message["event"], message["payload"]) == ("exception_raised", {"error": "OSError: the disk is full"})


def test_only_the_events_asked_for_are_reported_and_filters_hold(server):
    engine = make_engine()
    Alert(webhook=server.address, events=[Events.EPOCH_COMPLETED(every=2)], timeout=30).attach(engine)
    engine.run([0], max_epochs=5)
    assert [(each["event"], each["epoch"]) for each in messages(server)] == [
        ("epoch_completed", 2),
        ("epoch_completed", 4),
    ]


def test_the_end_of_a_validation_is_not_the_end_of_a_run(server):
    run = trainer({"max_epochs": 2}, val_loader=[(each, each.sum(1, keepdim=True)) for each in batches()])
    Alert(webhook=server.address, timeout=30).attach(run)
    run.train()
    assert [(each["engine"], each["event"]) for each in messages(server)] == [("trainer", "completed")]


def batches():
    import torch

    return [torch.ones(3, 4)]


# --------------------------------------------------------------------------------------------------- nothing is stalled


def test_the_run_continues_while_an_alert_is_under_way_and_waits_at_its_end(server):
    engine = make_engine()
    Alert(webhook=server.address, events=[Events.EPOCH_STARTED(once=1)], timeout=30).attach(engine)
    server.hold.clear()
    engine.add_event_handler(Events.EPOCH_COMPLETED(once=3), server.hold.set)  # otherwise there would be no answer
    engine.run([0], max_epochs=3)
    assert [each["epoch"] for each in messages(server)] == [1]


def test_the_end_waits_no_longer_than_the_timeout(server):
    engine = make_engine()
    alert = Alert(webhook=server.address, events=[Events.EPOCH_COMPLETED], timeout=0.2).attach(engine)
    server.hold.clear()
    start = time.monotonic()
    engine.run([0], max_epochs=50)
    waited = time.monotonic() - start
    assert waited >= 0.2
    assert waited < 0.2 * 50 / 2, "it should not wait for each"
    server.hold.set()
    alert.detach()


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path):
    engine, file = make_engine(), tmp_path / "child"
    Alert(["sh", "-c", f"sleep 60 & echo $! > {file}; wait"], timeout=10.0).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=1)
        wait_until(lambda: logs)
    assert [line["error"] for line in logs] == ["TimeoutError: sh took more than 10 s"]
    child = Path(f"/proc/{file.read_text().strip()}/stat")
    wait_until(lambda: not child.exists() or ") Z " in child.read_text())


def wait_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_more_alerts_than_can_wait_are_dropped_and_reported_once(server):
    engine = make_engine()
    Alert(webhook=server.address, events=[Events.ITERATION_COMPLETED], timeout=30).attach(engine)
    server.hold.clear()
    engine.add_event_handler(Events.EPOCH_COMPLETED, server.hold.set)
    with capture_logs() as logs:
        engine.run(range(300), max_epochs=1)
    dropped = [line["error"] for line in logs if "waiting" in line["error"]]  # not an earlier server
    assert dropped == ["100 alerts are already waiting"]
    delivered = [each["iteration"] for each in messages(server)]
    assert delivered[:100] == list(range(1, 101))
    assert len(delivered) in (100, 101)  # including the one being sent


# --------------------------------------------------------------------------------------------------------- what fails


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no such user')"], r"ended with 1: no such user"),
        (["/no/such/program"], "No such file or directory: '/no/such/program'"),
    ],
)
def test_a_command_that_fails_is_reported_once_and_the_run_continues(command, error):
    engine = make_engine()
    Alert(command, events=[Events.EPOCH_COMPLETED], timeout=30).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=3)
    assert engine.state.epoch == 3
    (line,) = logs
    assert error in line["error"]


def test_an_address_that_answers_with_an_error_is_reported_without_its_secret(server):
    server.status = 500
    engine = make_engine()
    Alert(webhook=server.address, events=[Events.EPOCH_COMPLETED], timeout=30).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=2)
    assert len(server.posted) == 2
    (line,) = logs
    assert "http://127.0.0.1 answered 500" in line["error"]
    assert "secret" not in str(line)


def test_an_address_without_a_server_is_reported(server):
    server.shutdown()
    server.server_close()
    engine = make_engine()
    Alert(webhook=server.address, timeout=30).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=1)
    assert "could not be reached" in logs[0]["error"]
    assert "secret" not in str(logs)


def test_an_address_that_cannot_be_asked_is_reported_without_its_secret():
    engine = make_engine()
    Alert(webhook="http://127.0.0.1/the secret", timeout=30).attach(engine)
    with capture_logs() as logs:
        engine.run([0], max_epochs=1)
    assert "http://127.0.0.1 could not be reached: InvalidURL" in logs[0]["error"]
    assert "secret" not in str(logs)


def test_after_a_failure_the_next_alert_is_sent(server):
    server.status = 500
    engine = make_engine()
    Alert(webhook=server.address, events=[Events.EPOCH_COMPLETED], timeout=30).attach(engine)
    engine.run([0], max_epochs=1)
    server.status = 200
    engine.run([0], max_epochs=1)
    assert len(server.posted) == 2


# ------------------------------------------------------------------------------------------------------ replay, detach


def test_a_replay_sends_no_alert_unless_configured_to(tmp_path, server):
    trainer({"max_epochs": 1}, handlers=[EventRecorder(tmp_path)]).train()
    for in_replay, events in ((False, []), (True, ["completed"])):
        replay = Replay(tmp_path)
        Alert(webhook=server.address, timeout=30, in_replay=in_replay).attach(replay)
        replay.run()
        assert [each["event"] for each in messages(server)] == events


def test_its_thread_ends_when_nothing_is_left_to_report(server):
    alert, engine = Alert(webhook=server.address, timeout=30), make_engine()
    for number in (1, 2):
        alert.attach(engine)
        engine.run([0], max_epochs=1)
        alert.detach()
        assert len(server.posted) == number
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "alert"])


def test_what_waits_when_it_is_detached_is_reported(server):
    engine = make_engine()
    alert = Alert(webhook=server.address, events=[Events.ITERATION_COMPLETED], timeout=30).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), alert.detach, phase=3)
    engine.run([0] * 9, max_epochs=1)
    assert [each["iteration"] for each in messages(server)] == [1, 2, 3]


# -------------------------------------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, ConfigurationError, r"\(command=None, webhook=None\): needs a command or a webhook"),
        ({"command": "mail me"}, ConfigurationError, r"\(command='mail me'\): needs a list of texts"),
        ({"command": []}, ConfigurationError, r"\(command=\[\]\): needs a list of texts"),
        ({"command": ["mail", 3]}, ConfigurationError, r"\(command=\['mail', 3\]\): needs a list"),
        ({"webhook": "file:///etc/passwd"}, ConfigurationError, r"\(webhook='file:///...'\): needs an address that"),
        ({"webhook": "example.org"}, ConfigurationError, r"\(webhook='example....'\): needs an address that begins"),
        ({"webhook": "http://["}, ConfigurationError, r"\(webhook='http://\[...'\): needs an address that begins"),
        ({"webhook": 80}, ConfigurationError, r"\(webhook=80\): needs an address that begins"),
        ({"command": ["true"], "timeout": 0}, ConfigurationError, r"\(timeout=0\): needs a positive"),
        ({"command": ["true"], "events": ()}, ConfigurationError, r"\(events=\(\)\): needs at least one event"),
        ({"command": ["true"], "events": Events.COMPLETED}, TypeError, r"\(events=.*\): needs several"),
    ],
)
def test_wrong_arguments_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=r"Alert" + message):
        Alert(**arguments)


def test_messages_show_only_the_host_of_an_address():
    assert _site_of("https://user:word@hooks.example.org/services/T0/B0?key=1") == "https://hooks.example.org"
