"""Models of vision and language are fine-tuned: the pixels of a batch reach the model, and decide what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import DPOStrategy, Every, SFTStrategy
from pulsetrain.handlers import Checkpointer
from tests.support.runs import cut_after

transformers = pytest.importorskip("transformers", reason="transformers is not there: pip install transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what transformers says of its own models

IMAGE, START, END, ASK, ROWS = 63, 61, 62, 5, 4
TEXT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


def llava() -> Any:
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen() -> Any:
    torch.manual_seed(0)
    sections = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": sections},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


def batches(kind: str, count: int = 6) -> list[dict[str, Tensor]]:
    """Dark and light images, and the question which of the two an image is."""
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        light = torch.randint(0, 2, (ROWS,), generator=generator)
        shade = (2.0 * light - 1)[:, None]
        if kind == "llava":
            pixels = 0.1 * torch.randn(ROWS, 3, 8, 8, generator=generator) + shade[..., None, None]
            prompt = [IMAGE] * 4 + [ASK]
            fields = {"pixel_values": pixels}
        else:  # patches of 4 x 4 pixels, in pairs of frames, 2 x 2 of which are one token
            patches = 0.1 * torch.randn(ROWS, 4, 3 * 2 * 4 * 4, generator=generator) + shade[..., None]
            prompt = [START, IMAGE, END, ASK]
            fields = {"pixel_values": patches.flatten(0, 1), "image_grid_thw": torch.tensor([[1, 2, 2]] * ROWS)}
        tokens = torch.cat([torch.tensor([prompt] * ROWS), 10 + light[:, None]], 1)
        if kind == "qwen":
            fields["mm_token_type_ids"] = (tokens == IMAGE).int()
        labels = torch.where(torch.arange(tokens.shape[1]) < len(prompt), -100, tokens)
        found.append({"input_ids": tokens, "labels": labels, **fields})
    return found


MODELS = {"llava": llava, "qwen": qwen}


def trainer(kind: str, *handlers: Any) -> Trainer:
    config = TrainingConfig(max_epochs=8, optimizer="adamw", learning_rate=0.01, seed=0, device="cpu")
    data = batches(kind)
    return Trainer(MODELS[kind](), data, data, strategy=SFTStrategy(), config=config, handlers=handlers)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_learns_what_only_the_image_says(kind: str) -> None:
    run = trainer(kind)
    history = run.train()
    assert history["val/loss"][0] > 0.5  # the nats of a guess between two are 0.69
    assert history["val/loss"][-1] < 0.1
    (batch,) = batches(kind, 1)
    with torch.no_grad():
        inputs = SFTStrategy().prepare_batch(batch).inputs
        said = run.model.eval()(**inputs).logits[:, -1].argmax(-1)
        other = run.model(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits[:, -1].argmax(-1)
    assert torch.equal(said, batch["input_ids"][:, -1])
    assert torch.equal(other, 21 - said)


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    whole = trainer(kind, Checkpointer(tmp_path / "whole", Every(iterations=7)))
    history = whole.train()
    cut_after(trainer(kind, Checkpointer(tmp_path / "cut", Every(iterations=7))), 9)
    resumed = trainer(kind, Checkpointer(tmp_path / "cut", Every(iterations=7)))
    assert resumed.train(resume="latest") == history
    for name, each in resumed.model.state_dict().items():
        assert torch.equal(each, whole.model.state_dict()[name]), name


def preferences(kind: str) -> list[dict[str, Tensor]]:
    """The right answer to each question is chosen, the other one rejected; both sides see one image."""
    found = []
    for batch in batches(kind):
        tokens, labels = batch["input_ids"], batch["labels"]
        wrong = torch.cat([tokens[:, :-1], 21 - tokens[:, -1:]], 1)
        chosen = {"chosen_input_ids": tokens, "chosen_labels": labels}
        # a token longer than the chosen answer, so that sides are padded
        longer = torch.cat([wrong, torch.full((ROWS, 1), 7)], 1)
        rejected = {"rejected_input_ids": longer, "rejected_labels": torch.where(longer < 10, -100, longer)}
        rejected["rejected_labels"][:, : tokens.shape[1] - 1] = -100
        fields = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
        if kind == "qwen":
            fields["chosen_mm_token_type_ids"] = (tokens == IMAGE).int()
            fields["rejected_mm_token_type_ids"] = (longer == IMAGE).int()
        found.append({**chosen, **rejected, **fields})
    return found


def run_of_preferences(kind: str, *handlers: Any) -> Trainer:
    data = preferences(kind)
    config = TrainingConfig(max_epochs=8, optimizer="adamw", learning_rate=0.01, seed=0, device="cpu")
    return Trainer(MODELS[kind](), data, data, strategy=DPOStrategy(), config=config, handlers=handlers)


@pytest.mark.parametrize("kind", MODELS)
def test_preferences_about_images_are_learnt_from_the_images(kind: str) -> None:
    run = run_of_preferences(kind)
    history = run.train()
    assert history["val/reward_accuracy"][-1] == 1.0
    turned = [{**each, "pixel_values": -each["pixel_values"]} for each in preferences(kind)]
    assert run.evaluation.run("turned", turned)["turned/reward_accuracy"] == 0.0


@pytest.mark.parametrize("kind", MODELS)
def test_the_log_probabilities_of_both_sides_are_those_of_the_model_called_for_each(kind: str) -> None:
    run, batch = run_of_preferences(kind), preferences(kind)[0]
    prepared = run.strategy.prepare_batch(batch)
    with torch.no_grad():
        together = run.model.eval()(**prepared.inputs).logits.log_softmax(-1)
        for number, side in enumerate(("chosen_", "rejected_")):
            tokens = batch[f"{side}input_ids"]
            own = {name.removeprefix(side): each for name, each in batch.items() if name.startswith(side)}
            fields = {name: each for name, each in own.items() if name not in ("input_ids", "labels")}
            shared = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
            alone = run.model(input_ids=tokens, **fields, **shared).logits.log_softmax(-1)
            rows = together[number * ROWS : (number + 1) * ROWS]
            length = min(tokens.shape[1], rows.shape[1])
            torch.testing.assert_close(rows[:, :length], alone[:, :length], rtol=1e-4, atol=1e-5)


def test_preferences_about_patches_resume_bit_for_bit(tmp_path: Path) -> None:
    whole = run_of_preferences("qwen", Checkpointer(tmp_path / "whole", Every(iterations=7)))
    history = whole.train()
    cut_after(run_of_preferences("qwen", Checkpointer(tmp_path / "cut", Every(iterations=7))), 9)
    resumed = run_of_preferences("qwen", Checkpointer(tmp_path / "cut", Every(iterations=7)))
    assert resumed.train(resume="latest") == history
    for name, each in resumed.model.state_dict().items():
        assert torch.equal(each, whole.model.state_dict()[name]), name


def test_patches_that_the_grid_does_not_count_are_refused() -> None:
    run, batch = run_of_preferences("qwen"), preferences("qwen")[0]
    with pytest.raises(ValueError, match="'image_grid_thw' counts 16 patches; let the loader join"):
        run.strategy.prepare_batch({**batch, "pixel_values": batch["pixel_values"][:-1]})
