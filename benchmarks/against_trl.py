"""Fine-tuning, preference learning and group-relative learning, compared with TRL's trainers on the same work.

    python -m benchmarks against_trl           # prints a table and exits with 1 if a bound is missed

Both train copies of one small Llama with AdamW on the same examples: the same batches, lengths and numbers of texts, on
the CPU with one thread, without recomputing activations, with clipping at 1.0, one log line per LOG updates and no
checkpoints. The optimizer notes the time of two of its updates, between which lie the measured ones, so start and end
are left out. The two take turns; a figure is the median over the rounds of TRL's seconds divided by ours. The bounds
are of CPU seconds, which other programs on the machine disturb less than wall-clock time; that is printed beside them.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness.results import Row, make_parser, ratios, report
from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import DPOStrategy, GRPOStrategy, SFTStrategy
from pulsetrain.engine.data.sequences import IGNORED, pad_examples
from pulsetrain.engine.rollouts import TextRollouts

VOCABULARY, PROMPT, ANSWER = 128, 8, 24  # token ids, and tokens of a prompt and of an answer
ROWS, GROUP, WRITTEN = 8, 4, 16  # in a batch; texts for a prompt, and their tokens
FIRST, MEASURED, LOG = 5, 20, 10  # updates before the measurement, and in it; updates of a log line
BOUNDS = {"SFT": 1.2, "DPO": 1.2, "GRPO": 1.1}

Tokens = list[int]
Pair = tuple[float, float]  # seconds per update: wall clock, CPU
Train = Callable[[Any, torch.optim.Optimizer, int, Path], object]
Reward = Callable[[list[Tokens]], list[float]]


def model_of(seed: int = 0) -> Any:
    """A Llama with random weights, the same each time."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def tokenizer_of() -> Any:
    """Token ids as words: "17 5 9"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": 1, **{str(number): number for number in range(2, VOCABULARY)}}
    found = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<end>")


def examples(count: int) -> list[tuple[Tokens, Tokens, Tokens]]:
    """Prompts with a better and a worse answer."""
    generator = torch.Generator().manual_seed(0)

    def drawn(length: int) -> Tokens:
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    return [(drawn(PROMPT), [*drawn(ANSWER), 1], [*drawn(ANSWER), 1]) for _ in range(count)]


def text(tokens: Tokens) -> str:
    """The words of token ids, without the end token, which TRL adds."""
    return " ".join(str(token) for token in tokens if token != 1)


def reward(completions: list[Tokens]) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in each) / len(each) for each in completions]


# ------------------------------------------------------------------------------------------------------------- ours


def ours(strategy: Any, loader: Any, model: Any, optimizer: torch.optim.Optimizer, updates: int, seed: int = 0) -> None:
    """Train with our Trainer."""
    config = TrainingConfig(
        max_updates=updates, schedule=None, clip_grad_norm=1.0, device="cpu", seed=seed, log_every_n_steps=LOG
    )
    Trainer(model, loader, strategy=strategy, optimizer=optimizer, config=config).train()


def our_sft(model: Any, optimizer: torch.optim.Optimizer, updates: int, folder: Path) -> None:
    """The loss is over the answers."""
    rows = [labelled(prompt, chosen) for prompt, chosen, _ in examples(updates * ROWS)]
    loader: DataLoader[Any] = DataLoader(rows, ROWS, shuffle=True, collate_fn=pad_examples)  # type: ignore[arg-type]
    ours(SFTStrategy(), loader, model, optimizer, updates)


def our_dpo(model: Any, optimizer: torch.optim.Optimizer, updates: int, folder: Path) -> None:
    """The reference is a copy of the model."""
    rows = [(labelled(prompt, chosen), labelled(prompt, worse)) for prompt, chosen, worse in examples(updates * ROWS)]

    def collate(pairs: list[Any]) -> dict[str, Tensor]:
        sides = zip(("chosen", "rejected"), zip(*pairs, strict=True), strict=True)
        return {f"{side}_{name}": value for side, rows in sides for name, value in pad_examples(rows).items()}

    loader: DataLoader[Any] = DataLoader(rows, ROWS, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    ours(DPOStrategy(beta=0.1), loader, model, optimizer, updates)


def our_grpo(
    model: Any, optimizer: torch.optim.Optimizer, updates: int, folder: Path, score: Reward = reward, seed: int = 0
) -> None:
    """A rollout is one batch, used once."""
    prompts = [prompt for prompt, _, _ in examples(updates * ROWS // GROUP)]
    rollouts = TextRollouts(
        prompts, lambda prompts, completions: score(completions), max_new_tokens=WRITTEN,
        prompts_per_rollout=ROWS // GROUP, end_token=1,
    )  # fmt: skip
    ours(GRPOStrategy(GROUP), rollouts, model, optimizer, updates, seed)


def labelled(prompt: Tokens, answer: Tokens) -> dict[str, Tokens]:
    """An example whose answer is learnt."""
    return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}


# -------------------------------------------------------------------------------------------------------------- TRL


def settings(updates: int, folder: Path) -> dict[str, Any]:
    """Of each of TRL's trainers."""
    return {
        "output_dir": str(folder), "max_steps": updates, "per_device_train_batch_size": ROWS, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "max_grad_norm": 1.0, "lr_scheduler_type": "constant",
        "logging_steps": LOG, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 0,
    }  # fmt: skip


