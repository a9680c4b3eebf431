"""What the page asks for, and who may ask."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.testclient import TestClient

from pulsetrain.cli import main
from pulsetrain.engine import ConfigurationError
from pulsetrain.runs.tags import change_tags
from pulsetrain.serve.access import is_loopback
from pulsetrain.serve.api import _brief
from pulsetrain.serve.server import _bound, app_of, serve
from pulsetrain.serve.store import Store
from tests.support.curves import lines_of
from tests.support.run_folders import write_counting_run, write_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    write_run(root / "a", [1.0, 0.5, 0.6, 0.7, 0.8], rate=0.1)
    write_run(root / "b", [2.0, 0.25], "terminate", reason="early stopping: enough", rate=0.01)
    parent = {"run": str((root / "a").resolve()), "id": "a", "iteration": 5, "checkpoint": "000000005-x"}
    parent["changed"] = ["training.learning_rate: 1.0 -> 0.1", "a: 1 -> 2"]
    write_run(root / "more" / "c", [3.0], "exception_raised", reason="bad", rate=0.1, parent=parent)
    return root


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    yield TestClient(app, base_url="http://127.0.0.1:8765")
    close()


def ask(client: TestClient, path: str, **words: Any) -> Any:
    answer = client.get(f"/api/{path}", params=words)
    assert answer.status_code == 200, answer.text
    return answer.json()


def curves(client: TestClient, name: str, *runs: str, **words: Any) -> dict[str, list[list[float]]]:
    """Places and values of a curve's points, by run."""
    answer = client.get("/api/curves", params={"name": name, "run": list(runs), **words})
    assert answer.status_code == 200, answer.text
    lines, _ = lines_of(answer.content)
    return lines[name]


def read(client: TestClient, *runs: str) -> None:
    """Wait until the curves of the runs are read."""
    end = time.monotonic() + 60
    while ask(client, "names", run=list(runs))["pending"]:
        assert time.monotonic() < end, "the curves are not read"
        time.sleep(0.1)


def test_the_list_has_every_run_with_its_parent(client: TestClient, root: Path):
    found = ask(client, "runs")
    assert [(run["id"], run["status"]) for run in found["runs"]] == [
        ("a", "completed"), ("b", "stopped"), ("more/c", "failed"),
    ]  # fmt: skip
    assert found["runs"][1]["best"] == {"val/loss": 0.25, "val/accuracy": 0.75}
    assert found["runs"][2]["parent"] == {
        "run": str(root.resolve() / "a"), "id": "a", "iteration": 5, "checkpoint": "000000005-x",
        "changed": ["training.learning_rate: 1.0 -> 0.1", "a: 1 -> 2"], "listed": "a",
    }  # fmt: skip
    assert "training.learning_rate" in found["columns"]


def test_the_parent_of_a_run_that_was_moved_is_found_by_its_id(root: Path, tmp_path: Path):
    described = json.loads((root / "a" / "run.json").read_text())
    (root / "a" / "run.json").write_text(json.dumps({**described, "id": "a"}))
    root.rename(tmp_path / "elsewhere")
    app, _, close = app_of(tmp_path / "elsewhere", None, frozenset({"127.0.0.1"}))
    found = ask(TestClient(app, base_url="http://127.0.0.1:8765"), "runs")["runs"]
    close()
    assert [run["parent"] and run["parent"]["listed"] for run in found] == [None, None, "a"]


def test_a_copy_of_the_parent_is_not_its_parent(root: Path):
    shutil.copytree(root / "a", root / "a2")
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    found = ask(TestClient(app, base_url="http://127.0.0.1:8765"), "runs")["runs"]
    close()
    assert [run["parent"]["listed"] for run in found if run["parent"]] == ["a"]


def test_credentials_in_tags_are_not_shown(root: Path):
    change_tags(root / "a", ["password=hunter2"])
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    found = TestClient(app, base_url="http://127.0.0.1:8765").get("/api/runs").text
    close()
    assert "hunter2" not in found
    assert (_brief(Store(root), "a") or {})["tags"] == ["password=[redacted]"]  # as in /api/live
    assert found.count("password=[redacted]") == 2  # as a cell, and as a tag


def test_credentials_in_the_description_of_a_parent_are_not_shown(root: Path):
    described = json.loads((root / "more" / "c" / "run.json").read_text())
    described["parent"]["changed"] = ["data.url: https://me:x7y@host/a -> 1"]
    (root / "more" / "c" / "run.json").write_text(json.dumps(described))
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    found = TestClient(app, base_url="http://127.0.0.1:8765").get("/api/runs").text
    close()
    assert "[redacted]@host" in found
    assert "x7y" not in found


