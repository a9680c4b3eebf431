"""`pulsetrain debug`: its commands, at a terminal and from a pipe."""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsetrain.cli import debug
from pulsetrain.cli.commands.debug import add_arguments
from pulsetrain.debugger.commands import Command, Commands
from pulsetrain.debugger.recorded import Debugger
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.recording import LoggedEvent, LogWriter

T = 1_763_000_000_000_000_000


def write_run(folder: Path, *, failed: bool = False) -> Path:
    writer = LogWriter(folder / "events")

    def add(event: str, epoch: int, iteration: int, ord: int | None = None, **fields: Any) -> None:
        seq = writer.last_seq + 1
        writer.add(LoggedEvent(seq if ord is None else ord, "trainer", event, epoch, iteration, seq=seq, t=T, **fields))

    for epoch in (1, 2, 3):
        add("epoch_started", epoch, 4 * epoch - 4)
        for iteration in range(4 * epoch - 3, 4 * epoch + 1):
            add("iteration_completed", epoch, iteration, output={"loss": 1.0 / iteration}, lr=[0.1])
        metrics = {"val/loss": 4.0 - epoch}
        add("validation_completed", epoch, 4 * epoch, payload={"metrics": metrics}, metrics=metrics)
    if failed:
        error = {"__type__": "builtins.ValueError", "message": "boom\x1b[31m"}
        add("exception_raised", 3, 12, ord=-1, payload={"error": error})
    writer.end()
    writer.close()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def commands(run: Path) -> Commands:
    return Commands(Debugger(run))


def said(commands: Commands, line: str) -> str:
    return "\n".join(commands.run(line))


