"""The demo's byte GPT learns to read the signature of a function, write the body, and stop.

    pulsetrain train examples/byte_lm/config.yaml        (makes the run that this one starts from)
    python -m examples.byte_lm_tuning.sft [--start RUN] [--run FOLDER] [--epochs N] [--functions N]

Run it from the folder that contains examples/. A prompt is a signature; the reply is the body followed by a byte 0.
Prompts are not trained on. Functions are packed into rows of 129 bytes, and none sees another of its row. The loss of
the replies is measured on functions of files that neither this run nor the demo's has seen. One minute on 2 cores.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from examples.byte_lm.model import ByteGPT
from examples.byte_lm_tuning.functions import END, Function, functions_of_library
from examples.byte_lm_tuning.start import CONTEXT, model_to_start_from
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.configuration.claim import resolve_folder
from pulsetrain.engine import SFTStrategy
from pulsetrain.engine.data.chat import tokenize_prompt
from pulsetrain.engine.data.sequences import Example, pack, pad_examples
from pulsetrain.handlers import Checkpointer, ConsoleLogger, EventRecorder, SampleText


def example_of(function: Function, end: int | None = END) -> Example:
    """Tokens, which are bytes, and labels, which leave the signature out."""
    return tokenize_prompt(function.signature, function.body, str.encode, end=end)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--start", help="run whose weights to begin with [the demo's newest in runs/]")
    parser.add_argument("--run", default="runs/byte_lm_sft-{n}", help="log and checkpoints go there [%(default)s]")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the functions [%(default)s]")
    parser.add_argument("--functions", type=int, help="how many to learn from, and to judge by [all that fit]")
    options = parser.parse_args(arguments)

    model, checkpoint = model_to_start_from(parser, options.start)
    training, held_out = (side[: options.functions] for side in functions_of_library(CONTEXT))
    run = resolve_folder(options.run)
    print(f"from {checkpoint}: {len(training)} functions to learn from, {len(held_out)} held out; to {run}")

    # A row predicts all its bytes but the first from those before: it may be longer than the context by one.
    rows: Any = pack(map(example_of, training), CONTEXT + 1)  # Any, as torch says Dataset and takes a list
    judged: dict[str, Any] = {  # the demo has never seen the byte that ends a reply: what that costs is told apart
        "replies": [example_of(function) for function in held_out],
        "bodies": [example_of(function, end=None) for function in held_out],
    }
    batches = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=pad_examples)
    prompts = [function.signature for function in held_out[:2]]
    samples = SampleText(prompts, run, every=None, length=CONTEXT, temperature=0.5, generate=answers(model))
    trainer = Trainer(
        model,
        batches,
        {name: DataLoader(each, batch_size=32, collate_fn=pad_examples) for name, each in judged.items()},
        strategy=SFTStrategy(),
        config=TrainingConfig(
            max_epochs=options.epochs,
            learning_rate=1e-3,
            warmup_steps=min(20, options.epochs * len(batches) // 10),
            schedule="cosine",
            weight_decay=0.1,
            no_decay="auto",
            clip_grad_norm=1.0,
            log_every_n_steps=20,
        ),
        handlers=[ConsoleLogger(), EventRecorder(run), Checkpointer(run, metric="replies/loss"), samples],
    )
    before = trainer.validate()
    history = trainer.train()

    print(samples.summary())
    print("held out, before and after:")
    for name in judged:
        loss, right = f"{name}/loss", f"{name}/token_accuracy"
        print(f"  {name}: {before[loss]:.3f} -> {history[loss][-1]:.3f} nats a byte, ", end="")
        print(f"{before[right]:.1%} -> {history[right][-1]:.1%} of the bytes are the likeliest")
    return history


def answers(model: ByteGPT) -> Callable[..., bytes]:
    """How a SampleText lets the model write: until it stops."""

    def generate(prompt: bytes, length: int, **options: Any) -> bytes:
        return bytes(model.sample([prompt], length, end_token=END, **options)[0]).removesuffix(bytes([END]))

    return generate


if __name__ == "__main__":
    main()