def test_the_list_is_selected_like_pulsetrain_runs(client: TestClient):
    where = 'best["val/loss"] < 0.4 or status == "failed"'
    assert [run["id"] for run in ask(client, "runs", where=where)["runs"]] == ["b", "more/c"]
    answer = client.get("/api/runs", params={"where": "training.rate > 1"})
    assert answer.status_code == 400
    assert "did you mean" in answer.json()["error"]
    answer = client.get("/api/runs", params={"where": "__import__('os').system('true')"})
    assert answer.status_code == 400


def test_the_list_is_whole_while_the_folder_is_looked_through(root: Path, monkeypatch: pytest.MonkeyPatch):
    from pulsetrain.serve import api
    from pulsetrain.serve.changes import Changes
    from pulsetrain.serve.store import Store

    store, select = Store(root), api.select_runs

    def selecting(*words: Any) -> Any:
        found = select(*words)
        store.refresh()  # as its thread does meanwhile
        return found

    monkeypatch.setattr(api, "select_runs", selecting)
    client = TestClient(Starlette(routes=api.routes_of(store, Changes())))
    try:
        assert [run["id"] for run in ask(client, "runs")["runs"]] == ["a", "b", "more/c"]
    finally:
        store.close()


def test_curves_are_read_in_the_background_and_then_drawn(client: TestClient):
    read(client, "a", "b")
    names = ask(client, "names", run=["a", "b"])
    assert names["validated"] == ["val/loss", "val/accuracy", "val/other"]
    assert curves(client, "val/loss", "a", "b")["b"] == [[5, 10], [2.0, 0.25]]
    part = curves(client, "loss, each iteration", "a", low=10, high=12)["a"]
    assert part[0] == [9, 10, 11, 12, 13]
    times, _ = curves(client, "val/loss", "a", x="time")["a"]
    assert times == sorted(times)
    assert times[0] > 0
    answer = client.get("/api/curves", params={"name": ["val/loss", "val/other", "none"], "run": ["a", "b"]})
    several, _ = lines_of(answer.content)
    assert {name: list(lines) for name, lines in several.items()} == {
        "val/loss": ["a", "b"], "val/other": ["a", "b"], "none": [],
    }  # fmt: skip
    assert several["val/other"]["b"] == [[5, 10], [0.5, 0.5]]


def test_curves_by_tokens_of_the_runs_that_count_them(root: Path):
    write_counting_run(root / "counting")
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    try:
        client = TestClient(app, base_url="http://127.0.0.1")
        read(client, "a", "counting")
        assert ask(client, "names", run=["a", "counting"])["tokens"]
        assert not ask(client, "names", run="a")["tokens"]
        read(client, "b")
        words = {"run": ["a", "b", "counting"], "name": "loss, each iteration", "x": "tokens"}
        charts, uncounted = lines_of(client.get("/api/curves", params=words).content)
        found = charts["loss, each iteration"]
        assert {name: x for name, (x, _) in found.items()} == {"counting": [200, 200, 300, 400, 400, 500, 600]}
        assert uncounted == ["a", "b"]
    finally:
        close()


def test_a_run_that_is_going_is_read_as_it_grows(root: Path):
    run = write_run(root / "live", [1.0], None, closed=False, last=time.time())
    (run / ".owner").write_bytes((str(os.getpid())).encode())
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    client = TestClient(app, base_url="http://127.0.0.1:8765")
    try:
        (status,) = [each["status"] for each in ask(client, "runs")["runs"] if each["id"] == "live"]
        if status in ("running", "stalled"):
            assert curves(client, "val/loss", "live")["live"][1] == [1.0]
        else:
            read(client, "live")
    finally:
        close()


def test_events_are_selected_and_paged(client: TestClient):
    found = ask(client, "events", run="b", event="validation_completed")
    assert [event["payload"]["metrics"]["val/loss"] for event in found["events"]] == [2.0, 0.25]
    found = ask(client, "events", run="b", where='event == "iteration_completed" and iteration > 8')
    assert [event["iteration"] for event in found["events"]] == [9, 10]
    assert "terminate" in found["kinds"]
    rest = ask(client, "events", run="b", after=found["events"][-1]["seq"] + 1)
    assert rest["events"][0]["event"] == "validation_completed"


