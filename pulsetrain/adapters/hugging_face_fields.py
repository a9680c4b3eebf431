"""The fields of transformers' TrainingArguments: which a TrainingConfig holds or cannot hold, where others belong."""

from __future__ import annotations

__all__ = ["ELSEWHERE", "OF_THE_RUN", "REFUSED"]

OF_THE_RUN = frozenset(
    {
        "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "disable_tqdm", "eval_steps", "eval_strategy", "fp16",
        "gradient_accumulation_steps", "learning_rate", "logging_steps", "lr_scheduler_kwargs", "lr_scheduler_type",
        "max_grad_norm", "max_steps", "num_train_epochs", "optim", "output_dir", "save_steps", "seed",
        "torch_compile", "use_cpu", "warmup_steps", "weight_decay",
    }
)  # fmt: skip
"""Fields that become settings."""

_RECOMPUTE = "leave it out, and set TrainingConfig(activation_checkpointing='model.layers.*') to the model's blocks"
_COMPILE = "leave it out, and call model.compile(...) with the options of torch.compile yourself"
_SHARDS = "leave it out, and pass Trainer(backend=TorchBackend(topology=Topology(shard=...)))"
_OPTIMIZER = "leave it out, and pass the optimizer to Trainer(optimizer=...)"

REFUSED = {
    "optim_args": _OPTIMIZER,
    "optim_target_modules": _OPTIMIZER,
    "label_smoothing_factor": "leave it out, and use a loss with label smoothing in the strategy",
    "neftune_noise_alpha": "adds noise to the embeddings of the model; leave it out, or add the noise in the model",
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_kwargs": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": "replaces parts of the model; leave it out, and apply the kernels to the model yourself",
    "liger_kernel_config": "replaces parts of the model; leave it out, and apply the kernels to the model yourself",
    "auto_find_batch_size": "leave it out; `pulsetrain memory` estimates before the run whether a batch fits",
    "average_tokens_across_devices": "leave it out: gradients of several processes are means over all their tokens",
    "accelerator_config": "leave it out; the loader decides how batches are shared out among processes",
    "parallelism_config": _SHARDS,
    "fsdp": _SHARDS,
    "fsdp_config": _SHARDS,
    "deepspeed": _SHARDS,
}
"""Fields that change what is computed and have no counterpart among the settings, and what to do."""

_LOADER = "an argument of the DataLoader that you pass to the Trainer"
_SAMPLER = "the sampler of the DataLoader that you pass to the Trainer"
_COLUMNS = "the loader's batches hold what the model is called with"
_METRICS = "pass Trainer(metrics={...}); each batch is evaluated and released"
_LOGGER = "an argument of a logger, such as TrackioLogger or WandbLogger"
_LOGGING = "the command line's or your own configuration of logging"
_HUB = "upload the run's weights yourself; HuggingFaceExporter writes them in transformers' format"
_COPIES = "processes that train copies of the model average their gradients in every step"

ELSEWHERE = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), "the batch size of the DataLoader"),
    **dict.fromkeys(
        (
            "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
            "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
        ),
        _LOADER,
    ),
    "train_sampling_strategy": _SAMPLER,
    "length_column_name": _SAMPLER,
    "data_seed": "the seed of the run decides the order of the data, too",
    "remove_unused_columns": _COLUMNS,
    "label_names": _COLUMNS,
    "logging_strategy": "set TrainingConfig(log_every_n_steps=...); training losses are also reported for each epoch",
    "logging_first_step": "set TrainingConfig(log_every_n_steps=1) to log the first step",
    "logging_nan_inf_filter": "add the handler NaNGuard()",
    "log_on_each_node": _LOGGING,
    "log_level": _LOGGING,
    "log_level_replica": _LOGGING,
    "include_num_input_tokens_seen": "trainer.state.tokens counts them",
    "report_to": "add handlers, such as TensorBoardLogger(folder), WandbLogger(...) or MLflowLogger(...)",
    "run_name": _LOGGER,
    "project": _LOGGER,
    "trackio_space_id": _LOGGER,
    "trackio_bucket_id": _LOGGER,
    "trackio_static_space_id": _LOGGER,
    "eval_delay": "validations begin at the first that is due",
    "eval_on_start": "call trainer.validate() before trainer.train()",
    "prediction_loss_only": _METRICS,
    "eval_do_concat_batches": _METRICS,
    "eval_use_gather_object": _METRICS,
    "eval_accumulation_steps": _METRICS,
    "include_for_metrics": _METRICS,
    "batch_eval_metrics": _METRICS,
    "bf16_full_eval": "validation computes in TrainingConfig(precision=...)",
    "fp16_full_eval": "validation computes in TrainingConfig(precision=...)",
    "tf32": "call torch.set_float32_matmul_precision('high')",
    "full_determinism": "call torch.use_deterministic_algorithms(True)",
    "use_cache": "set model.config.use_cache",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in a handler of ITERATION_COMPLETED(every=...)",
    "save_strategy": "add the handler Checkpointer(folder, metric=...)",
    "save_total_limit": "add the handler Checkpointer(folder, keep_last=...)",
    "save_only_model": "checkpoints hold all that a resumed run needs",
    "save_on_each_node": "the main process writes the checkpoint",
    "enable_jit_checkpoint": "a Checkpointer saves when the run is interrupted by a signal",
    "load_best_model_at_end": "add the handler BestModel(metric, restore=True)",
    "metric_for_best_model": "the metric of Checkpointer(folder, metric=...) or BestModel(metric)",
    "greater_is_better": "the mode of Checkpointer(folder, metric=..., mode=...) or BestModel(metric, mode=...)",
    "resume_from_checkpoint": "call trainer.train(resume=...) with a checkpoint that a Checkpointer wrote",
    "ignore_data_skip": "a resumed run continues at its place in the data without reading what was read before",
    "restore_callback_states_from_checkpoint": "checkpoints hold the states of handlers and callbacks",
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "ddp_find_unused_parameters": _COPIES,
    "ddp_bucket_cap_mb": _COPIES,
    "ddp_broadcast_buffers": _COPIES,
    "ddp_static_graph": _COPIES,
    "ddp_backend": _COPIES,
    "ddp_timeout": _COPIES,
    "local_rank": "torchrun or `pulsetrain train --launch.nproc N` sets it",
    "debug": "add handlers, such as CrashBundle(folder) or NaNGuard()",
    "skip_memory_metrics": "add the handler MemoryMonitor()",
    "do_train": "transformers' Trainer does not read it, either",
    "do_eval": "transformers' Trainer does not read it, either",
    "do_predict": "transformers' Trainer does not read it, either",
}  # fmt: skip
"""Fields that belong to the data, the model, handlers or calls, and what does the same."""
