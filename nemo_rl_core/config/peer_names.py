"""Settings of TRL, NeMo RL, verl and OpenRLHF, by their names there, for unknown keys."""

from collections.abc import Mapping
from typing import Final

_COMPLETIONS: Final = "grpo.num_generations_per_prompt"
_PROMPTS: Final = "grpo.num_prompts_per_step, over all ranks"
_ROWS: Final = "grpo.train_global_batch_size, the sequences of an optimizer step"
_STEPS: Final = "grpo.num_iterations times grpo.num_steps_per_iteration; in SFT sft.num_steps"
_TOKENS: Final = "max_tokens_per_microbatch: rows are packed, by tokens"
_KL: Final = "grpo.loss.kl.beta; in DPO dpo.loss.beta"
_LORA: Final = "training.lora, with rank, alpha and target_modules"
_RATE: Final = "learning_rate, in the algorithm's section"
_WARM_UP: Final = "num_warmup_steps, in the algorithm's section"
_SAVES: Final = "save_every_num_steps, in the algorithm's section"
_VALIDATES: Final = "validate_every_num_steps, in the algorithm's section"
_MODEL: Final = "model.name"
_DATA: Final = "data, with kind file or hub"
_ADVANTAGE: Final = "grpo.advantage, with a kind"
_OVERLONG: Final = "grpo.overlong, with kind filter"
_FP8: Final = "training.float8, and generation.quantization of engines"
_TRAINING: Final = "training, with backend dtensor or megatron"
_RECORD: Final = "tracking; every run is recorded without it"
_DTYPE: Final = "model.dtype, such as bfloat16"
_FULL: Final = "left out: training samples from the policy's full distribution"

ALGORITHM_SECTIONS: Final = frozenset({"sft", "reward_model", "dpo", "grpo", "ppo", "distillation"})
"""Sections of recipes that belong to one algorithm."""