def test_differences_are_those_of_pulsetrain_diff(client: TestClient, root: Path, capsys: pytest.CaptureFixture[str]):
    found = ask(client, "diff", a="a", b="b")
    assert main(["diff", str(root / "a"), str(root / "b")]) == 1
    assert found["report"].strip() == capsys.readouterr().out.strip()
    rows = ask(client, "configurations", run=["a", "b"])
    assert next(row["key"] for row in rows if row["differs"]) == "training.learning_rate"


@pytest.mark.parametrize("patience", [1, 2, 3, 4])
def test_early_stopping_is_judged_as_replay_does(
    patience: int, client: TestClient, root: Path, capsys: pytest.CaptureFixture[str]
):
    read(client, "a")
    found = ask(client, "whatif", run="a", metric="val/loss", patience=patience)["a"]
    assert (
        main(["replay", str(root / "a"), "--handler", f"early_stopping:patience={patience}", "--format", "json"]) == 0
    )

    expected = json.loads(capsys.readouterr().out)
    assert (found["stops_at"], found["best"], found["saved"]) == (
        expected["iteration"], expected["best"], expected["saved"],
    )  # fmt: skip


def test_a_what_if_says_what_it_cannot_know(client: TestClient):
    read(client, "a")
    answer = client.get("/api/whatif", params={"run": "a", "metric": "val/other"})
    assert "choose min or max" in answer.json()["error"]
    assert ask(client, "whatif", run="a", metric="val/other", mode="max")["a"]["values"] == 5
    assert ask(client, "whatif", run="a", metric="val/none_loss")["a"]["values"] == 0
    answer = client.get("/api/whatif", params={"run": "a", "patience": "many"})
    assert answer.status_code == 400
    for window in ("1e300", "-1e300"):
        answer = client.get("/api/whatif", params={"run": "a", "handler": "LossSpikeGuard", "window": window})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(f"window='{window}': is too large; choose a whole number")
    assert ask(client, "whatif", run="a", handler="LossSpikeGuard", window=2**53)["a"]["spikes"] == 0
    spikes = ask(client, "whatif", run="a", handler="LossSpikeGuard", metric="loss", threshold=5)["a"]
    assert (spikes["spikes"], spikes["values"]) == (0, 25)


def test_only_pictures_and_texts_inside_of_a_run_are_shown(client: TestClient, root: Path, tmp_path: Path):
    (tmp_path / "secret.txt").write_text("secret")
    (root / "a" / "notes.txt").write_text("password: S3cr3tV4lue and <b>text</b>")
    (root / "a" / ".env.txt").write_text("hidden")
    (root / "a" / "page.html").write_text("<script>")
    (root / "a" / "loss.png").write_bytes(b"\x89PNG")
    os.symlink(tmp_path / "secret.txt", root / "a" / "link.txt")
    files = [each["path"] for each in ask(client, "media", run="a")["files"]]
    assert {"notes.txt", "loss.png"} <= set(files)
    assert not {"link.txt", ".env.txt", "page.html"} & set(files)
    text = client.get("/api/file", params={"run": "a", "path": "notes.txt"})
    assert text.headers["content-type"].startswith("text/plain")
    assert "S3cr3t" not in text.text
    assert "<b>text</b>" in text.text
    assert client.get("/api/file", params={"run": "a", "path": "loss.png"}).headers["content-type"] == "image/png"
    for path in ("../../secret.txt", "link.txt", str(tmp_path / "secret.txt"), ".env.txt", "page.html", "a\0.txt"):
        assert client.get("/api/file", params={"run": "a", "path": path}).status_code == 404, path


@pytest.mark.parametrize("run", ["../a", "", "no", "a/../b", "/etc"])
def test_only_listed_runs_are_read(run: str, client: TestClient):
    for path in ("events", "media", "where"):
        answer = client.get(f"/api/{path}", params={"run": run})
        assert answer.status_code == 400
        assert "is not a run below" in answer.json()["error"]


def test_a_run_that_was_removed_does_not_hide_the_others(client: TestClient, root: Path):
    read(client, "a")
    found = ask(client, "names", run=["a", "gone"])
    assert found["gone"] == ["gone"]
    assert "val/loss" in found["names"]
    assert list(curves(client, "val/loss", "gone", "a")) == ["a"]
    happened = ask(client, "marks", run=["gone", "a"])
    assert list(happened) == ["a"]
    assert (happened["a"]["custom"], len(happened["a"]["marks"]["validations"])) == ({}, 5)


