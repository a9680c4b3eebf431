"""TRL's losses without TRL's models: its trainers' own methods, on the few attributes that they read."""

import asyncio
import importlib
import threading
import warnings
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch


class OneProcess:
    """The parts of accelerate that the methods use, for one process."""

    device = torch.device("cpu")
    process_index, num_processes, sync_gradients = 0, 1, True

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction):
        return tensor

    def autocast(self):
        return nullcontext()


class Answering(torch.nn.Module):
    """A model whose outputs are always these."""

    is_gradient_checkpointing = False

    def __init__(self, **outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, **inputs):
        return SimpleNamespace(**self.outputs)


def metrics():
    return defaultdict(lambda: defaultdict(list))


def experimental(name):
    """A module of trl.experimental, without the warning that it is one; skips the test where there is no trl."""
    pytest.importorskip("trl", reason="trl is not there: pip install trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"trl.experimental.{name}")


def dpo_trainer(policy, reference, beta, loss_type, label_smoothing=0.0, loss_weights=None):
    """The attributes that the loss of DPOTrainer reads; several losses are a list."""
    types = [loss_type] if isinstance(loss_type, str) else loss_type
    return SimpleNamespace(
        model=policy,
        ref_model=reference,
        accelerator=OneProcess(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        beta=beta,
        label_smoothing=label_smoothing,
        loss_types=types,
        loss_weights=loss_weights or [1.0] * len(types),
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        use_weighting=False,
        _metrics=metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )


def dpo_loss(log_probs, reference_log_probs, mask, beta, loss_type, label_smoothing=0.0):
    """The loss of DPOTrainer.

    Args:
        log_probs: of each token but the first, chosen replies before rejected ones; shape (2 * pairs, length).
        mask: of the same shape.
    """
    from trl.trainer.dpo_trainer import DPOTrainer

    prompt = torch.zeros(mask.shape[0], 1, dtype=torch.int64)
    completion_mask = torch.cat([prompt, mask.long()], dim=1)
    some = torch.zeros(log_probs.shape)

    def model_of(values):
        return Answering(log_probs=values * mask, entropy=some, mean_logits=some, is_top1=some.bool())

    policy, reference = model_of(log_probs), model_of(reference_log_probs)
    trainer = dpo_trainer(policy, reference, beta, loss_type, label_smoothing)
    inputs = {
        "input_ids": torch.zeros_like(completion_mask),
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
    }
    return DPOTrainer._compute_loss(trainer, policy, inputs, return_outputs=False)


def without_reference(kind, model, batch, **options):
    """The loss of CPOTrainer or ORPOTrainer for a batch of pairs, with attention masks, and its metrics."""
    trainer_class = getattr(experimental(kind), f"{kind.upper()}Trainer")
    trainer = SimpleNamespace(
        accelerator=OneProcess(), is_encoder_decoder=False, pad_token_id=0, padding_value=0, aux_loss_enabled=False,
        **options,
    )  # fmt: skip
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(trainer, name, getattr(trainer_class, name))
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer_class, name):
            setattr(trainer, name, partial(getattr(trainer_class, name), trainer))
    return trainer_class.get_batch_loss_metrics(trainer, model, batch)


def kto_trainer(policy, reference, beta, loss_type, weights):
    """The attributes that the loss of KTOTrainer reads."""
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = SimpleNamespace(
        model=policy,
        ref_model=reference,
        accelerator=OneProcess(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        beta=beta,
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
    return trainer


def grpo_loss(
    log_probs, old, advantages, mask, loss_type, low=0.2, high=0.2, beta=0.0, reference=None, max_length=None,
    level="token", entropies=None, entropy_coef=0.0,
):  # fmt: skip
    """The loss of GRPOTrainer, and the metrics it logs.

    Args:
        level: of the importance ratio.
        entropies: of each token; only their values are used.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    logged = metrics()
    entropies = torch.zeros(log_probs.shape) if entropies is None else entropies
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=loss_type,
        beta=beta,
        epsilon_low=low,
        epsilon_high=high,
        importance_sampling_level=level,
        max_completion_length=max_length,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _entropy_bonus_enabled=bool(entropy_coef),
        _metrics=logged,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropies, None),
    )
    inputs = _generated(mask) | {
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, {name: values[-1] for name, values in logged["train"].items()}


def rloo_loss(log_probs, old, advantages, mask, low=0.2, high=0.2):
    """The loss of RLOOTrainer, which compares whole replies."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        epsilon_low=low,
        epsilon_high=high,
        aux_loss_enabled=False,
        _metrics=metrics(),
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros(log_probs.shape), None),
    )
    inputs = _generated(mask) | {"advantages": advantages, "old_logps": (old * mask).sum(1)}
    return RLOOTrainer._compute_loss(trainer, None, inputs)


def _generated(mask):
    """Inputs of replies with this mask, to prompts of one token."""
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask.long(),
    }


def grpo_advantages(rewards, group_size, scale, weights=None, *, decoupled=False):
    """The advantages that GRPOTrainer computes from rewards.

    Args:
        weights: of several rewards, which then have a column for each.
        decoupled: each is normalised before their sum.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    aggregation = "normalize_then_sum" if decoupled else "sum_then_normalize"
    trainer = _scoring(rewards if weights is not None else rewards[:, None], group_size, weights)
    replies = len(rewards)
    vars(trainer).update(
        scale_rewards=scale,
        multi_objective_aggregation=aggregation,
        _generate=lambda prompts: ([[1]] * replies, [[1]] * replies, None, ["a"] * replies, None, {}, None, None),
    )
    return GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "a"}] * replies)["advantages"]


def rloo_advantages(rewards, group_size, normalize):
    """The advantages that RLOOTrainer computes from rewards."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    trainer, replies = _scoring(rewards[:, None], group_size), len(rewards)
    vars(trainer).update(
        normalize_advantages=normalize,
        reward_clip_range=None,
        _generate=lambda prompts: ([[1]] * replies, [[1]] * replies, ["a"] * replies),
        _get_per_token_logps_and_entropies=lambda *_, **__: (torch.zeros(replies, 1), None, None),
    )
    return RLOOTrainer._generate_and_score_completions(trainer, [{"prompt": "a"}] * replies)["advantages"]


def _scoring(rewards, group_size, weights=None):
    """What the trainers' methods read that generate replies and compare their rewards, a column per function."""
    replies, functions = rewards.shape
    return SimpleNamespace(
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            per_device_train_batch_size=replies,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        num_iterations=1,
        num_generations=group_size,
        reward_weights=torch.ones(functions) if weights is None else weights,
        reward_funcs=[None] * functions,
        reward_func_names=[f"reward {number}" for number in range(functions)],
        beta=0.0,
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        log_multimodal=False,
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _calculate_rewards=lambda *_: rewards,
        _metrics=metrics(),
        _logs={"prompt": [], "completion": [], "rewards": defaultdict(list), "advantages": [], "extra": {}},
        _pending_extra_logs={},
        _pending_metrics={},
    )


def rewards(functions, prompts, completions, completion_ids, columns):
    """What GRPOTrainer makes of reward functions, a column for each; nan where one does not apply."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
        environments=None,
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[each.__name__ for each in functions],
        async_loop=asyncio.new_event_loop(),
        _log_completion_extra=None,
        _log_metric=None,
    )
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    thread = threading.Thread(target=trainer.async_loop.run_forever)
    thread.start()
    try:
        return GRPOTrainer._calculate_rewards(trainer, rows, prompts, completions, completion_ids)
    finally:
        trainer.async_loop.call_soon_threadsafe(trainer.async_loop.stop)
        thread.join()
        trainer.async_loop.close()
