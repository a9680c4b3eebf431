"""Sharded models generate: in all processes together, however many tokens each process needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, Every, PPOStrategy, Topology, TorchBackend
from pulsetrain.engine.distributed.ranks import is_sharded
from pulsetrain.engine.distributed.shards import resharded
from pulsetrain.engine.rollouts import TextRollouts
from pulsetrain.engine.rollouts.sampling import sampler_of
from pulsetrain.engine.strategies import PretrainStrategy, WithValueHead
from pulsetrain.handlers import EMA, SampleText
from tests.support.pretrained import VOCABULARY, backend_of, saved, trainer_of
from tests.support.ranks import in_processes

SHARDS = {"shards": Topology(shard=2), "tensor": Topology(tensor=2)}


class Letters(nn.Module):
    """Predicts each byte from the one before it."""

    tensor_plan = {"embedding": "sequence_split", "inner": "colwise", "outer": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(128, 8)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = (
            self.outer(self.inner(self.embedding(tokens)).tanh()) * 2
        )  # torch warns of modules that return views
        return found

    def generate(self, prompt: bytes, length: int, temperature: float = 1.0, generator: Any = None) -> bytes:
        text = bytearray(prompt)
        for _ in range(length):
            logits = self(torch.tensor([list(text)]))[0, -1]
            text.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
        return bytes(text[len(prompt) :])


def letters(topology: Topology | None, *handlers: Any) -> Trainer:
    rows = torch.randint(97, 123, (16, 6), generator=torch.Generator().manual_seed(1))
    config = TrainingConfig(max_epochs=2, optimizer="adam", learning_rate=0.01, seed=0)
    backend = TorchBackend("cpu", topology=topology)
    loader = DataLoader(TensorDataset(rows), 4)
    return Trainer(Letters(), loader, strategy=PretrainStrategy(), backend=backend, config=config, handlers=handlers)


def values(processes: list[Any]) -> list[Any]:
    assert not any(each.error for each in processes), processes[0].error
    return [each.value for each in processes]


@pytest.mark.parametrize("layout", SHARDS)
def test_all_processes_sample_and_the_main_one_writes(layout: str, tmp_path: Path) -> None:
    def run(topology: Topology | None, rank: int = 0) -> tuple[list[str], list[str]]:
        published: list[str] = []
        sample = SampleText(["ab", "c"], tmp_path / f"{topology is not None}-{rank}", Every(iterations=3), length=12)
        trainer = letters(topology, EMA(0.5), sample)
        trainer.on(Events.MEDIA_LOGGED)(lambda engine, event: published.append(event.payload.value))
        trainer.train()
        return sample.texts, published

    texts, published = run(None)
    assert len(published) == 2 * 3  # after iterations 3 and 6, and at the end
    assert values(in_processes(lambda rank: run(SHARDS[layout], rank))) == [(texts, published), (texts, [])]
    assert {each.name for each in tmp_path.iterdir()} == {"False-0", "True-0"}


def test_processes_that_would_not_sample_alike_are_refused(tmp_path: Path) -> None:
    def said(rank: int) -> list[str]:
        found = []
        handlers: list[Callable[[], list[SampleText]]] = [
            lambda: [SampleText("a", length=3 + rank)],
            lambda: [SampleText("a")] if rank == 0 else [],
            lambda: [SampleText("a", every=Every(seconds=1))],
        ]
        for made in handlers:
            with pytest.raises(ConfigurationError) as refused:
                letters(Topology(shard=2), *made())
            found.append(str(refused.value))
        return found

    for others, fewer, clocks in values(in_processes(said)):
        assert "rank 1 has other SampleTexts than rank 0" in others
        assert "rank 1 has other SampleTexts than rank 0" in fewer
        assert "their clocks differ" in clocks


def test_a_model_that_is_split_along_the_sequence_is_refused() -> None:
    def said(rank: int) -> str:
        with pytest.raises(ConfigurationError) as refused:
            letters(Topology(tensor=2, sequence_parallel=True), SampleText("a"))
        return str(refused.value)

    for text in values(in_processes(said)):
        assert text.startswith("SampleText(sequence_parallel=True): not for models")


def sampler(model: nn.Module) -> Any:
    def agree(value: bool) -> bool:
        found = torch.tensor(float(value))
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return bool(found)

    return sampler_of(model, lambda tokens: tokens, agree=agree if is_sharded(model) else None)


# of each process; those that compute one layer together have the same
TEXTS = {"shards": [([[5, 9, 11], [2]], 3), ([[7]], 9)], "tensor": [([[5, 9, 11], [2]], 5)] * 2}


@pytest.mark.parametrize("layout", SHARDS)
def test_processes_wait_for_the_longest_text(layout: str) -> None:
    def written(model: nn.Module, rank: int) -> list[list[int]]:
        with torch.no_grad(), resharded(model):
            return sampler(model)(*TEXTS[layout][rank], temperature=1e-6)

    expected = [written(Letters(), rank) for rank in range(2)]
    assert values(in_processes(lambda rank: written(letters(SHARDS[layout]).model, rank))) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "wrap"),
    [("shards", lambda model: model), ("tensor", lambda model: model), ("shards", WithValueHead)],
    ids=["shards", "tensor", "shards with value head"],
)
def test_models_of_transformers_wait_for_the_longest_text(layout: str, wrap: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved("llama", tmp_path)

    def written(model: Any, rank: int, temperature: float) -> list[list[int]]:
        with torch.no_grad(), resharded(model):
            return sampler(model)(*TEXTS[layout][rank], temperature=temperature)

    def loaded() -> Any:
        return wrap(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))

    model = loaded()
    expected = [[written(model, rank, each) for each in (0.0, 1e-6)] for rank in range(2)]
    assert expected[0][0] == expected[0][1]

    def run(rank: int) -> list[list[list[int]]]:
        made = trainer_of(tmp_path, layout, model=loaded())
        return [written(made.model.eval(), rank, each) for each in (0.0, 1e-6)]

    assert values(in_processes(run)) == expected


@pytest.mark.slow
def test_ppo_learns_from_texts_that_a_sharded_model_writes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved("llama", tmp_path)

    def run(layout: str) -> list[float]:
        model = WithValueHead(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
        rollouts = TextRollouts(
            [[3, 4, 5], [6, 7], [8], [9, 2]],
            lambda prompts, completions: [float(sum(each)) for each in completions],
            prompts_per_rollout=4,
            max_new_tokens=4,
        )
        config = TrainingConfig(max_updates=4, optimizer="sgd", learning_rate=0.01, seed=1, log_every_n_steps=1)
        strategy = PPOStrategy(gamma=1.0, minibatch_size=2)
        made = Trainer(model, rollouts, strategy=strategy, backend=backend_of(layout), config=config)
        return list(made.train()["train/loss"])

    for losses in values(in_processes(lambda rank: run("shards"))):
        assert losses == pytest.approx(run("one"), rel=1e-5)


@pytest.mark.slow
def test_sample_text_takes_a_model_of_transformers(tmp_path: Path) -> None:
    saved("llama", tmp_path)

    def run(layout: str) -> list[str]:
        sample = SampleText(
            "abc",
            length=10,
            encode=lambda text: [ord(each) - 95 for each in text],
            decode=lambda tokens: "".join(chr(95 + each) for each in tokens),
        )
        trainer_of(tmp_path, layout, sample).train()
        return sample.texts

    (text,) = run("one")
    assert text.startswith("abc")
    assert 3 < len(text) <= 13
    assert {ord(each) - 95 for each in text} <= set(range(VOCABULARY))
    for layout in SHARDS:
        assert values(in_processes(lambda rank, layout=layout: run(layout))) == [[text]] * 2