def test_a_handler_that_is_not_judged_is_refused(client: TestClient):
    answer = client.get("/api/whatif", params={"run": "a", "handler": "NaNGuard"})
    assert "choose EarlyStopping or LossSpikeGuard" in answer.json()["error"]


def test_bad_numbers_are_refused(client: TestClient):
    for words in ({"low": "x"}, {"high": "inf"}, {"x": "epochs"}):
        answer = client.get("/api/curves", params={"run": "a", "name": "val/loss", **words})
        assert answer.status_code == 400, words


def test_every_answer_has_the_policy_and_nothing_can_be_changed(client: TestClient):
    for path in ("/", "/main.js", "/api/runs", "/nothing", "/plotly.js"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
    for method in ("post", "put", "delete", "patch"):
        assert getattr(client, method)("/api/runs").status_code == 405


@pytest.mark.parametrize("name", ["..%2Fserver.py", "server.py", "main.css", "static"])
def test_only_the_files_of_the_page_are_given_out(name: str, client: TestClient):
    assert client.get(f"/{name}").status_code == 404


def test_another_host_name_is_refused(client: TestClient):
    answer = client.get("/api/runs", headers={"host": "evil.example:8765"})
    assert answer.status_code == 421


def test_a_token_is_needed_where_others_can_connect(root: Path):
    app, _, close = app_of(root, "right", None)
    try:
        client = TestClient(app, base_url="http://10.0.0.1:8765", follow_redirects=False)
        assert client.get("/api/runs").status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        assert client.get("/api/runs", headers={"cookie": "pulsetrain-token-8765=wrong"}).status_code == 401
        assert client.get("/api/runs", headers={"cookie": "a b; ="}).status_code == 401
        answer = client.get("/?token=right")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert client.get("http://10.0.0.1:8765//evil.example/?token=right").headers["location"] == "/evil.example/"
        assert "httponly" in answer.headers["set-cookie"].lower()
        assert "samesite=lax" in answer.headers["set-cookie"].lower()
        assert client.get("/api/runs", headers={"cookie": "pulsetrain-token-8765=right"}).status_code == 200
    finally:
        close()


def test_servers_at_two_ports_of_a_host_keep_their_tokens_apart(root: Path):
    (one, _, close_one), (other, _, close_other) = app_of(root, "first", None), app_of(root, "second", None)
    try:
        clients = [
            TestClient(app, base_url=f"http://10.0.0.1:{port}", follow_redirects=False)
            for app, port in ((one, 8765), (other, 8766))
        ]
        cookies: dict[str, str] = {}  # a browser keeps those of all ports of a host together
        for client, token in zip(clients, ("first", "second"), strict=True):
            cookies |= dict(client.get(f"/?token={token}").cookies)
        assert cookies == {"pulsetrain-token-8765": "first", "pulsetrain-token-8766": "second"}
        kept = "; ".join(f"{name}={value}" for name, value in cookies.items())
        assert [client.get("/api/runs", headers={"cookie": kept}).status_code for client in clients] == [200, 200]
    finally:
        close_one()
        close_other()


def test_addresses_that_only_this_machine_reaches():
    assert [is_loopback(each) for each in ("127.0.0.1", "127.1.2.3", "::1", "localhost")] == [True] * 4
    assert [is_loopback(each) for each in ("0.0.0.0", "::", "10.0.0.1", "example.org")] == [False] * 4


def test_names_that_are_not_utf_8_are_listed(root: Path):
    os.rename(root / "b", os.fsencode(root) + b"/b\xff<img src=x>")
    app, _, close = app_of(root, None, frozenset({"127.0.0.1"}))
    try:
        client = TestClient(app, base_url="http://127.0.0.1")
        assert "b\\xff<img src=x>" in [run["id"] for run in ask(client, "runs")["runs"]]
        assert ask(client, "events", run="b\\xff<img src=x>")["events"]
    finally:
        close()


@pytest.mark.parametrize("token", ["", "short", "a token with spaces", "tökentoken"])
def test_a_token_that_is_too_simple_is_refused(token: str, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="needs at least 8 letters"):
        serve(tmp_path, host="0.0.0.0", port=0, token=token)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_does_not_exist_is_refused(port: int, tmp_path: Path):
    with pytest.raises(ConfigurationError, match=f"port={port}"):
        _bound("127.0.0.1", port)
