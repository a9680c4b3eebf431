"""Names that other libraries use for arguments of strategies, so that an error can say the right one."""

from __future__ import annotations

import inspect

__all__ = ["remedies_for"]

# argument of a strategy -> its names in TRL, Stable-Baselines3, RLlib, CleanRL and transformers
_NAMES = {
    "reference": ("ref_model", "reference_model"),
    "group_size": ("num_generations",),
    "kl_coef": ("beta", "init_kl_coef"),
    "clip_range": ("epsilon", "cliprange", "clip_param", "clip_coef"),
    "clip_range_high": ("epsilon_high",),
    "value_clip_range": ("clip_range_vf", "cliprange_value"),
    "value_coef": ("vf_coef", "vf_loss_coeff"),
    "entropy_coef": ("ent_coef", "entropy_coeff"),
    "lam": ("gae_lambda",),
    "minibatch_epochs": ("n_epochs", "num_ppo_epochs", "ppo_epochs", "num_sgd_iter", "num_iterations", "update_epochs"),
    "minibatch_size": ("batch_size", "mini_batch_size"),
    "normalize_advantages": ("normalize_advantage", "whiten_advantages"),
    "mask_truncated": ("mask_truncated_completions",),
    "ratio": ("importance_sampling_level",),
    "sft_weight": ("cpo_alpha",),
    "center_coef": ("center_rewards_coefficient",),
    "aux_loss_coef": ("router_aux_loss_coef",),
    "loss_options": ("label_smoothing", "ignore_index"),
}


def remedies_for(kind: type) -> dict[str, str]:
    """What to write in place of keywords that other libraries have and this class of strategies does not.

    >>> class Preferences:
    ...     def __init__(self, beta: float, reference: str): ...
    >>> remedies_for(Preferences)
    {'ref_model': 'pass reference=...', 'reference_model': 'pass reference=...'}
    """
    parameters = inspect.signature(kind).parameters
    return {
        name: f"pass {parameter}=..."
        for parameter, names in _NAMES.items()
        for name in names
        if parameter in parameters and name not in parameters
    }