def trl_sft(model: Any, optimizer: torch.optim.Optimizer, updates: int, folder: Path) -> None:
    """SFTTrainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"prompt": text(prompt), "completion": " " + text(chosen)} for prompt, chosen, _ in examples(updates * ROWS)
    ]
    SFTTrainer(
        model, SFTConfig(**settings(updates, folder)), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of(), optimizers=(optimizer, None),
    ).train()  # fmt: skip


def trl_dpo(model: Any, optimizer: torch.optim.Optimizer, updates: int, folder: Path) -> None:
    """DPOTrainer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = [
        {"prompt": text(prompt), "chosen": " " + text(chosen), "rejected": " " + text(worse)}
        for prompt, chosen, worse in examples(updates * ROWS)
    ]
    DPOTrainer(
        model, copy.deepcopy(model), DPOConfig(beta=0.1, **settings(updates, folder)),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of(), optimizers=(optimizer, None),
    ).train()  # fmt: skip


def trl_grpo(
    model: Any, optimizer: torch.optim.Optimizer, updates: int, folder: Path, score: Reward = reward, seed: int = 0
) -> None:
    """GRPOTrainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def scores(completion_ids: list[Tokens], **others: object) -> list[float]:
        return score(completion_ids)

    rows = [{"prompt": text(prompt)} for prompt, _, _ in examples(updates * ROWS // GROUP)]
    config = GRPOConfig(
        num_generations=GROUP, max_completion_length=WRITTEN, beta=0.0, loss_type="grpo",
        **{**settings(updates, folder), "seed": seed},
    )  # fmt: skip
    GRPOTrainer(
        model, scores, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of(),
        optimizers=(optimizer, None),
    ).train()  # fmt: skip


WORK: dict[str, tuple[Train, Train]] = {
    "SFT": (our_sft, trl_sft),
    "DPO": (our_dpo, trl_dpo),
    "GRPO": (our_grpo, trl_grpo),
}


# ------------------------------------------------------------------------------------------------- the measurement


@contextmanager
def quiet() -> Iterator[None]:
    """Without what the trainers print, log and warn of."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def seconds_of(train: Train, model: Any, measured: int) -> Pair:
    """Seconds per measured update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    noted: list[Pair] = []
    made = 0

    def note(*others: object) -> None:
        nonlocal made
        made += 1
        if made in (FIRST, FIRST + measured):
            noted.append((time.perf_counter(), time.process_time()))

    optimizer.register_step_post_hook(note)
    with tempfile.TemporaryDirectory() as folder, quiet():
        train(model, optimizer, FIRST + measured, Path(folder))
    (wall, cpu), (last_wall, last_cpu) = noted
    return (last_wall - wall) / measured, (last_cpu - cpu) / measured


def measure(names: list[str], rounds: int, measured: int) -> dict[str, list[tuple[Pair, Pair]]]:
    """For each kind of training, ours and TRL's seconds per update in each round."""
    found: dict[str, list[tuple[Pair, Pair]]] = {name: [] for name in names}
    model = model_of()
    for number in range(rounds + 1):  # the first warms up
        for name in names:
            mine, theirs = (seconds_of(train, copy.deepcopy(model), measured) for train in WORK[name])
            if number:
                found[name].append((mine, theirs))
    return found


def rows_of(found: dict[str, list[tuple[Pair, Pair]]]) -> list[Row]:
    """How many times our processor time TRL takes for the same updates: medians and spread."""
    rows = []
    for name, rounds in found.items():
        (_, mine), (_, theirs) = (zip(*sides, strict=True) for sides in zip(*rounds, strict=True))
        cpu = {"ours, CPU ms": statistics.median(mine) * 1e3, "TRL, CPU ms": statistics.median(theirs) * 1e3}
        wall = statistics.median(trl[0] / ours[0] for ours, trl in rounds)
        rows.append(
            Row(
                name=f"TRL / ours, {name}", kind="ratio", bound=BOUNDS[name], at_least=True,
                also={**cpu, "wall clock": wall}, **ratios(theirs, mine),
            )
        )  # fmt: skip
    return rows


def main() -> int:
    """Measure and print; the exit status is 1 if a bound is missed."""
    parser = make_parser("against_trl", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=MEASURED, help="measured updates in a round [%(default)s]")
    parser.add_argument("--only", nargs="+", choices=list(WORK), default=list(WORK), metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)

    def rows() -> tuple[list[Row], list[str]]:
        try:
            import trl
        except ImportError as error:
            absent = f"TRL: absent: {error}; pip install -e '.[bench]'"
            return [
                Row(name=f"TRL / ours, {name}", measured=math.nan, kind="ratio", bound=BOUNDS[name], at_least=True)
                for name in options.only
            ], [absent]
        return rows_of(measure(options.only, options.rounds, options.updates)), [f"trl {trl.__version__}"]

    return report(options, "an update", rows)


if __name__ == "__main__":
    raise SystemExit(main())
