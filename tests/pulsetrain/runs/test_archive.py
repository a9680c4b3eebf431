"""A run as one file."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from pulsetrain.cli import main
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.errors import RunFolderError
from pulsetrain.runs.archive import unpacked, write_archive
from tests.support.run_folders import content, write_run


def test_an_unpacked_run_has_the_same_bytes(run: Path, tmp_path: Path):
    made = write_archive(run, tmp_path / "a.run.zip", checkpoints="all")
    again = unpacked(made.path)
    assert again.name == "a"
    assert content(again) == content(run)
    assert made.files == len(content(run))
    assert (made.left_out, made.redacted) == ([], [])


@pytest.mark.parametrize(("kept", "steps"), [("none", []), ("best", [10]), ("latest", [15]), ("all", [5, 10, 15])])
def test_checkpoints_are_chosen(kept: str, steps: list[int], run: Path, tmp_path: Path):
    made = write_archive(run, tmp_path / "a.run.zip", checkpoints=kept)  # type: ignore[arg-type]
    manager = CheckpointManager(unpacked(made.path) / "checkpoints")
    assert [manager.load(each)["step"] for each in manager.valid()] == steps


def test_the_same_run_gives_the_same_file(run: Path, tmp_path: Path):
    a, b = (write_archive(run, tmp_path / name).path for name in ("1.zip", "2.zip"))
    assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize("words", [["events"], ["report", "--into", "a.html"], ["export", "--format", "json"]])
def test_commands_read_an_archive_like_its_folder(words: list[str], run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["archive", "runs/a"]) == 0
    assert capsys.readouterr().out.startswith("a.run.zip: ")
    if words[0] == "export":
        words = ["export", "--format", "csv", "--into"]
        assert (
            main([words[0], "runs/a", *words[1:], "1.csv"]) == main([words[0], "a.run.zip", *words[1:], "2.csv"]) == 0
        )
        assert Path("1.csv").read_bytes() == Path("2.csv").read_bytes()
        return
    assert main([words[0], "runs/a", *words[1:]]) == 0
    expected = capsys.readouterr().out
    extra = ["--force"] if words[0] == "report" else []
    assert main([words[0], "a.run.zip", *words[1:], *extra]) == 0
    assert capsys.readouterr().out == expected


def test_a_run_equals_its_archive(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["archive", "runs/a"]) == 0
    assert main(["diff", "runs/a", "a.run.zip"]) == 0
    write_run(Path("runs/b"), [1.0, 0.25])
    assert main(["diff", "runs/b", "a.run.zip"]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["diff", "RUN", "runs/b"],
        ["diff", "--ranks", "RUN"],
        ["replay", "RUN", "runs/b", "--handler", "early_stopping:patience=1,metric=val/loss"],
        ["replay", "RUN", "--handler", "early_stopping:patience=1,metric=no"],
        ["replay", "RUN", "--rank", "3", "--handler", "early_stopping:patience=1,metric=val/loss"],
        ["where", "RUN"],
        ["verify", "RUN"],
        ["watch", "RUN", "--once"],
        ["events", "RUN", "--check"],
        ["events", "RUN", "--event", "none"],
    ],
    ids=" ".join,
)
def test_what_a_command_says_of_an_archive_names_it(words: list[str], run: Path, capsys: pytest.CaptureFixture[str]):
    """The same as of the folder, if that had the archive's name."""
    write_run(Path("runs/b"), [1.0, 0.25])
    assert main(["archive", "runs/a"]) == 0
    run.rename("folder.zip")
    capsys.readouterr()

    def said(name: str) -> tuple[int, str, str]:
        status = main([name if word == "RUN" else word for word in words])
        found = capsys.readouterr()
        return status, *(re.sub(r"[\d,]+ s ago", "N s ago", text).rstrip() for text in (found.out, found.err))

    of_folder = said("folder.zip")
    Path("folder.zip").rename("moved")
    Path("a.run.zip").rename("folder.zip")
    of_archive = said("folder.zip")
    if words[0] == "watch":  # its head is the name of the run
        of_folder = (of_folder[0], of_folder[1].replace("folder.zip", "a", 1), of_folder[2])
    assert of_archive == of_folder
    assert "pulsetrain-archive-" not in "".join(of_archive[1:])


@pytest.mark.parametrize(
    "words",
    [
        ["fork", "a.run.zip", "--at", "5", "--into", "b"],
        ["tag", "a.run.zip", "--add", "good"],
        ["prune", "a.run.zip"],
        ["debug", "a.run.zip"],
        ["runs", "a.run.zip"],
        ["serve", "a.run.zip"],
        ["checkpoint", "consolidate", "a.run.zip", "--into", "b"],
    ],
    ids=" ".join,
)
def test_a_command_that_needs_a_folder_says_how_to_get_it(
    words: list[str], run: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["archive", "runs/a"]) == 0
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"a.run.zip: is an archive, and `pulsetrain {words[0]}` needs a folder" in said
    assert said.endswith("unpack it: pulsetrain archive --unpack a.run.zip --into FOLDER\n")


