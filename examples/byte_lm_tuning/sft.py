"""The demo's byte GPT learns to read the signature of a function, write the body, and stop.

    pulsetrain train examples/byte_lm/config.yaml        (creates the run that this one starts from)
    python -m examples.byte_lm_tuning.sft [--start RUN] [--run FOLDER] [--epochs N] [--functions N]

Run it from the folder that contains examples/. A prompt is a signature; the reply is the body followed by a byte 0.
Prompts are masked. Functions are packed into rows of 129 bytes, in which none attends to another. The loss of the
replies is measured on functions in files that neither this run nor the demo has been trained on. One minute on 2 cores.
"""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from examples.byte_lm_tuning.functions import END, Function, functions_of_library
from examples.byte_lm_tuning.start import CONTEXT, command_line, start
from pulsetrain import Checkpointer, ConsoleLogger, EventRecorder, SampleText, SFTStrategy, Trainer, TrainingConfig
from pulsetrain.engine.data.chat import tokenize_prompt
from pulsetrain.engine.data.sequences import Example, pack, pad_examples


def example_of(function: Function, end: int | None = END) -> Example:
    """Tokens, which are bytes, and labels, in which the signature is masked."""
    return tokenize_prompt(function.signature, function.body, str.encode, end=end)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = command_line("sft", __doc__)
    parser.add_argument("--epochs", type=int, default=3, help="passes over the functions [%(default)s]")
    parser.add_argument("--functions", type=int, help="how many to train on, and to evaluate on [all that fit]")
    options, model, checkpoint = start(parser, arguments)
    training, held_out = (side[: options.functions] for side in functions_of_library(CONTEXT))
    run = options.run
    print(f"from {checkpoint}: {len(training)} functions to train on, {len(held_out)} held out; run folder {run}")

    # A row's first byte is not predicted, so a row may be longer than the context by one.
    rows: Any = pack(map(example_of, training), CONTEXT + 1)  # Any: torch declares Dataset but accepts a list
    judged: dict[str, Any] = {  # the demo has never seen the byte that ends a reply, so its loss is reported separately
        "replies": [example_of(function) for function in held_out],
        "bodies": [example_of(function, end=None) for function in held_out],
    }

    def answer(prompt: bytes, length: int, **options: Any) -> bytes:
        return bytes(model.sample([prompt], length, end_token=END, **options)[0]).removesuffix(bytes([END]))

    batches = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=pad_examples)
    prompts = [function.signature for function in held_out[:2]]
    samples = SampleText(prompts, run, every=None, length=CONTEXT, temperature=0.5, generate=answer)
    config = TrainingConfig(
        max_epochs=options.epochs, learning_rate=1e-3, warmup_steps=min(20, options.epochs * len(batches) // 10),
        schedule="cosine", weight_decay=0.1, no_decay="auto", clip_grad_norm=1.0, log_every_n_steps=20,
    )  # fmt: skip
    trainer = Trainer(
        model,
        batches,
        {name: DataLoader(each, batch_size=32, collate_fn=pad_examples) for name, each in judged.items()},
        strategy=SFTStrategy(),
        config=config,
        handlers=[ConsoleLogger(), EventRecorder(run), Checkpointer(run, metric="replies/loss"), samples],
    )
    before = trainer.validate()
    history = trainer.train()

    print(samples.summary())
    print("held out, before and after:")
    for name in judged:
        loss, right = f"{name}/loss", f"{name}/token_accuracy"
        print(f"  {name}: {before[loss]:.3f} -> {history[loss][-1]:.3f} nats per byte, ", end="")
        print(f"{before[right]:.1%} -> {history[right][-1]:.1%} of the bytes predicted")
    return history


if __name__ == "__main__":
    main()