PEER_NAMES: Final[Mapping[str, str]] = {
    "num_generations": _COMPLETIONS,
    "n_samples_per_prompt": _COMPLETIONS,
    "per_device_train_batch_size": f"{_PROMPTS}; {_TOKENS}",
    "gradient_accumulation_steps": f"{_PROMPTS}; {_TOKENS}",
    "train_batch_size": _PROMPTS,
    "rollout_batch_size": _PROMPTS,
    "steps_per_generation": _ROWS,
    "generation_batch_size": _ROWS,
    "ppo_mini_batch_size": _ROWS,
    "micro_train_batch_size": _TOKENS,
    "train_micro_batch_size": _TOKENS,
    "logprob_batch_size": _TOKENS,
    "ppo_micro_batch_size_per_gpu": _TOKENS,
    "ppo_max_token_len_per_gpu": _TOKENS,
    "use_dynamic_bsz": _TOKENS,
    "dynamic_batching": _TOKENS,
    "sequence_packing": _TOKENS,
    "packing": _TOKENS,
    "max_steps": _STEPS,
    "max_num_steps": _STEPS,
    "total_training_steps": _STEPS,
    "num_train_epochs": _STEPS,
    "total_epochs": _STEPS,
    "max_epochs": _STEPS,
    "max_completion_length": "generation.max_new_tokens",
    "max_response_length": "generation.max_new_tokens",
    "generate_max_len": "generation.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "max_total_sequence_length": "data.max_prompt_tokens and generation.max_new_tokens",
    "beta": _KL,
    "kl_coef": _KL,
    "kl_loss_coef": _KL,
    "init_kl_coef": _KL,
    "reference_policy_kl_penalty": _KL,
    "use_kl_loss": "grpo.loss.kl, null for none",
    "kl_loss_type": "grpo.loss.kl.kind",
    "use_kl_in_reward": "grpo.loss.kl.place, in_reward; its kind is k1",
    "epsilon": "grpo.loss.clip_low and grpo.loss.clip_high",
    "epsilon_high": "grpo.loss.clip_high",
    "eps_clip": "grpo.loss.clip_low and grpo.loss.clip_high",
    "clip_ratio": "grpo.loss.clip_low and grpo.loss.clip_high",
    "clip_ratio_low": "grpo.loss.clip_low",
    "clip_ratio_high": "grpo.loss.clip_high",
    "clip_ratio_c": "grpo.loss.dual_clip",
    "ratio_clip_min": "grpo.loss.clip_low",
    "ratio_clip_max": "grpo.loss.clip_high",
    "ratio_clip_c": "grpo.loss.dual_clip",
    "loss_type": "grpo.loss.kind and grpo.loss.reduction; in DPO dpo.loss.kind",
    "loss_agg_mode": "grpo.loss.reduction",
    "token_level_loss": "grpo.loss.reduction, token_mean or sequence_mean",
    "loss_fn": "grpo.loss",
    "entropy_coef": "grpo.loss.entropy_bonus",
    "entropy_coeff": "grpo.loss.entropy_bonus",
    "scale_rewards": _ADVANTAGE,
    "adv_estimator": _ADVANTAGE,
    "advantage_estimator": _ADVANTAGE,
    "normalize_rewards": _ADVANTAGE,
    "use_leave_one_out_baseline": f"{_ADVANTAGE} leave_one_out",
    "mask_truncated_completions": _OVERLONG,
    "overlong_filtering": _OVERLONG,
    "overlong_buffer": "grpo.overlong, with buffer_tokens and penalty",
    "use_dynamic_sampling": "grpo.dynamic_sampling.max_draws",
    "max_trajectory_age_steps": "grpo.asynchronous.max_staleness",
    "ppo_epochs": "ppo.num_epochs_per_rollout",
    "lr": _RATE,
    "actor_learning_rate": _RATE,
    "warmup_steps": _WARM_UP,
    "lr_warmup_steps": _WARM_UP,
    "warmup_ratio": f"{_WARM_UP}, a number instead of a ratio",
    "lr_scheduler_type": "schedule, in the algorithm's section",
    "warmup_style": "schedule, in the algorithm's section",
    "moe_aux_loss_coef": "training.router_aux_loss_coef",
    "grad_clip": "max_grad_norm, in the algorithm's section",
    "save_steps": _SAVES,
    "save_freq": _SAVES,
    "save_period": _SAVES,
    "checkpointing": f"{_SAVES}, with keep_latest and keep_best",
    "save_total_limit": "keep_latest, in the algorithm's section",
    "keep_top_k": "keep_best, in the algorithm's section",
    "load_best_model_at_end": "keep_best, in the algorithm's section, with result: best",
    "metric_for_best_model": "keep_best, in the algorithm's section, with metric",
    "greater_is_better": "keep_best, in the algorithm's section, with mode: max or min",
    "eval_steps": _VALIDATES,
    "test_freq": _VALIDATES,
    "val_period": _VALIDATES,
    "output_dir": "the store, which the variable NEMO_RL_HOME names",
    "default_local_dir": "the store, which the variable NEMO_RL_HOME names",
    "report_to": _RECORD,
    "logger": _RECORD,
    "use_wandb": _RECORD,
    "model_name": _MODEL,
    "model_name_or_path": _MODEL,
    "model_revision": "model.revision, the 40 hex digits of a commit",
    "trust_remote_code": "model.trust_remote_code, in the same section as model.name",
    "pretrain": _MODEL,
    "policy": "model, training, generation and the algorithm's section",
    "actor_rollout_ref": "model, training, generation and the algorithm's section",
    "algorithm": "the workflow, such as workflows/grpo.py, and grpo.preset",
    "env": "environment, with a kind",
    "train_dataset": _DATA,
    "dataset_name": _DATA,
    "train_files": f"{_DATA}; its key is train",
    "eval_dataset": f"{_DATA}; its key is validation",
    "val_files": f"{_DATA}; its key is validation",
    "reward_weights": "reward_weights of train and fit, or an environment of kind weighted_sum",
    "seed": "seed, of the trainer or at the top of a recipe",
    "reward_funcs": "environment, with kind function or weighted_sum",
    "custom_reward_function": "environment, with kind function",
    "bf16": _DTYPE,
    "precision": _DTYPE,
    "torch_dtype": _DTYPE,
    "fp8": _FP8,
    "fp8_cfg": _FP8,
    "fp8_recipe": _FP8,
    "gradient_checkpointing": "training.activation_checkpointing",
    "enable_gradient_checkpointing": "training.activation_checkpointing",
    "param_offload": "training.offload_for_generation, with all",
    "optimizer_offload": "training.offload_for_generation, with optimizer",
    "offload_optimizer_for_logprob": "training.offload_for_generation, with optimizer",
    "vllm_enable_sleep_mode": "generation.placement; colocated engines always sleep",
    "peft_config": _LORA,
    "use_peft": _LORA,
    "lora_cfg": _LORA,
    "r": "training.lora.rank",
    "lora_r": _LORA,
    "lora_rank": _LORA,
    "lora_alpha": _LORA,
    "dtensor_cfg": _TRAINING,
    "megatron_cfg": _TRAINING,
    "fsdp_config": _TRAINING,
    "strategy": _TRAINING,
    "vllm_cfg": "generation, whose keys are directly in it",
    "rollout": "generation",
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), _FULL),
    "use_vllm": "generation.backend",
    "vllm_mode": "generation.backend",
    "vllm_gpu_memory_utilization": "generation.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "generation.tensor_parallel_size",
    "vllm_num_engines": "generation.num_engines",
    "tensor_model_parallel_size": "tensor_parallel_size, of generation or training",
    "pipeline_model_parallel_size": "pipeline_parallel_size, of generation or training",
    "expert_model_parallel_size": "training.expert_parallel_size",
    "ulysses_sequence_parallel_size": "training.context_parallel_size, another method",
    "n_gpus_per_node": "cluster.num_gpus_per_node",
    "gpus_per_node": "cluster.num_gpus_per_node",
    "nnodes": "cluster.shape",
    "num_nodes": "cluster.shape",
}
"""Equivalent of each setting here: its path in a recipe, and notes."""