class Pipe(io.StringIO):
    """Standard input that contains these bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.buffer = io.BytesIO(content)  # type: ignore[misc]


def piped(monkeypatch: pytest.MonkeyPatch, run: Path, text: str | bytes, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", Pipe(text.encode() if isinstance(text, str) else text))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args([str(run), *words])
    return debug.run(arguments)


class TestCommands:
    @pytest.mark.parametrize(
        ("lines", "answer"),
        [
            (["next"], "seq 0: trainer's epoch_started, epoch 1, iteration 0"),
            (["n 3", "b"], "iteration 1\n  output="),
            (["next to validation_completed"], "epoch 1, iteration 4"),
            (["goto end", "next"], "the end of the log"),
            (["goto end", "back to epoch_started"], "epoch 3, iteration 8"),
            (["back to epoch_started"], "no epoch_started in that direction"),
            (["goto iteration 7"], "iteration 7"),
            (["goto epoch 2"], "epoch_started, epoch 2"),
            (["goto seq 4"], "seq 4:"),
            (["goto start"], "the beginning of"),
            (['break on validation_completed if metrics["val/loss"] < 3', "continue"], "epoch 2, iteration 8"),
            (["break validation_completed", "c", "c", "rc"], "epoch 1, iteration 4"),
            (["break if iteration == 6", "continue"], "break 1: any event if iteration == 6"),
            (["break on epoch_started", "breaks"], "1: epoch_started"),
            (["break on epoch_started", "delete 1", "breaks"], "no breaks"),
            (["continue"], "no breaks; the end of the log"),
            (["break on epoch_started", "goto end", "continue"], "no break ahead"),
            (["watch train/loss", "goto iteration 5", "next"], "train/loss: 0.16"),
            (["watch val/loss", "unwatch val/loss", "watch"], "nothing is watched"),
            (["goto iteration 5", "state"], "metrics: val/loss            3.0"),
            (["goto iteration 5", "events 1"], "> 7    2"),
            (["goto iteration 5", "where"], "seq 7:"),
            (["handlers"], "run.json names none"),
            (["help"], "reverse-continue"),
            (["help goto"], "epoch N"),
        ],
    )
    def test_commands_answer(self, commands, lines, answer):
        *before, last = lines
        for line in before:
            said(commands, line)
        assert answer in said(commands, last)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("nxt", "did you mean 'next'"),
            ("next x", "needs a whole number"),
            ("next -1", "needs a whole number"),
            ("next 0", "at least 1"),
            ("next to", "needs an event"),
            ("back to validaton_completed", "did you mean 'validation_completed'"),
            ("goto", "write goto iteration N"),
            ("goto iteration", "write goto iteration N"),
            ("goto iteration 99", "its last iteration is 12"),
            ("goto iteration " + "9" * 5000, "needs a whole number"),
            ("break", "write break on EVENT"),
            ("break on", "write break on EVENT"),
            ("break on a b", "write break on EVENT"),
            ("break on epoch_startd", r"^break\(event='epoch_startd'\): unknown; choose one of "),
            ("back to epoch_startd", r"^back\(event='epoch_startd'\): unknown"),
            ("break on epoch_started if", "where:"),
            ("break on epoch_started if __import__('os')", "not supported"),
            ("delete 3", "there are none"),
            ("delete", "needs a whole number"),
            ("watch nothing_such", r"^watch\(name='nothing_such'\): unknown"),
            ("unwatch val/loss", "nothing is watched"),
            ("events 100000", "at most 1000"),
            ("help nothing", "unknown"),
        ],
    )
    def test_bad_commands_are_refused(self, commands, line, message):
        with pytest.raises(ConfigurationError, match=message):
            said(commands, line)

    def test_an_empty_line_repeats_the_last_move(self, commands):
        said(commands, "next 2")
        assert commands.repeat() == "next 2"
        said(commands, "state")
        assert commands.repeat() == ""
        assert said(commands, "   ") == ""

    def test_words_are_completed(self, commands):
        assert commands.complete("go") == ["goto"]
        assert commands.complete("goto ") == ["end", "epoch", "iteration", "seq", "start"]
        assert commands.complete("break on val") == ["validation_completed"]
        assert 'metrics["val/loss"]' in commands.complete("break on validation_completed if m")
        assert commands.complete('break if engine == "') == ['"trainer"']
        assert commands.complete("watch tr") == ["train/loss"]
        assert commands.complete("b to ep") == ["epoch_started"]
        assert commands.complete("nothing ") == []
        assert "next" in commands.complete("")

    def test_a_target_may_have_commands_of_its_own(self, run):
        extra = {"tensors": Command("tensors", "those of the model", lambda rest: [f"tensors {rest}"])}
        commands = Commands(Debugger(run), extra)
        assert said(commands, "tensors a b") == "tensors a b"
        assert "those of the model" in said(commands, "help")

    def test_any_line_is_answered_or_refused(self, commands):
        draw = random.Random(0)
        parts = [
            "next", "back", "goto", "break", "on", "if", "to", "iteration", "epoch", "seq", "end", "watch", "events",
            "c", "rc", "delete", "state", "1", "-1", "0", "99999999999999999999", "x", '"', "(", "[", "metrics[",
            "output", "\0", "\x1b[2J", "é", "٣", "{", "epoch_started", "train/loss", "payload.", ".", "payload..x",
            "lr.0", "**",
            "\ud800", "'" * 300, "(" * 300, "not " * 50, "help", "handlers", "unwatch", "where", "\t", "lambda: 0",
        ]  # fmt: skip
        for _ in range(1500):
            line = " ".join(draw.choice(parts) for _ in range(draw.randrange(6)))
            try:
                said(commands, line)
            except ConfigurationError:
                pass


class TestPipe:
    def test_each_line_is_a_command(self, run, monkeypatch, capsys):
        assert piped(monkeypatch, run, "next\n\nnext\r\nwhere") == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0].startswith("the beginning of")
        assert [line[:6] for line in out if line.startswith("seq")] == ["seq 0:", "seq 1:", "seq 1:"]

    def test_quit_ends_it(self, run, monkeypatch, capsys):
        assert piped(monkeypatch, run, "quit\nnext\n") == 0
        assert "seq 0" not in capsys.readouterr().out

    def test_a_line_that_fails_is_reported_and_shows_in_the_status(self, run, monkeypatch, capsys):
        assert piped(monkeypatch, run, "nxt\nnext\n") == 2
        output = capsys.readouterr()
        assert "did you mean 'next'" in output.err
        assert "seq 0" in output.out

    def test_bytes_that_are_not_text_are_refused(self, run, monkeypatch, capsys):
        draw = random.Random(1)
        junk = b"\n".join(draw.randbytes(draw.randrange(80)) for _ in range(200))
        assert piped(monkeypatch, run, junk) == 2
        assert "Traceback" not in "".join(capsys.readouterr())

    def test_after_a_failure_it_opens_before_it_and_says_what_happened(self, tmp_path, monkeypatch, capsys):
        assert piped(monkeypatch, write_run(tmp_path, failed=True), "next") == 0
        out = capsys.readouterr().out
        assert "the run ended in: ValueError: boom\\x1b[31m, at epoch 3, iteration 12" in out
        assert "there is no checkpoint before iteration 12" in out
        assert "\n> 17 " in out
        assert "\nseq 18: trainer's exception_raised" in out
        assert "\x1b" not in out

    def test_a_damaged_log_is_reported_and_shows_in_the_status(self, run, monkeypatch, capsys):
        sealed = run / "events" / "events.jsonl.zst"
        content = bytearray(sealed.read_bytes())
        content[-300] ^= 1
        sealed.write_bytes(content)
        assert piped(monkeypatch, run, "next\ncontinue") == 3
        assert "damaged" in capsys.readouterr().err

    def test_an_engine_that_does_not_exist_is_refused(self, run, monkeypatch):
        with pytest.raises(Exception, match="there are trainer"):
            piped(monkeypatch, run, "", "--engine", "generator")

    def test_the_run_is_not_changed(self, run, monkeypatch):
        files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}
        piped(monkeypatch, run, "next\nhandlers\nstate\ngoto end")
        found = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()}
        assert found == files


class Terminal:
    """A terminal with simulated key presses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
        self.commands, self._monkeypatch = commands, monkeypatch

    def converse(self) -> int:
        for stream in (sys.stdin, sys.stdout):
            self._monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        return debug.converse(self.commands)

    def type(self, keys: str) -> int:
        from prompt_toolkit.application import create_app_session
        from prompt_toolkit.input import create_pipe_input
        from prompt_toolkit.output import DummyOutput

        with create_pipe_input() as given, create_app_session(input=given, output=DummyOutput()):
            given.send_text(keys)
            return self.converse()


