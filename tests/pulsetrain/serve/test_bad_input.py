"""The page about folders and files that are not as they should be, and requests that a browser would not send."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from pulsetrain.cli import main
from pulsetrain.engine.recording import LoggedEvent, LogWriter
from pulsetrain.serve.series import RunSeries
from pulsetrain.serve.server import app_of
from pulsetrain.serve.store import Store, _Live
from tests.pulsetrain.runs.test_summary import own
from tests.support.run_folders import BEGUN, SECOND, write_run

SECRET = "hf_" + "aB3" * 10
BASE = "http://127.0.0.1:8765"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "a", [1.0, 0.5])
    return tmp_path / "runs"


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    yield TestClient(app, base_url=BASE)
    close()


def read(store: Store, run: str) -> Any:
    end = time.monotonic() + 60
    while (found := store.series(run)) is None:
        assert time.monotonic() < end, f"{run} is not read"
        time.sleep(0.05)
    return found


def test_the_current_folder_is_a_root(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(root)
    store = Store(Path())
    try:
        assert list(store.runs) == ["a"]
        assert not isinstance(read(store, "a"), str)
    finally:
        store.close()


def test_credentials_in_the_reason_of_an_end_stay_outside(root: Path):
    write_run(root / "b", [1.0], "exception_raised", reason=f"no access with {SECRET}")
    (root / "b" / "config.yaml").write_text(json.dumps({"data": {"api_key": "x7y8"}}))
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    try:
        client = TestClient(app, base_url=BASE)
        end = time.monotonic() + 60
        while client.get("/api/names", params={"run": "b"}).json()["pending"]:
            assert time.monotonic() < end, "the log is not read"
            time.sleep(0.05)
        words = {"run": "b", "a": "a", "b": "b"}
        for path in ("runs", "marks", "events", "diff", "configurations", "media", "where", "names"):
            answer = client.get(f"/api/{path}", params=words)
            assert answer.status_code == 200, (path, answer.text)
            assert SECRET not in answer.text, path
            assert "x7y8" not in answer.text, path
        assert "[redacted]" in client.get("/api/runs").text
    finally:
        close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "password:\n  - hunter2\nlr: 1\n"),
        ("more.yaml", "credentials:\n  user: me\n  value: hunter2\nlr: 1\n"),
        ("b.yaml", "password: |\n  hunter2\nlr: 1\n"),
        ("c.yaml", "a: 1\n---\npassword:\n  hunter2\n---\nlr: 1\n"),
        ("long.yaml", "password:\n" + "# so long\n" * 30_000 + "  - hunter2\n"),
        ("d.json", '{"credentials": {"user": "me", "value": ["hunter2"]}, "lr": 1}'),
    ],
)
def test_credentials_in_structured_files_are_not_shown(name: str, text: str, client: TestClient, root: Path):
    (root / "a" / name).write_text(text)
    answer = client.get("/api/file", params={"run": "a", "path": name})
    assert answer.status_code == 200
    assert "hunter2" not in answer.text
    assert "[redacted]" in answer.text


def test_a_credential_at_the_end_of_what_is_shown_is_replaced(client: TestClient, root: Path):
    begins = "x" * 199_980 + " "
    (root / "a" / "out.txt").write_text(f"{begins}hf_{'aB3' * 10}\n{'y' * 100}")
    text = client.get("/api/file", params={"run": "a", "path": "out.txt"}).text
    assert text == f"{begins}[redacted]\n\n... and 100 more bytes"


def test_a_text_in_utf_16_is_shown_without_credentials(client: TestClient, root: Path):
    (root / "a" / "out.txt").write_text("used hf_" + "aB3" * 10, encoding="utf-16")
    text = client.get("/api/file", params={"run": "a", "path": "out.txt"}).text
    assert text.removeprefix("\ufeff") == "used [redacted]"


def test_files_that_hold_credentials_by_their_names_are_not_shown(client: TestClient, root: Path):
    for name in ("credentials.json", "id_rsa.txt", ".netrc.txt", ".ENV.txt"):
        (root / "a" / name).write_text("private")
        assert client.get("/api/file", params={"run": "a", "path": name}).status_code == 404, name
    files = client.get("/api/media", params={"run": "a"}).json()["files"]
    assert [each["path"] for each in files] == ["config.yaml", "run.json"]


def test_of_a_long_text_the_beginning_is_shown(client: TestClient, root: Path):
    (root / "a" / "long.log").write_bytes(b"x" * 300_000)
    text = client.get("/api/file", params={"run": "a", "path": "long.log"}).text
    assert text == "x" * 200_000 + "\n... and 100,000 more bytes"


def test_a_file_that_cannot_be_read_is_an_answer(client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a.txt", "a.png"):
        (root / "a" / name).write_text("x")

    def gone(path: Path, *words: object, **options: object) -> object:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    for each in ("open", "read_bytes"):
        monkeypatch.setattr(Path, each, gone)
    for name in ("a.txt", "a.png"):
        answer = client.get("/api/file", params={"run": "a", "path": name})
        assert (answer.status_code, "cannot be read" in answer.json()["error"]) == (404, True)


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "", ":", "@", "127.0.0.1@evil.example"])
def test_a_host_that_is_none_is_refused(host: str, client: TestClient):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


def test_a_run_that_is_removed_while_it_is_served(root: Path):
    store = Store(root)
    try:
        shutil.rmtree(root / "a")
        series = store.series("a")
        end = time.monotonic() + 60
        while series is None:
            assert time.monotonic() < end, "the run is neither read nor refused"
            time.sleep(0.05)
            series = store.series("a")
        assert "does not exist" in str(series)
        store.refresh()
        assert store.runs == {}
    finally:
        store.close()


def test_a_root_that_is_removed_while_it_is_served(root: Path):
    store = Store(root)
    try:
        shutil.rmtree(root)
        store.refresh()
        assert store.runs == {}
    finally:
        store.close()


def test_a_long_log_of_a_run_that_is_going_holds_up_no_other_run(root: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("long", "short"):
        own(write_run(root / name, [1.0], None, closed=False), os.getpid())
    begun, may_end = threading.Event(), threading.Event()

    def reading(folder: Path, seconds: float | None = None) -> RunSeries:
        if folder.name == "long":
            begun.set()
            assert may_end.wait(60)
        return RunSeries(folder, seconds)

    monkeypatch.setattr("pulsetrain.serve.store.RunSeries", reading)
    store = Store(root)
    threads = {name: threading.Thread(target=store.series, args=(name,)) for name in ("long", "short")}
    watching = threading.Thread(target=lambda: [live.update() for live in [*store._live.values()]])
    try:
        threads["long"].start()
        assert begun.wait(60)
        for thread in (threads["short"], watching):
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
    finally:
        may_end.set()
        for thread in (*threads.values(), watching):
            thread.join()
        store.close()
    assert [not isinstance(store.series(name), str) for name in threads] == [True, True]


def test_a_long_log_of_a_run_that_is_going_is_read_in_parts(root: Path, monkeypatch: pytest.MonkeyPatch):
    writer = LogWriter(root / "long" / "events")
    for seq in range(30_000):
        event = LoggedEvent(
            seq, "trainer", "iteration_completed", 1, seq + 1, output={"loss": 1.0}, seq=seq, t=BEGUN + seq
        )
        writer.add(event)
    own(root / "long", os.getpid())
    monkeypatch.setattr("pulsetrain.serve.store._PART", 0.0)
    monkeypatch.setattr("pulsetrain.serve.series._PART", 0.0)
    store, counts = Store(root), list[int]()
    try:
        live = store.series("long")
        assert isinstance(live, _Live)
        while live.is_partial:
            assert store.reading == 1
            counts.append(len(live.points("loss, each iteration")[0]))
            assert live.update()
        assert store.reading == 0
        assert 0 < counts[0] < counts[-1] < 30_000
        assert len(live.points("loss, each iteration")[0]) == 30_000
    finally:
        store.close()
    series = RunSeries(root / "long", 0.0)
    assert not series.is_complete
    shutil.rmtree(root / "long")
    assert not series.update()


def test_a_root_that_is_a_run_is_only_read(root: Path):
    store = Store(root / "a")
    try:
        assert not isinstance(read(store, "a"), str)
    finally:
        store.close()
    assert not (root / "a" / ".pulsetrain").exists()
    assert not store._folder.exists()


def test_points_that_cannot_be_kept_in_the_root_are_removed_at_the_end(root: Path):
    (root / ".pulsetrain").write_text("not a folder")
    store = Store(root)
    try:
        assert not isinstance(read(store, "a"), str)
        assert store._folder.exists()
    finally:
        store.close()
    assert not store._folder.exists()


def test_times_ascend_although_the_clock_was_put_back(tmp_path: Path):
    writer = LogWriter(tmp_path / "events")
    for seq, second in enumerate([0, 10, 5, 20]):
        at = {"iteration": seq + 1, "seq": seq, "t": BEGUN + second * SECOND}
        writer.add(LoggedEvent(seq, "trainer", "iteration_completed", output={"loss": 1.0}, **at))
    writer.close()
    found = RunSeries(tmp_path).points("loss, each iteration")
    assert found is not None
    assert found[1].tolist() == [0, 10, 10, 20]


def test_a_port_in_use_is_named_with_the_remedy(root: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(root), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port={port}): cannot be used: Address already in use; choose another port, or port 0" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("host", ["203.0.113.1", "none.invalid", ""])
def test_a_host_that_is_not_this_machine_is_named(host: str, root: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", str(root), "--host", host, "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert f"host={host!r}, port=0): cannot be used: " in said
    assert "choose an address of this machine" in said


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a\x1b[2J", "two\nlines", "n" * 200, "\u202egnp.exe"])
def test_hostile_names_are_texts(name: str, root: Path):
    write_run(root / name, [1.0])
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    try:
        answer = TestClient(app, base_url=BASE).get("/api/runs")
        assert answer.headers["content-type"] == "application/json"
        assert name in [run["id"] for run in answer.json()["runs"]]
    finally:
        close()


def test_a_damaged_run_hides_no_other(root: Path):
    (root / "b" / "events").mkdir(parents=True)
    (root / "b" / "events" / "events.jsonl.zst").write_bytes(os.urandom(5000))
    (root / "c").mkdir()
    (root / "c" / "run.json").write_bytes(b"\xff\x00")
    store = Store(root)
    try:
        assert sorted(store.runs) == ["a", "b", "c"]
        assert not isinstance(read(store, "a"), str)
        assert isinstance(read(store, "c"), str)
    finally:
        store.close()


def test_an_unexpected_error_is_one_line_and_an_answer(
    client: TestClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pulsetrain.serve.api.read_facts", lambda folder: 1 / 0)
    answer = client.get("/api/configurations", params={"run": "a"})
    assert (answer.status_code, answer.json()["error"]) == (500, "ZeroDivisionError: division by zero")
    said = capsys.readouterr()
    assert "/api/configurations" in said.out + said.err
    assert "Traceback" not in said.out + said.err


def test_descriptions_of_another_shape_are_shown_as_far_as_they_can_be(client: TestClient, root: Path):
    (root / "a" / "run.json").write_text(json.dumps({"environment": [1], "settings": 5, "modes": [], "parent": 3}))
    (root / "a" / "config.yaml").write_text("[" * 2000)
    answer = client.get("/api/configurations", params={"run": "a"})
    assert answer.status_code == 200
    assert "config.yaml" in [row["key"] for row in answer.json()]
