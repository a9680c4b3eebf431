"""Folders and files that are not as they should be: the commands about many runs name them, and lose nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.configuration.rebuild import rebuild
from pulsetrain.engine.checkpoint import CheckpointManager, find_checkpoints
from pulsetrain.engine.errors import PulsetrainError, RunFolderError
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.recording import EventLog, LoggedEvent, LogWriter
from pulsetrain.handlers.run_files.owner_process import processes
from pulsetrain.runs.index import INDEX, RunIndex
from pulsetrain.runs.live import LiveRun
from pulsetrain.runs.prune import prune, superfluous
from pulsetrain.runs.summary import Status, summarize
from pulsetrain.runs.tags import change_tags, read_tags
from tests.pulsetrain.runs.test_summary import own
from tests.support.largest_file import largest_file
from tests.support.run_folders import BEGUN, write_run

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "a\x1b[2J\x1b]0;owned\x07",
    "two\nlines",
    "n" * 200,
    "\u202egnp.exe",
    "caf\udce9",
]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def newer_run_file(folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps({"format": 7, "id": "another", "settings": [1, 2]}))


def test_a_run_of_a_newer_version_is_not_called_damaged(root: Path, capsys: pytest.CaptureFixture[str]):
    newer_run_file(write_run(root / "a", [1.0]))
    rule = "run.json has format 7, and this version reads up to 1; read the run with a newer pulsetrain"
    found = summarize(root / "a")
    assert (found.status, found.reason) == (Status.COMPLETED, rule)
    assert main(["runs", ".", "--columns", "run,reason"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"a    {rule}"
    assert main(["watch", "a", "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"a: {rule}"
    assert main(["archive", "a"]) == 0
    assert capsys.readouterr().err == f"pulsetrain: a: {rule}\n"
    write_run(root / "b", [1.0])
    assert main(["bisect", "a", "b"]) == 2
    assert capsys.readouterr().err == f"pulsetrain: error: a: {rule}\n"
    with pytest.raises(RunFolderError, match=re.escape(f"a: {rule}")):  # of verify, fork and debug
        rebuild(Path("a"), Path("c"))


def test_a_newer_log_says_so_and_not_that_nothing_was_recorded(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pulsetrain.engine.recording.log.writer.FORMAT", 3)
    folder = write_run(root / "a", [1.0] * 400)
    rule = "has format 3, and this version reads up to 2; read it with a newer pulsetrain"
    assert summarize(folder).reason == f"events/events.jsonl.zst: {rule}"


def test_what_another_version_could_not_read_is_read_again(root: Path, monkeypatch: pytest.MonkeyPatch):
    newer_run_file(write_run(root / "another", [1.0]))
    assert "newer pulsetrain" in RunIndex(root).summaries()[0].reason
    monkeypatch.setattr("pulsetrain.engine.recording.log.run_file.RUN_FORMAT", 7)
    monkeypatch.setattr("pulsetrain.runs.index._VERSION", 0x50702)
    assert RunIndex(root).summaries()[0].reason == ""


def test_a_damaged_log_says_what_to_do(root: Path):
    folder = write_run(root / "a", [1.0] * 400)
    log = folder / "events" / "events.jsonl.zst"
    data = bytearray(log.read_bytes())
    data[40] ^= 1
    log.write_bytes(data)
    damage = EventLog(folder).damage[0]
    command = f"pulsetrain events {folder} --check"
    assert summarize(folder).reason == f"damaged log: {damage}; `{command}` lists what is lost"


def followed(folder: Path) -> str:
    """What is named where a run cannot be followed."""
    try:
        LiveRun(folder).update()
    except PulsetrainError as error:
        return str(folder) if str(folder) in str(error) else str(error)
    return ""


@pytest.mark.parametrize(
    "file", ["events/events.jsonl.zst", "events/tail.jsonl", "run.json", "config.yaml", "tags.json"]
)
@pytest.mark.parametrize("closed", [True, False])
def test_any_damage_of_a_file_is_survived(file: str, closed: bool, root: Path):
    """Empty, cut anywhere, or with bytes changed anywhere: a summary, and a live view, or an error with a name."""
    folder = write_run(root / "a", [1.0, 0.5] * 200, closed=closed)
    change_tags(folder, ["good"])
    path, draw = folder / file, random.Random(0)
    whole = path.read_bytes() if path.exists() else b""
    assert whole
    for number in range(30):
        data = bytearray(whole)
        if number % 3 == 0:
            del data[draw.randrange(len(data)) if number else 0 :]
        for _ in range(draw.randrange(1, 4) if data and number % 3 else 0):
            data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        path.write_bytes(data)
        assert summarize(folder).folder == folder
        assert followed(folder) in ("", str(folder))


@pytest.mark.parametrize("pid", [None, [1], "x", 10**30, True, {}])
def test_a_damaged_owner_file_is_survived(pid: object, root: Path):
    folder = write_run(root / "a", [1.0], None, closed=False)
    (folder / ".owner").write_text(json.dumps({"pid": pid, "processes": processes()}))
    assert summarize(folder, now=0.0).status is Status.RUNNING


def test_hostile_names_are_escaped_wherever_they_are_listed(root: Path, capsys: pytest.CaptureFixture[str]):
    for name in HOSTILE:
        run = write_run(root / "runs" / "run", [1.0], "exception_raised", reason=name.replace("\udce9", ""))
        change_tags(run, ["good"])
        run.rename(root / "runs" / name)
    for form in ("table", "csv"):
        assert main(["runs", "runs", "--columns", "run,reason", "--format", form]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1 + len(HOSTILE)
        assert all(map(str.isprintable, lines))
    assert main(["runs", "runs", "--columns", "run", "--format", "json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["run"] for row in rows} == set(HOSTILE)
    for name in HOSTILE:
        assert main(["watch", f"runs/{name}", "--once"]) == 0
        assert all(map(str.isprintable, capsys.readouterr().out.splitlines()))
        assert main(["tag", f"runs/{name}", "--add", "paper"]) == 0
        assert capsys.readouterr().out == f"{plain(f'runs/{name}')}: good, paper\n"
        assert main(["tag", f"runs/{name}/none", "--add", "paper"]) == 2
        assert capsys.readouterr().err.replace("\n", "").isprintable()


def test_hostile_metrics_and_tags_of_others_are_escaped(root: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(root / "a", [1.0])
    (folder / "tags.json").write_text(json.dumps(["\x1b[31m", "b"]))
    (folder / "config.yaml").write_text(json.dumps({"x\x1b[2J": 1}))
    write_run(root / "b", [1.0])
    assert main(["runs", "."]) == 0
    assert all(map(str.isprintable, capsys.readouterr().out.splitlines()))


def test_values_that_are_not_finite_are_valid_json(root: Path, capsys: pytest.CaptureFixture[str]):
    writer = LogWriter(root / "a" / "events")
    payload = {"metrics": {"val/loss": "NaN"}}  # as EventRecorder writes it
    writer.add(LoggedEvent(0, "trainer", "validation_completed", payload=payload, seq=0, t=BEGUN))
    writer.close()
    assert main(["runs", ".", "--columns", "run,val/loss", "--format", "json"]) == 0
    row = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {"run": "a", "val/loss": "NaN"}
    assert main(["runs", ".", "--columns", "run,val/loss", "--format", "csv"]) == 0
    assert list(csv.reader(io.StringIO(capsys.readouterr().out)))[1] == ["a", "nan"]


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_limit_below_one_is_refused(limit: str, root: Path, capsys: pytest.CaptureFixture[str]):
    write_run(root / "a", [1.0])
    assert main(["runs", ".", f"--limit={limit}"]) == 2
    assert f"limit={limit}): needs a whole number of at least 1" in capsys.readouterr().err


def test_a_folder_whose_name_has_the_letters_of_a_url_is_remembered(root: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(root / "50%25 of #1?" / "a", [1.0])
    first = RunIndex(root / "50%25 of #1?").summaries()
    monkeypatch.setattr("pulsetrain.runs.index.summarize", lambda folder: pytest.fail(f"{folder} is read again"))
    assert (root / "50%25 of #1?" / INDEX).exists()
    assert RunIndex(root / "50%25 of #1?").summaries() == first


def test_damaged_tags_are_not_overwritten(root: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(root / "a", [1.0])
    (folder / "tags.json").write_text('["good", "paper",]')
    assert read_tags(folder) == ()
    assert main(["tag", "a", "--add", "new"]) == 2
    assert "a/tags.json: cannot be read" in capsys.readouterr().err
    assert (folder / "tags.json").read_text() == '["good", "paper",]'


def test_tags_that_cannot_be_written_leave_the_folder_as_it_was(root: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(root / "a", [1.0])
    change_tags(folder, ["good"])
    before = sorted(each.name for each in folder.iterdir())
    with largest_file(0):
        assert main(["tag", "a", "--add", "new"]) == 2
    assert "a/tags.json: cannot be written: File too large; make room on its disk" in capsys.readouterr().err
    assert sorted(each.name for each in folder.iterdir()) == before
    assert read_tags(folder) == ("good",)


def test_showing_tags_writes_nothing(root: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(root / "a", [1.0])
    assert main(["tag", "a"]) == 0
    assert capsys.readouterr().out == "a: no tags\n"
    assert not (folder / "tags.json").exists()


@pytest.mark.parametrize("part", ["[", "{a: ", "- ", "? "])
def test_a_configuration_that_nests_without_end_costs_only_the_settings(part: str, root: Path):
    folder = write_run(root / "a", [1.0])
    (folder / "config.yaml").write_text(part * 100_000)
    found = summarize(folder)
    assert (found.status, found.settings) == (Status.COMPLETED, {"training.max_epochs": 4})
    (folder / "run.json").write_text(part * 100_000)
    assert summarize(folder).settings == {}


def test_a_setting_that_utf_8_cannot_hold_is_remembered(root: Path):
    folder = write_run(root / "a", [1.0])
    (folder / "config.yaml").write_text('{"a": "\\ud800", "b": 2026-11-28, "c": !!set {d}}')
    first = RunIndex(root).summaries()
    assert [each.name for each in first] == ["a"]
    assert RunIndex(root).summaries() == first


@pytest.mark.parametrize("created", ["0001-01-01T00:00:00", "9999-12-31T23:59:59-2359", "", None, 5, "x" * 1000])
def test_a_date_that_is_none_costs_only_itself(created: object, root: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(root / "a", [1.0])
    (folder / "run.json").write_text(json.dumps({"format": 1, "id": "a", "created": created}))
    assert main(["runs", ".", "--columns", "run,started"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("a")


def test_a_clock_that_was_put_back_breaks_nothing(root: Path, capsys: pytest.CaptureFixture[str]):
    """The run's events are of a time to come."""
    folder = write_run(root / "a", [1.0], None, closed=False)
    own(folder, os.getpid())
    future = LiveRun(folder, clock=lambda: 0.0)
    future.update()
    assert future.status is Status.RUNNING
    assert summarize(folder, now=0.0).status is Status.RUNNING
    assert main(["watch", "a", "--once"]) == 0
    assert "no event for -" not in capsys.readouterr().out