class TestTerminal:
    @pytest.fixture
    def terminal(self, commands, monkeypatch, tmp_path) -> Iterator[Terminal]:
        pytest.importorskip("prompt_toolkit")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        return Terminal(monkeypatch, commands)

    def test_ctrl_c_drops_the_line_and_ctrl_d_leaves(self, terminal, capsys):
        assert terminal.type("next\rgoto en\x03next\r\x04") == 0
        assert "\nseq 1: " in capsys.readouterr().out

    def test_an_empty_line_moves_once_more(self, terminal, capsys):
        terminal.type("next\r\r\r\x04")
        assert "\nseq 2: " in capsys.readouterr().out

    def test_what_is_typed_is_completed_from_its_last_word_on(self, terminal):
        from prompt_toolkit.completion import Completion
        from prompt_toolkit.document import Document

        completer = debug._Completer(terminal.commands, Completion)
        for text, word in (("break on val", "validation_completed"), ("got", "goto"), ("watch ", "train/loss")):
            found = {each.text: each.start_position for each in completer.get_completions(Document(text), None)}
            assert found[word] == -len(text.rpartition(" ")[2])

    def test_a_command_that_fails_neither_ends_the_prompt_nor_sets_the_status(self, terminal, capsys):
        assert terminal.type("nothing\rnext\rquit\r") == 0
        assert "\nseq 0: " in capsys.readouterr().out

    def test_the_history_is_in_the_users_folder(self, terminal, tmp_path):
        terminal.type("goto iteration 7\r\x04")
        terminal.type("next\r\x04")
        kept = (tmp_path / "state" / "pulsetrain" / "debug_history").read_text(encoding="utf-8")
        assert [line for line in kept.splitlines() if line.startswith("+")] == ["+goto iteration 7", "+next"]

    def test_without_a_place_for_it_the_history_is_not_kept(self, terminal, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        assert terminal.type("next\r\x04") == 0

    def test_ctrl_c_interrupts_a_command(self, terminal, monkeypatch, capsys):
        def interrupted() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(terminal.commands.target, "continue_", interrupted)
        assert terminal.type("continue\rnext\r\x04") == 0
        out = capsys.readouterr().out
        assert "interrupted" in out
        assert "\nseq 0: " in out

    def test_if_it_is_missing_the_extra_is_named(self, terminal, monkeypatch):
        monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
        with pytest.raises(ConfigurationError, match=r"pulsetrain\[debug\]"):
            terminal.converse()
