"""Lets the model write: a sample of its text at the run's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch

from engine import Events, Phase

PROMPT = "def "


class SampleText:
    """Writes the prompt and the `length` bytes that the model puts behind it into sample.txt when the run is over.

    Args:
        folder: the run folder.
        prompt: what the text begins with.
        length: bytes to write behind it.
        temperature: below 1 the likelier bytes are preferred; 0 takes the likeliest.
        seed: of the sampling.

    Raises:
        ValueError: an empty prompt, a length below 1, or a negative temperature.
    """

    def __init__(
        self, folder: str, prompt: str = PROMPT, length: int = 400, temperature: float = 0.7, seed: int = 0
    ) -> None:
        if length < 1:
            raise ValueError(f"SampleText({length=}): needs at least 1 byte")
        if not prompt or not temperature >= 0.0:  # written so that NaN is refused too
            raise ValueError(f"SampleText({prompt=}, {temperature=}): needs a prompt, and a temperature of 0 or more")
        self.folder, self.prompt, self.length = Path(folder), prompt, length
        self.temperature, self.seed = temperature, seed
        self.text = ""
        self._handle: Any = None

    def attach(self, trainer: Any) -> Self:
        """Write when this trainer has finished."""
        self._handle = trainer.add_event_handler(Events.COMPLETED, self._write, phase=Phase.OBSERVE)
        return self

    def detach(self) -> None:
        """Write nothing."""
        self._handle.remove()

    def summary(self) -> str:
        """The sample, for the end of the command's output; what is not printable is escaped."""
        return "sample\n" + "\n".join(f"    {printable(line)}" for line in self.text.split("\n")) if self.text else ""

    def _write(self, trainer: Any) -> None:
        prompt, generator = self.prompt.encode(), torch.Generator().manual_seed(self.seed)
        written = trainer.model.generate(prompt, self.length, temperature=self.temperature, generator=generator)
        self.text = (prompt + written).decode(errors="backslashreplace")
        (self.folder / "sample.txt").write_text(self.text, encoding="utf-8")


def printable(text: str) -> str:
    r"""The text with \x1b in place of an escape character, and so on: a terminal would obey the real one."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
