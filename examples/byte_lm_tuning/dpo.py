"""The demo's byte GPT learns to prefer the real body of a function to the same body with a mistake.

    pulsetrain train examples/byte_lm/config.yaml        (creates the run that this one starts from)
    python -m examples.byte_lm_tuning.dpo [--start RUN] [--run FOLDER] [--epochs N] [--functions N]

Run it from the folder that contains examples/. The mistake is one wrong operator or name. The result is measured on
functions in files that neither this run nor the demo has been trained on: how often has the true body gained more
probability than the false one, or lost less? The initial probabilities are computed once. A minute on 2 CPU cores.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from examples.byte_lm_tuning.functions import END, Function, functions_of_library
from examples.byte_lm_tuning.mutations import KINDS, mutate
from examples.byte_lm_tuning.start import CONTEXT, command_line, start
from pulsetrain import Checkpointer, ConsoleLogger, DPOStrategy, EventRecorder, Every, Trainer, TrainingConfig
from pulsetrain.engine.data.preferences import from_preferences, pad_pairs


def pairs_of(functions: Sequence[Function], kind: str) -> list[dict[str, str]]:
    """Every function in which this kind of mistake is possible, with one mistake."""
    found = [(each, mutate(each, kind, longest=CONTEXT)) for each in functions]
    return [{"prompt": each.signature, "chosen": each.body, "rejected": wrong} for each, wrong in found if wrong]


def batches_of(pairs: Sequence[dict[str, str]], size: int) -> list[dict[str, Tensor]]:
    """Batches of pairs of similar length, which need little padding."""
    by_length = sorted(pairs, key=lambda pair: len("".join(pair.values())))
    examples = from_preferences(by_length, str.encode, end=END)
    return [pad_pairs(examples[begin : begin + size]) for begin in range(0, len(pairs), size)]


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = command_line("dpo", __doc__)
    parser.add_argument("--epochs", type=int, default=1, help="passes over the pairs [%(default)s]")
    parser.add_argument("--functions", type=int, help="how many to train on, and to evaluate on [all that fit]")
    options, model, checkpoint = start(parser, arguments)
    training, held_out = (side[: options.functions] for side in functions_of_library(CONTEXT))
    pairs = [pair for kind in KINDS for pair in pairs_of(training, kind)]
    judged = {kind: found for kind in KINDS if (found := pairs_of(held_out, kind))}
    run = options.run
    print(f"from {checkpoint}: {len(pairs)} pairs to train on; run folder {run}")

    # The current model is the reference; its stored log-probabilities cost nothing during training.
    reference = DPOStrategy(reference=model)
    batches: Any = reference.store_reference(batches_of(pairs, 16))  # Any: torch declares Dataset but accepts a list
    config = TrainingConfig(
        max_epochs=options.epochs, learning_rate=3e-4, warmup_steps=min(10, options.epochs * len(batches) // 10),
        schedule="cosine", clip_grad_norm=1.0, validate_every=Every(updates=50), log_every_n_steps=25,
    )  # fmt: skip
    trainer = Trainer(
        model,
        DataLoader(batches, batch_size=None, shuffle=True),
        {kind: reference.store_reference(batches_of(found, 32)) for kind, found in judged.items()},
        strategy=DPOStrategy(beta=0.1, reference=None),
        config=config,
        handlers=[ConsoleLogger(), EventRecorder(run), Checkpointer(run)],
    )
    before = trainer.validate()
    history = trainer.train()

    print("held-out pairs in which the true body has the larger implicit reward:")
    for kind, found in judged.items():
        share = history[f"{kind}/reward_accuracy"][-1]
        error = math.sqrt(share * (1 - share) / len(found))
        margins = before[f"{kind}/reward_margin"], history[f"{kind}/reward_margin"][-1]
        print(f"  another {kind}: {share:.1%} of {len(found)}, standard error {error:.1%}; ", end="")
        print(f"by {margins[1]:.3f} on average (at the start all rewards are 0: {margins[0]:.3f})")
    return history


if __name__ == "__main__":
    main()
