"""The handler of examples/byte_lm that lets the model write at the run's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.byte_lm.sample import SampleText, printable


def test_a_sample_begins_with_its_prompt_and_cannot_steer_the_terminal(tmp_path: Path) -> None:
    class Model:
        @staticmethod
        def generate(prompt: bytes, length: int, **options: Any) -> bytes:
            return b"f():\n\x1b[2J\r\xff\xc3\xa9"

    class Trainer:
        model = Model()

    sample = SampleText(str(tmp_path), length=12)
    assert sample.summary() == ""
    sample._write(Trainer())
    assert sample.summary() == "sample\n    def f():\n    \\x1b[2J\\r\\xffé"
    assert (tmp_path / "sample.txt").read_bytes() == b"def f():\n\x1b[2J\r\\xff\xc3\xa9"
    assert printable("a\tb\x00") == "a\\tb\\x00"


@pytest.mark.parametrize("arguments", [{"prompt": ""}, {"temperature": -1.0}, {"length": 0}])
def test_a_sample_that_cannot_be_written_is_refused_before_the_run(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"SampleText\(.*needs"):
        SampleText("runs/a", **arguments)