def test_the_remedy_can_be_given_to_a_shell(run: Path, capsys: pytest.CaptureFixture[str]):
    run.rename("my run")
    assert main(["archive", "my run"]) == 0
    assert main(["tag", "my run.run.zip"]) == 2
    remedy = capsys.readouterr().err.partition("unpack it: ")[2]
    assert main(shlex.split(remedy.replace("FOLDER", "runs"))[1:]) == 0
    assert content(Path("runs/my run"))["run.json"]


def test_unpack_makes_a_run_folder(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["archive", "runs/a", "--checkpoints", "all"]) == 0
    assert main(["archive", "--unpack", "a.run.zip", "--into", "other"]) == 0
    assert content(Path("other/a")) == content(run)
    assert main(["archive", "--unpack", "a.run.zip", "--into", "other"]) == 2
    assert "other/a: already exists" in capsys.readouterr().err


def test_a_run_that_has_recorded_nothing_is_archived(run: Path, tmp_path: Path):
    for each in (run / "events").iterdir():
        each.unlink()
    made = write_archive(run, tmp_path / "a.run.zip", checkpoints="all")
    assert content(unpacked(made.path)) == content(run)


def test_a_run_that_trains_is_not_archived(tmp_path: Path):
    run = write_run(tmp_path / "a", [1.0], None, closed=False)
    (run / ".owner").write_text(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))
    from pulsetrain.runs.summary import summarize

    if summarize(run).status.value in ("running", "stalled"):
        with pytest.raises(RunFolderError, match="stop it, or archive it when it has ended"):
            write_archive(run, tmp_path / "a.zip")
    else:
        pytest.fail("the run should look as if it trained")


def test_existing_archives_are_kept(run: Path, capsys: pytest.CaptureFixture[str]):
    Path("a.run.zip").write_text("precious")
    assert main(["archive", "runs/a"]) == 2
    assert Path("a.run.zip").read_text() == "precious"
    assert "use --force" in capsys.readouterr().err
    assert main(["archive", "runs/a", "--force"]) == 0
    assert main(["archive", "nothing"]) == 2
    assert "nothing: does not exist; name a run folder" in capsys.readouterr().err


def test_no_run_is_archived_if_one_of_them_cannot_be(run: Path, capsys: pytest.CaptureFixture[str]):
    other = write_run(run.parent / "b", [1.0])
    assert main(["archive", str(other), "runs/nothing"]) == 2
    assert "runs/nothing: does not exist" in capsys.readouterr().err
    Path("a.run.zip").write_text("precious")
    assert main(["archive", str(other), "runs/a"]) == 2
    assert "a.run.zip: already exists" in capsys.readouterr().err
    assert not Path("b.run.zip").exists()


def test_an_archive_to_unpack_that_does_not_exist(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["archive", "--unpack", "b.run.zip"]) == 2
    assert "b.run.zip: does not exist; name an archive" in capsys.readouterr().err


def test_the_folder_of_archives_is_made_unless_nothing_is_written(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["archive", "runs/a", "--into", "new/folder"]) == 0
    assert capsys.readouterr().out.startswith("new/folder/a.run.zip: ")
    assert main(["archive", "--unpack", "new/folder/a.run.zip", "--into", "other/folder"]) == 0
    assert capsys.readouterr().out == "other/folder/a\n"
    (run / "a\\b.txt").touch()
    for words in (["nothing"], ["runs/a"], ["--unpack", "runs/a"]):
        assert main(["archive", *words, "--into", "nowhere"]) == 2
        assert not Path("nowhere").exists()
    (run / "a\\b.txt").unlink()
    Path("file").touch()
    capsys.readouterr()
    for words in (["runs/a"], ["--unpack", "new/folder/a.run.zip"]):
        assert main(["archive", *words, "--into", "file"]) == 2
        assert capsys.readouterr().err.endswith("error: --into file: is not a folder; choose another path\n")
        assert main(["archive", *words, "--into", "file/folder"]) == 2
        assert "Not a directory" in capsys.readouterr().err


def test_the_page_about_an_archive_names_it(run: Path):
    assert main(["archive", "runs/a"]) == 0
    assert main(["report", "a.run.zip", "--into", "a.html"]) == 0
    page = Path("a.html").read_text()
    assert "<dt>folder</dt><dd>a.run.zip</dd>" in page
    assert "pulsetrain-archive-" not in page


def test_a_folder_whose_name_is_part_of_an_archives_is_not_renamed(run: Path, capsys: pytest.CaptureFixture[str]):
    """What is printed names each run as it was given, and nothing else in it changes."""
    write_run(Path("runs/b"), [1.0, 0.25])
    assert main(["archive", "runs/a"]) == 0
    capsys.readouterr()
    assert main(["diff", "a.run.zip", "runs/b"]) == 1
    assert capsys.readouterr().out.startswith("a.run.zip and runs/b differ")