def test_a_run_that_is_removed_while_it_is_listed_is_left_out(root: Path, monkeypatch: pytest.MonkeyPatch):
    for name in "abc":
        write_run(root / name, [1.0])
    found = summarize

    def removing(folder: Path) -> object:
        if folder.name == "b":
            shutil.rmtree(folder)
        return found(folder)

    monkeypatch.setattr("pulsetrain.runs.index.summarize", removing)
    assert [each.name for each in RunIndex(root).summaries()] == ["a", "c"]


def test_a_run_that_is_removed_while_it_is_watched_is_named(root: Path):
    folder = write_run(root / "a", [1.0], None, closed=False)
    run = LiveRun(folder)
    run.update()
    shutil.rmtree(folder)
    assert not run.update()
    assert run.progress.iteration == 5


def test_ten_thousand_empty_folders_are_looked_through(root: Path, capsys: pytest.CaptureFixture[str]):
    for number in range(10_000):
        (root / f"{number}").mkdir()
    write_run(root / "7" / "a", [1.0])
    assert main(["runs", "."]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["7/a"]


def with_checkpoints(run: Path) -> CheckpointManager:
    manager = CheckpointManager(run / "checkpoints", keep_last_n=100)
    for step in (1, 2, 3):
        manager.save({"step": step}, "x", step=step)
    return manager


def test_checkpoints_of_a_newer_version_are_not_pruned(root: Path):
    run = write_run(root / "a", [1.0])
    newest = with_checkpoints(run).valid()[-1]
    manifest = Path(str(newest)) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    assert main(["prune", "a", "--yes"]) == 0
    assert [each.name for each in find_checkpoints(run / "checkpoints")] == ["000000002-x", "000000003-x"]


def test_a_run_that_was_resumed_since_it_was_looked_at_is_not_pruned(root: Path):
    run = write_run(root / "a", [1.0], None, closed=False)
    with_checkpoints(run)
    found = superfluous(run, 1)
    assert len(found.checkpoints) == 2
    own(run, os.getpid())
    assert prune(found) == found.checkpoints
    assert len(find_checkpoints(run / "checkpoints")) == 3


AS_NOBODY = """
import os, sys
from pulsetrain.cli import main
os.chdir(sys.argv[1])
for line in sys.argv[2:]:
    status = main(line.split())
    sys.stdout.flush()
    print(status, file=sys.stderr, flush=True)
"""


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def as_a_user_without_rights(folder: Path, *lines: str) -> tuple[list[str], list[str]]:
    """What commands print for a user who may not read everything: standard output and standard error."""
    words = [sys.executable, "-c", AS_NOBODY, str(folder), *lines]
    if os.geteuid() == 0:
        words = [*NOBODY, *words]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "HOME": "/nonexistent"}
    )
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture
def guarded(root: Path) -> Path:
    """Runs of which a user without rights can read one."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root may read everything, and setpriv is not there to become another user")
    able = [*NOBODY, sys.executable, "-c", "import pulsetrain.cli"]
    if os.geteuid() == 0 and subprocess.run(able, check=False, capture_output=True).returncode != 0:
        pytest.skip(f"root may read everything, and another user cannot import pulsetrain with {sys.executable}")
    for path in (root, *root.parents):  # those that pytest has made
        if path.stat().st_mode & 0o5 != 0o5 and path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o5)
    for name in ("closed", "listed", "log", "open"):
        write_run(root / name, [1.0])
    (root / "log" / "events").chmod(0)
    (root / "closed").chmod(0)
    (root / "listed").chmod(0o444)
    return root


def test_what_may_not_be_read_is_named(guarded: Path):
    try:
        said, errors = as_a_user_without_rights(
            guarded, "runs . --columns run,status,reason", "watch closed --once", "watch log --once",
            "tag closed --add x", "tag open --add x", "archive open", "prune . --yes",
        )  # fmt: skip
    finally:
        for name in ("closed", "listed", "log/events"):
            (guarded / name).chmod(0o755)
    assert [line.split()[0] for line in said[:3]] == ["run", "log", "open"]
    assert said[1].endswith("the log cannot be read: Permission denied")
    assert sorted(errors[:2]) == [
        f"pulsetrain: {name}: cannot be read: permission denied" for name in ("closed", "listed")
    ]
    rest = "\n".join(errors)
    assert "closed: cannot be read: permission denied; ask its owner for access" in rest
    assert "open/tags.json: cannot be written: Permission denied" in rest
    assert "open.run.zip: the archive cannot be written: Permission denied" in rest


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("run.json", "completed"), ("config.yaml", "completed"), ("tags.json", "completed"),
        ("events/events.jsonl.zst", "is a pipe or a device, not a file"),
        ("events/tail.jsonl", "is a pipe or a device, not a file"),
    ],
)  # fmt: skip
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    name: str, shown: str, root: Path, capsys: pytest.CaptureFixture[str]
):
    folder = write_run(root / "a", [1.0])
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert main(["runs", ".", "--columns", "run,status,reason"]) == 0
    assert shown in capsys.readouterr().out


def test_a_run_with_a_pipe_in_the_place_of_its_owner_has_been_killed(root: Path):
    folder = write_run(root / "a", [1.0], None, closed=False)
    os.mkfifo(folder / ".owner")
    assert summarize(folder).status is Status.KILLED


def test_aliases_that_repeat_without_end_are_not_followed(root: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(root / "a", [1.0])
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    (folder / "config.yaml").write_text("\n".join(lines))
    assert main(["runs", "."]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("a    completed")
    assert main(["train", str(folder / "config.yaml")]) == 2
    assert "its aliases (*name) repeat values, more than 100,000 in all" in capsys.readouterr().err


def test_tags_that_are_given_at_once_are_all_kept(root: Path):
    write_run(root / "a", [1.0])
    program = "import sys; from pathlib import Path; from pulsetrain.runs.tags import change_tags\n"
    program += "for n in range(50): change_tags(Path('a'), [f'{sys.argv[1]}{n}'])"
    started = [subprocess.Popen([sys.executable, "-c", program, name], cwd=root) for name in "xyz"]
    assert [each.wait() for each in started] == [0, 0, 0]
    assert set(read_tags(root / "a")) == {f"{name}{n}" for name in "xyz" for n in range(50)}
