"""The tail of a log while its lines are replaced."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from pulsetrain.engine.recording.log.tail import Tail, unchecked


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize("megabytes", [1, 9])
def test_a_process_that_is_killed_while_it_replaces_lines_leaves_the_old_or_the_new_ones(
    megabytes: int, erase: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = [b'{"seq":%d,"text":"%b"}' % (seq, b"x" * 10_000) for seq in range(100 * megabytes)]
    new = old[len(old) // 10 :]  # one block is sealed
    tail, blank = Tail(tmp_path / "tail.jsonl"), Tail._blank
    for line in old:
        tail.append(line)

    def blank_and_die(tail: Tail, start: int, end: int) -> None:
        blank(tail, start, end)
        raise Killed

    monkeypatch.setattr(Tail, "_blank", blank_and_die)
    with suppress(Killed):
        tail.replace(new, erase=erase)
    found = {unchecked(line) for line in Tail(tmp_path / "tail.jsonl").lines()}
    assert found >= set(new)


def test_a_tail_whose_lines_are_replaced_again_and_again_does_not_grow(tmp_path: Path):
    lines = [b'{"seq":%d,"text":"%b"}' % (seq, b"x" * 10_000) for seq in range(300)]
    tail, size = Tail(tmp_path / "tail.jsonl"), sum(map(len, lines))
    for _ in range(20):
        tail.replace(lines)
        assert tail.end < 4 * size
    assert {unchecked(line) for line in tail.lines()} == set(lines)
