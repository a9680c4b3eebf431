"""Tiny Hugging Face models built from configurations, and data for every strategy."""

import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import DPOStrategy, GRPOStrategy, PPOStrategy, PretrainStrategy, SFTStrategy
from pulsetrain.engine.data.sequences import IGNORED, pack, pad_examples
from pulsetrain.engine.rollouts import TextRollouts
from pulsetrain.engine.strategies import WithValueHead

VOCABULARY, CONTEXT, WINDOW = 64, 32, 4
_WIDTHS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_LLAMAS = {**_WIDTHS, "vocab_size": VOCABULARY, "num_key_value_heads": 1, "max_position_embeddings": CONTEXT}


def _llama(transformers):
    return transformers.LlamaConfig(**_LLAMAS)


def _gpt2(transformers):
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def _qwen2(transformers):
    return transformers.Qwen2Config(**_LLAMAS)


def _mistral(transformers):
    return transformers.MistralConfig(**_LLAMAS, sliding_window=WINDOW)


def _neox(transformers):
    return transformers.GPTNeoXConfig(**_WIDTHS, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)


def _gemma(transformers):
    return transformers.GemmaConfig(**_LLAMAS, head_dim=8)


_CONFIGS = {"llama": _llama, "gpt2": _gpt2, "qwen2": _qwen2, "mistral": _mistral, "neox": _neox, "gemma": _gemma}
FAMILIES = list(_CONFIGS)
ATTENTION = ["sdpa", "eager"]


def model_of(family, attention="sdpa", seed=0, spread=1.0):
    """In eval mode, as Hugging Face gives them.

    Args:
        spread: what all weight matrices are multiplied by, so that logits differ more than they do at first.
    """
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[family](transformers), attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(spread)
    return model.eval()


def with_adapters(model, seed=0, trained=True, **options):
    """LoRA on the attention of a Llama; unless they are trained, new adapters leave its outputs unchanged."""
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    found = peft.get_peft_model(model, config)
    if not trained:
        return found
    with torch.no_grad():  # B is 0 at first, and A would learn nothing in the first step
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return found


def documents(count=6, seed=0):
    """Of 4 tokens and more; the first two are a prompt."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        tokens = torch.randint(1, VOCABULARY, (4 + number % 4,), generator=generator)
        found.append({"input_ids": tokens, "labels": torch.where(torch.arange(len(tokens)) < 2, IGNORED, tokens)})
    return found


def _pairs(rows):
    chosen, rejected = pad_examples(documents(rows, 1)), pad_examples(documents(rows, 2))
    sides = {"chosen": chosen, "rejected": rejected}
    return {f"{side}_{name}": value for side, fields in sides.items() for name, value in fields.items()}


def reward(prompts, completions):
    return [sum(token % 7 for token in each) / len(each) for each in completions]


def rollouts(prompts_per_rollout=2):
    prompts = [each["input_ids"][: 1 + number % 3].tolist() for number, each in enumerate(documents())]
    return TextRollouts(prompts, reward, max_new_tokens=5, prompts_per_rollout=prompts_per_rollout, end_token=3)


STRATEGIES = ["pretrain", "sft", "dpo", "ppo", "grpo"]


def trainer_of(kind, model, updates=2, handlers=(), learning_rate=1e-2):
    """A run by this strategy over two batches, or over what the model writes."""
    packed = pad_examples(pack(documents(), 16))
    assert len(packed["input_ids"]) < len(documents())
    without_labels = {name: packed[name] for name in ("input_ids", "position_ids")}
    arguments = {
        "pretrain": ([without_labels] * 2, PretrainStrategy()),
        "sft": ([packed, pad_examples(documents(3, 5))], SFTStrategy()),
        "dpo": ([_pairs(2), _pairs(3)], DPOStrategy()),
        "ppo": (rollouts(), PPOStrategy(gamma=1.0, minibatch_epochs=2)),
        "grpo": (rollouts(), GRPOStrategy(4, kl_coef=0.05, minibatch_epochs=2)),
    }  # fmt: skip
    data, strategy = arguments[kind]
    config = TrainingConfig(max_updates=updates, learning_rate=learning_rate, optimizer="sgd", seed=0)
    learner = WithValueHead(model) if kind == "ppo" else model
    return Trainer(learner, data, strategy=strategy, config=config, handlers=handlers)