_INSTEAD: Final = {
    "the store keeps the model, in result.checkpoint; name=... of fit resumes": "output_dir",
    "name=... of train or fit names a run": "run_name",
    "tracking={'trackers': [...]} of train or fit names trackers": "report_to",
    "save_every_num_steps=... says when": "save_strategy",
    "validate_every_num_steps=... says when": "eval_strategy do_eval",
    "train or fit trains": "do_train",
    "dtype='bfloat16' or 'float32'": "bf16 fp16",
    "cluster={'shape': 'laptop'} has no GPU": "use_cpu",
    "vLLM is the default": "use_vllm",
    "rows are packed, max_tokens_per_microbatch tokens at a time": """per_device_eval_batch_size
        padding_free pad_to_multiple_of packing packing_strategy eval_packing auto_find_batch_size
        torch_empty_cache_steps""",
    "every step is recorded with its completions; nemo-rl ui shows them": """log_level
        log_level_replica logging_steps logging_strategy logging_first_step log_on_each_node
        logging_nan_inf_filter disable_tqdm log_completions log_multimodal log_unique_prompts
        num_completions_to_print log_completions_hub_repo skip_memory_metrics
        include_num_input_tokens_seen""",
    "nemo-rl export pushes a model to the hub": """push_to_hub hub_model_id hub_strategy hub_token
        hub_private_repo hub_always_push hub_revision""",
    "rows are not cut: shorten them, or drop those that are too long": "max_length truncation_mode",
    "the reference's logprobs are always computed once, before training": """
        precompute_ref_log_probs precompute_ref_batch_size""",
    "there is nothing to set": """dataloader_num_workers dataloader_pin_memory dataset_num_proc
        dataloader_persistent_workers dataloader_prefetch_factor remove_unused_columns
        dataloader_multiprocessing_context ds3_gather_for_generation""",
}
"""Fields without an effect on results, separated by spaces, by the text of their alternative."""
NO_EFFECT: Final = {name: text for text, names in _INSTEAD.items() for name in names.split()}


def peer_hint(name: str) -> str | None:
    """Returns a sentence on the equivalent of another framework's setting; None if unknown."""
    if name in PEER_NAMES:
        return f"here it is {PEER_NAMES[name]}"
    return f"leave it out: {NO_EFFECT[name]}" if name in NO_EFFECT else None
