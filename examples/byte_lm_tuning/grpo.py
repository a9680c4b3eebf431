"""The demo's byte GPT learns by trial and error to write Python that parses, without examples.

    pulsetrain train examples/byte_lm/config.yaml        (creates the run that this one starts from)
    python -m examples.byte_lm_tuning.grpo [--start RUN] [--run FOLDER] [--rollouts N] [--samples N]

Run it from the folder that contains examples/. The model continues the first line of a function for 88 bytes, eight
times for each of eight functions in a rollout. Python's own parser scores the texts, and those that are better than the
others in their group become more likely. A text without an end is scored up to its last whole line.

A text succeeds if it parses and has at least 3 statements, including its `def`. This is measured, with weight 0. The
reward is stricter, since the model finds any shortcut, such as writing `return` three times: only statements before a
`return` count, and only if they differ from each other and use known names. A text whose beginning parses gets part of
the reward: so few of the demo's texts succeed that hardly any group would contain one.

The model learns form: short lines, closed brackets, consistent indentation. It writes `self._comp()` and
`self._value = 0`, but invents the attributes, since the reward does not check them. 90 seconds on a CPU core.
"""

import argparse
from collections.abc import Sequence

from examples.byte_lm_tuning.functions import END, functions_of_library
from examples.byte_lm_tuning.rewards import reward_of, succeeds
from examples.byte_lm_tuning.start import CONTEXT, model_to_start_from
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.configuration.claim import resolve_folder
from pulsetrain.engine import Event, Events, Every, GRPOStrategy
from pulsetrain.engine.events.engine import Engine
from pulsetrain.engine.rollouts import TextRollouts
from pulsetrain.handlers import Checkpointer, EarlyStopping, EventRecorder

WRITTEN = 88  # bytes of a text after its prompt
TEMPERATURE = 0.7  # for sampling, for training, and for the evaluations before and after


class Bytes:
    """A tokenizer whose tokens are the bytes of a text."""

    def encode(self, text: str) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")


def text_of(prompt: str, completion: str, tokens: Sequence[int]) -> str:
    """The text up to its end or, if it was cut off, up to the end of its last whole line."""
    text = prompt + completion
    return text if tokens[-1] == END else text[: text.rfind("\n") + 1]


def rewards(prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [reward_of(text_of(*each)) for each in zip(prompts, completions, completion_ids, strict=True)]


def success(prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [float(succeeds(text_of(*each))) for each in zip(prompts, completions, completion_ids, strict=True)]


def prompts_of_library() -> tuple[list[str], list[str]]:
    """List the signatures in the demo's training files, and those only in its validation files."""
    sides = ((each.signature for each in side) for side in functions_of_library(CONTEXT))
    training, held_out = (
        dict.fromkeys(each for each in side if len(each.encode()) <= CONTEXT - WRITTEN) for side in sides
    )
    return list(training), [each for each in held_out if each not in training]


def rollouts(prompts: list[str], number: int, log_completions: int) -> TextRollouts:
    return TextRollouts(
        prompts, {"form": rewards, "success": success}, reward_weights=[1.0, 0.0], tokenizer=Bytes(),
        max_new_tokens=WRITTEN, prompts_per_rollout=number, end_token=END, log_completions=log_completions,
    )  # fmt: skip


def report(engine: Engine, event: Event) -> None:
    metrics = event.payload.metrics
    reward, kl = metrics["rollout/reward"], metrics["rollout/reference_kl"]
    print(f"rollout {engine.state.rollout_round}: reward {reward:.3f}, KL {kl:.3f} nats per byte", flush=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--start", help="run whose weights to start from [the demo's newest in runs/]")
    parser.add_argument("--run", default="runs/byte_lm_grpo-{n}", help="folder for log and checkpoints [%(default)s]")
    parser.add_argument("--rollouts", type=int, default=30, help="rollouts of 64 texts each [%(default)s]")
    parser.add_argument("--samples", type=int, default=400, help="texts to evaluate, before and after [%(default)s]")
    options = parser.parse_args(arguments)

    model, checkpoint = model_to_start_from(parser, options.start)
    training, held_out = prompts_of_library()
    asked = [held_out[number % len(held_out)] for number in range(options.samples)]
    run = resolve_folder(options.run)
    print(f"from {checkpoint}: {len(training)} prompts to train on, {len(held_out)} held out; run folder {run}")

    trainer = Trainer(
        model,
        rollouts(training, 8, log_completions=2),
        rollouts(asked, options.samples, log_completions=4),
        strategy=GRPOStrategy(group_size=8, kl_coef=0.05, minibatch_size=32, temperature=TEMPERATURE),
        config=TrainingConfig(
            max_epochs=options.rollouts,  # an epoch is one rollout, used once
            learning_rate=6e-4,
            warmup_steps=min(10, options.rollouts),  # Adam's first steps are large and could do lasting damage
            optimizer_options={"betas": (0.9, 0.95)},
            clip_grad_norm=1.0,
            validate_every=None,  # before and after, by hand
        ),
        handlers=[
            EventRecorder(run),
            Checkpointer(run, Every(epochs=10), metric="rollout/reward"),
            EarlyStopping("rollout/reward", patience=20),
        ],
    )
    trainer.add_event_handler(Events.ROLLOUT_COMPLETED(every=5), report)

    before = trainer.validate()
    history = trainer.train()
    trainer.on(Events.MEDIA_LOGGED)(lambda engine, event: print("", event.payload.value, sep="\n"))
    after = trainer.validate()
    print()
    for name, metrics in (("before", before), ("after", after)):
        rate = metrics["val/reward/success"]
        error = (rate * (1 - rate) / options.samples) ** 0.5
        print(f"{name}: {rate:.1%} +- {error:.1%} of {options.samples} texts for held-out prompts succeed")
    print(f"KL to the start, in the last rollout: {history['rollout/reference_kl'][-1]:.3f} nats per byte")
    return history


if __name__ == "__main__":
    main()
