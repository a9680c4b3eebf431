"""Samples text from a language model while it trains."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from pulsetrain.engine import FIRST, ConfigurationError, Engine, Events, Every
from pulsetrain.engine.argument_checks import check_number, check_type, check_whole_number
from pulsetrain.engine.data import rng
from pulsetrain.engine.distributed.joining import busy
from pulsetrain.engine.distributed.ranks import is_sharded, ranks
from pulsetrain.engine.plain_text import plain
from pulsetrain.engine.rollouts.sampling import sampler_of
from pulsetrain.engine.step.model_call import eval_mode
from pulsetrain.handlers.attachment.attachment import Handler
from pulsetrain.handlers.attachment.cadence import check_every, reading_events
from pulsetrain.handlers.attachment.engine_queries import attribute
from pulsetrain.handlers.attachment.publishing import publish_media
from pulsetrain.handlers.run_files.ownership import FolderUse
from pulsetrain.handlers.run_files.run_folder import local_folder, make_folder, replace_file

__all__ = ["SampleText"]


class SampleText(Handler):
    """Has the model continue each prompt, and fires MEDIA_LOGGED with the text, named "sample" ("sample/2" of several).

    The model is used as in validation: in eval mode, without gradients, and with the weights of the evaluator, for
    example averaged ones; but not compiled, since each token makes the text longer. Afterwards, modes and random
    generators are restored. Every sample starts from the same seed, so that texts differ only because of the weights.
    If several processes hold one sharded model, each of them needs this handler: all generate, and the main one
    writes.

    Args:
        prompts: the start of each text; one, or several.
        folder: the run folder, for FOLDER/samples/iteration-ITERATION.txt; None for no file.
        every: when to sample; None for only the end of the run, which always samples.
        length: how many tokens (bytes of a byte model) to add to a prompt.
        temperature: below 1 prefers likelier tokens; 0 takes the likeliest.
        seed: the seed for sampling.
        generate: called as generate(prompt, length, temperature=..., generator=...), with a CPU torch.Generator. By
            default the model's method `generate`; that of a model of transformers gets and returns token ids.
        encode: turns a prompt into what `generate` accepts, such as a tokenizer's `encode`; by default its bytes in
            UTF-8.
        decode: turns what `generate` returns into text; by default text is kept, and bytes are decoded as UTF-8.

    Raises:
        ConfigurationError: no prompt or an empty one, or a number is out of range.
        TypeError: the cadence is not an Every, or a function is not callable.

    >>> def repeat(prompt, length, *, temperature, generator):
    ...     return prompt * length
    >>> engine = Engine(lambda engine, batch: None)
    >>> sample = SampleText("ab", every=None, length=2, generate=repeat).attach(engine)
    >>> state = engine.run([1])
    >>> sample.texts
    ['ababab']
    """

    folder: Path | None
    every: Every | None
    length: int
    temperature: float
    seed: int
    generate: Callable[..., object] | None
    encode: Callable[[str], object] | None
    decode: Callable[..., str] | None

    def __init__(
        self,
        prompts: str | Sequence[str],
        folder: str | Path | None = None,
        every: Every | None = Every(epochs=1),  # noqa: B008  # a frozen value
        *,
        length: int = 200,
        temperature: float = 1.0,
        seed: int = 0,
        generate: Callable[..., object] | None = None,
        encode: Callable[[str], object] | None = None,
        decode: Callable[..., str] | None = None,
    ) -> None:
        self.prompts: list[str] = [prompts] if isinstance(prompts, str) else list(prompts)
        if not self.prompts or not all(isinstance(prompt, str) and prompt for prompt in self.prompts):
            raise ConfigurationError("needs a text, or several, none of them empty", "SampleText", prompts=prompts)
        check_every("SampleText", every, "Every(epochs=1)", or_none=True)
        check_whole_number("SampleText", "length", length)
        check_number("SampleText", "temperature", temperature)
        check_whole_number("SampleText", "seed", seed, at_least=0, below=2**63)
        for name, function in (("generate", generate), ("encode", encode), ("decode", decode)):
            check_type("SampleText", name, function, Callable | None, "a callable")
        self.folder = None if folder is None else local_folder("SampleText", folder)
        self.every, self.length, self.temperature, self.seed = every, length, temperature, seed
        self.generate, self.encode, self.decode = generate, encode, decode
        self.texts: list[str] = []  # the latest, one for each prompt
        self._written_at: int | None = None
        self._writes = True

    @property
    def plan(self) -> tuple[object, ...]:
        """What it generates and when; the processes of a sharded model need equal plans."""
        return self.every, self.prompts, self.length, self.temperature, self.seed

    def attach(self, engine: Engine) -> Self:
        """Sample at this engine's cadence and at the end of its run, in phase OBSERVE.

        Raises:
            ConfigurationError: the engine's model cannot generate, and no `generate` was given; or it is split along
                the sequence.
            RecordingError: the engine is a replay without weights.
            RunFolderError: the folder cannot be written.
        """
        with self._attachment.to(engine, whole_bus=False) as subscribe:
            self._generator(engine)
            self._writes = self._check_sharded(engine)
            if self._writes and (folder := self.folder) is not None:
                make_folder("SampleText", folder / "samples")
                FolderUse("SampleText", subscribe, lambda: folder)
            subscribe(Events.STARTED, self._on_started, on_error="warn")
            if self.every is not None:
                subscribe(reading_events(self.every), self._write, order=FIRST, on_error="warn")
            subscribe(Events.COMPLETED, self._write, order=FIRST, on_error="warn")
        return self

    def _check_sharded(self, engine: Engine) -> bool:
        """Whether this process writes the texts: all do where each has a model of its own."""
        if not is_sharded(attribute(engine, "model", object)):
            return True
        topology = getattr(attribute(engine, "backend", object), "topology", None)
        if topology is not None and topology.sequence_parallel:
            raise ConfigurationError(
                "not for models whose activations are split along the sequence, since the length of a text grows token "
                "by token; leave SampleText out, or set sequence_parallel=False",
                "SampleText",
                sequence_parallel=True,
            )
        return ranks().is_main

    def summary(self) -> str:
        """The latest texts, for the end of the command's output; unprintable characters are escaped."""
        return "\n".join("\n    ".join(["sample", *map(plain, text.split("\n"))]) for text in self.texts)

    def _on_started(self) -> None:
        self._written_at = None

    def _write(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        if self._written_at == iteration:  # two cadences coincide
            return
        self._written_at = iteration
        with busy():
            texts = self._texts(engine)
        self.texts = texts
        if not self._writes:
            return
        for number, text in enumerate(texts, 1):
            publish_media(engine, "sample" if len(texts) == 1 else f"sample/{number}", "text", text)
        if self.folder is not None:
            path = self.folder / "samples" / f"iteration-{iteration:08d}.txt"
            rule = f"\n{'-' * 80}\n"
            replace_file(path, (rule.join(texts) + "\n").encode(errors="backslashreplace"))

    def _generator(self, engine: Engine) -> Callable[..., object]:
        model = attribute(engine, "model", object)  # a replay without weights raises
        generate: Callable[..., object] | None = self.generate or getattr(model, "generate", None)
        if generate is None or not callable(generate):
            rule = (
                f"the model of {engine.name!r}, {type(model).__name__}, has no "
                "generate(prompt, length, temperature, generator); give it one, or pass generate="
            )
            raise ConfigurationError(rule, "SampleText", generate=None)
        if self.generate is None and hasattr(model, "generation_config"):
            if self.encode is None or self.decode is None:
                raise ConfigurationError(
                    "the model reads and writes token ids; pass encode= and decode= of its tokenizer",
                    "SampleText",
                    encode=self.encode,
                    decode=self.decode,
                )
            return partial(_of_transformers, model)
        return generate

    def _texts(self, engine: Engine) -> list[str]:
        generate = self._generator(engine)
        model = attribute(engine, "model", nn.Module)
        encode = self.encode if self.encode is not None else str.encode
        decode = self.decode if self.decode is not None else _text
        contexts = attribute(attribute(engine, "evaluator", Engine), "contexts", list) or ()
        texts = []
        with rng.preserve_rng(), torch.no_grad(), ExitStack() as stack:
            if model is not None:
                stack.enter_context(eval_mode(model))
            if "torch._dynamo" in sys.modules:  # a model that torch.compile runs would be compiled for each length
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for context in contexts:
                stack.enter_context(context())
            for prompt in self.prompts:
                rng.seed_everything(self.seed)  # for models that draw from the process's generators
                generator = torch.Generator().manual_seed(self.seed)
                given = encode(prompt)
                written = generate(given, self.length, temperature=self.temperature, generator=generator)
                if isinstance(given, bytes) and isinstance(written, bytes) and self.decode is None:
                    texts.append(_text(given + written))  # a character may be split between them
                else:
                    texts.append(prompt + decode(written))
        return texts


def _of_transformers(
    model: Any, prompt: Sequence[int], length: int, *, temperature: float, generator: torch.Generator
) -> list[int]:
    """What a model of transformers writes, up to a token that ends a text."""
    ends = model.generation_config.eos_token_id  # one, several or none
    agree = bool if is_sharded(model) else None  # all processes have the same prompt
    sample = sampler_of(model, lambda tokens: tokens, next(model.parameters()).device, agree=agree)
    seeds = [generator.initial_seed()]
    found: list[int] = sample([list(prompt)], length, temperature=temperature, end_token=ends, seeds=seeds)[0]
    return found


def _text(written: object) -> str:
    if isinstance(written, (bytes, bytearray)):
        return written.decode(errors="backslashreplace")
    if isinstance(written, str):
        return written
    raise TypeError(f"SampleText: generate() returned {type(written).__name__}, not text or bytes; pass decode=")
