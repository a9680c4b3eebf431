"""The demo's byte GPT learns by trial and error to write Python that parses, without examples.

    pulsetrain train examples/byte_lm/config.yaml        (creates the run that this one starts from)
    python -m examples.byte_lm_tuning.grpo [--start RUN] [--run FOLDER] [--rollouts N] [--samples N]

Run it from the folder that contains examples/. The model continues the first line of a function for 88 bytes, eight
times for each of eight functions in a rollout. Python's own parser scores the texts (see rewards.py), and those that
are better than the others in their group become more likely. Whether a text succeeds is measured, with weight 0.

The model learns form: short lines, closed brackets, consistent indentation. It writes `self._comp()` and
`self._value = 0`, but invents the attributes, since the reward does not check them. 90 seconds on a CPU core.
"""

from collections.abc import Sequence
from functools import partial

from examples.byte_lm.data import ByteTokenizer
from examples.byte_lm_tuning.functions import END, prompts_of_library
from examples.byte_lm_tuning.rewards import form, success
from examples.byte_lm_tuning.start import CONTEXT, command_line, start
from pulsetrain import Checkpointer, EarlyStopping, EventRecorder, Events, Every, GRPOStrategy, Trainer, TrainingConfig
from pulsetrain.engine import Event
from pulsetrain.engine.rollouts import TextRollouts

WRITTEN = 88  # bytes of a text after its prompt


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = command_line("grpo", __doc__)
    parser.add_argument("--rollouts", type=int, default=30, help="rollouts of 64 texts each [%(default)s]")
    parser.add_argument("--samples", type=int, default=400, help="texts to evaluate, before and after [%(default)s]")
    options, model, checkpoint = start(parser, arguments)
    training, held_out = prompts_of_library(CONTEXT, longest=CONTEXT - WRITTEN)
    asked = [held_out[number % len(held_out)] for number in range(options.samples)]
    run = options.run
    print(f"from {checkpoint}: {len(training)} prompts to train on, {len(held_out)} held out; run folder {run}")

    rollouts = partial(
        TextRollouts, reward={"form": form, "success": success}, reward_weights=[1.0, 0.0],
        tokenizer=ByteTokenizer(), max_new_tokens=WRITTEN, end_token=END,
    )  # fmt: skip
    config = TrainingConfig(
        max_epochs=options.rollouts,  # an epoch is one rollout, used once
        learning_rate=6e-4,
        warmup_steps=min(10, options.rollouts),  # Adam's first steps are large and could do lasting damage
        optimizer_options={"betas": (0.9, 0.95)},
        clip_grad_norm=1.0,
        validate_every=None,  # before and after, by hand
    )
    saving = Checkpointer(run, Every(epochs=10), metric="rollout/reward")
    trainer = Trainer(
        model,
        rollouts(training, prompts_per_rollout=8, log_completions=2),
        rollouts(asked, prompts_per_rollout=options.samples, log_completions=4),
        strategy=GRPOStrategy(group_size=8, kl_coef=0.05, minibatch_size=32, temperature=0.7),
        config=config,
        handlers=[EventRecorder(run), saving, EarlyStopping("rollout/reward", patience=20)],
    )

    @trainer.on(Events.ROLLOUT_COMPLETED(every=5))
    def report(trainer: Trainer, event: Event) -> None:
        reward, kl = (event.payload.metrics[f"rollout/{name}"] for name in ("reward", "reference_kl"))
        print(f"rollout {trainer.state.rollout_round}: reward {reward:.3f}, KL {kl:.3f} nats per byte", flush=True)

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
