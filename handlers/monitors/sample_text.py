"""Lets a language model write as it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from pulsetrain.engine.argument_checks import check_whole_number
from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.events.cadence import Every
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.events.names import Events
from pulsetrain.engine.events.subscription import FIRST
from pulsetrain.engine.step.model_call import eval_mode
from pulsetrain.handlers.attachment.attachment import Attachment
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.publishing import publish_media
from pulsetrain.handlers.run_files.run_folder import make_folder, replace_file

__all__ = ["SampleText"]


class SampleText:
    """Has the model continue each prompt, and fires MEDIA_LOGGED with the text, named "sample" ("sample/2" of several).

    The model writes as it is validated: in eval mode, without gradients, and with the weights that its evaluator uses,
    an average's, say. Afterwards modes and all random generators are as they were. Each time begins with the same seed,
    so that texts differ by the weights alone.

    Args:
        prompts: what the texts begin with; one, or several.
        folder: the run folder, for FOLDER/samples/iteration-ITERATION.txt; None for no file.
        every: how often; None for the run's end alone, where it writes in any case.
        length: how many tokens (bytes of a byte model) to put behind a prompt.
        temperature: below 1 the likelier ones are preferred; 0 takes the likeliest.
        seed: of the sampling.
        generate: called as generate(prompt, length, temperature=..., generator=...), with a torch.Generator of the CPU;
            it returns what follows the prompt. By default the model's own `generate`.
        encode: makes of a prompt what `generate` takes; by default its bytes in UTF-8.
        decode: makes text of what `generate` returns; by default text stays what it is, and bytes are UTF-8.

    Raises:
        ConfigurationError: no prompt or an empty one, or a number out of range.
        TypeError: the cadence is no Every, or what is to be called is no callable.
    """

    def __init__(
        self,
        prompts: str | Sequence[str],
        folder: str | Path | None = None,
        every: Every | None = Every(epochs=1),  # noqa: B008  # a frozen value
        *,
        length: int = 200,
        temperature: float = 1.0,
        seed: int = 0,
        generate: Callable[..., Any] | None = None,
        encode: Callable[[str], Any] | None = None,
        decode: Callable[[Any], str] | None = None,
    ) -> None:
        self.prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not self.prompts or not all(isinstance(prompt, str) and prompt for prompt in self.prompts):
            raise ConfigurationError(f"SampleText(prompts={prompts!r}): needs a text, or several, none of them empty")
        if every is not None:
            check_every("SampleText", every, "Every(epochs=1)")
        check_whole_number("SampleText", "length", length)
        number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if not number or not 0.0 <= temperature < float("inf"):
            raise ConfigurationError(f"SampleText(temperature={temperature!r}): needs a finite number of at least 0")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise ConfigurationError(f"SampleText(seed={seed!r}): needs a whole number, at least 0 and below 2**63")
        for name, function in (("generate", generate), ("encode", encode), ("decode", decode)):
            if function is not None and not callable(function):
                raise TypeError(f"SampleText({name}={function!r}): needs a callable")
        self.folder = None if folder is None else Path(folder)
        self.every, self.length, self.temperature, self.seed = every, length, temperature, seed
        self.generate, self.encode, self.decode = generate, encode, decode
        self.texts: list[str] = []  # the last ones, one a prompt
        self._written_at: int | None = None
        self._attachment = Attachment("SampleText")

    def attach(self, engine: Engine) -> Self:
        """Write at this engine's cadence and at its run's end, in phase OBSERVE.

        Raises:
            ConfigurationError: the engine's model cannot generate, and no `generate` was given.
            RecordingError: the engine is a replay without weights.
            RunFolderError: the folder cannot be written.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            model: Any = getattr(engine, "model", None)
            if self.generate is None and not callable(getattr(model, "generate", None)):
                raise ConfigurationError(
                    f"SampleText(generate=None): the model of {engine.name!r}, {type(model).__name__}, has no "
                    "generate(prompt, length, temperature, generator); give it one, or pass generate="
                )
            if self.folder is not None:
                make_folder("SampleText", self.folder / "samples")
            subscribe(Events.STARTED, self._on_started, on_error="warn")
            if self.every is not None:
                subscribe(reading_events(self.every), self._write, order=FIRST, on_error="warn")
            subscribe(Events.COMPLETED, self._write, order=FIRST, on_error="warn")
        return self

    def detach(self) -> None:
        """Write nothing more; the last texts stay."""
        self._attachment.cancel()

    def summary(self) -> str:
        """The last texts, for the end of the command's output; what is not printable is escaped."""
        lines = [
            line for text in self.texts for line in ("sample", *(f"    {_printable(x)}" for x in text.split("\n")))
        ]
        return "\n".join(lines)

    def _on_started(self) -> None:
        self._written_at = None

    def _write(self, engine: Any) -> None:
        iteration = engine.state.iteration
        if self._written_at == iteration:  # two cadences met
            return
        self._written_at = iteration
        texts = self._texts(engine)
        self.texts = texts
        for number, text in enumerate(texts, 1):
            publish_media(engine, "sample" if len(texts) == 1 else f"sample/{number}", "text", text)
        if self.folder is not None:
            path = self.folder / "samples" / f"iteration-{iteration:08d}.txt"
            rule = f"\n{'-' * 80}\n"
            replace_file(path, (rule.join(texts) + "\n").encode(errors="backslashreplace"))

    def _texts(self, engine: Any) -> list[str]:
        model: Any = getattr(engine, "model", None)
        generate = self.generate if self.generate is not None else model.generate
        encode = self.encode if self.encode is not None else str.encode
        decode = self.decode if self.decode is not None else _text
        contexts = getattr(getattr(engine, "evaluator", None), "contexts", ())
        texts = []
        with ExitStack() as stack:
            stack.enter_context(rng.preserve_rng())
            stack.enter_context(torch.no_grad())
            if isinstance(model, nn.Module):
                stack.enter_context(eval_mode(model))
            for context in contexts:
                stack.enter_context(context())
            for prompt in self.prompts:
                rng.seed_everything(self.seed)  # for those that draw from the process's generators
                generator = torch.Generator().manual_seed(self.seed)
                given = encode(prompt)
                written = generate(given, self.length, temperature=self.temperature, generator=generator)
                if isinstance(given, bytes) and isinstance(written, bytes) and self.decode is None:
                    texts.append(_text(given + written))  # a character may be cut in two between them
                else:
                    texts.append(prompt + decode(written))
        return texts


def _text(written: Any) -> str:
    if isinstance(written, (bytes, bytearray)):
        return written.decode(errors="backslashreplace")
    if isinstance(written, str):
        return written
    raise TypeError(f"SampleText: generate() returned {type(written).__name__}, no text or bytes; pass decode=")


def _printable(text: str) -> str:
    r"""The text with \x1b in place of an escape character, and so on: a terminal would obey the real one."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
