"""Lets the model write: a sample of its text at the run's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch

from engine import Events, Phase

PROMPT = "def "


class SampleText:
    """Writes `length` bytes behind the prompt into sample.txt of the run folder when the run is over.

    Args:
        folder: the run folder.
        prompt: what the text begins with.
        length: bytes to write.
        temperature: below 1 the likelier bytes are preferred; 0 takes the likeliest.
        seed: of the sampling.
    """

    def __init__(
        self, folder: str, prompt: str = PROMPT, length: int = 400, temperature: float = 0.7, seed: int = 0
    ) -> None:
        if length < 1:
            raise ValueError(f"SampleText({length=}): needs at least 1 byte")
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
        """The sample, for the end of the command's output."""
        return "sample\n" + "\n".join(f"    {line}" for line in self.text.splitlines())

    def _write(self, trainer: Any) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        written = trainer.model.generate(
            self.prompt.encode(), self.length, temperature=self.temperature, generator=generator
        )
        self.text = written.decode(errors="replace")
        (self.folder / "sample.txt").write_text(self.text)
