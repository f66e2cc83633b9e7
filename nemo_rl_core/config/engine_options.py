"""Options that a recipe passes to vLLM unchanged."""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.errors import ConfigError

_REMOVE: Final = "remove it"
OWNED: Final[Mapping[str, str]] = {
    **{name: f"set generation.{name}" for name in (
        "block_size", "enforce_eager", "gpu_memory_utilization", "load_format", "max_num_seqs",
        "pipeline_parallel_size", "quantization", "skip_tokenizer_init", "tensor_parallel_size",
    )},
    **dict.fromkeys(("model", "tokenizer", "model_weights"), "set model.name"),
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision"), "set model.revision"),
    "trust_remote_code": "set model.trust_remote_code",
    "hf_token": "set HF_TOKEN in the environment",
    "dtype": "set model.dtype",
    "seed": "set seed",
    "max_model_len": "set data.max_prompt_tokens and generation.max_new_tokens",
    "data_parallel_size": "set generation.num_engines",
    "kv_cache_memory_bytes": "set generation.gpu_memory_utilization",
    # What rollouts, transfers of weights, or the gate rely on.
    **dict.fromkeys((
        "logprobs_mode", "max_logprobs", "logits_processors", "generation_config",
        "override_generation_config", "hf_overrides", "model_class_overrides", "runner", "convert",
        "scheduling_policy", "scheduler_cls", "worker_cls", "worker_extension_cls", "device_ids",
        "distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port",
        "enable_sleep_mode", "enable_chunked_prefill", "disable_log_stats", "enable_lora",
        "weight_transfer_config", "enable_return_routed_experts", "return_sampling_mask",
        "reasoning_parser",
    ), _REMOVE),
}  # fmt: skip
"""The fix for each option of vLLM that a key of recipes or this project itself sets."""


def refuse_engine_options(options: Mapping[str, Any]) -> None:
    """Refuses options that this project sets, and, where vLLM is installed, unknown ones."""
    if owned := [name for name in options if name in OWNED]:
        raise ConfigError(
            f"generation.engine_options: {', '.join(owned)} cannot be passed to vLLM",
            expected="options of vLLM that no key of the recipe and no other part sets",
            got=", ".join(owned),
            fix="; ".join(f"{name}: {OWNED[name]}" for name in owned),
        )
    available = vllm_options() if options else ()
    if available and (unknown := [name for name in options if name not in available]):
        raise unknown_names(
            "generation.engine_options: vLLM has no option",
            unknown,
            available,
            expected="fields of vllm.engine.arg_utils.EngineArgs, such as speculative_config",
            otherwise="see `vllm serve --help=all`; write its options with underscores",
        )


def vllm_options() -> frozenset[str]:
    """Returns the names of vLLM's options, without an import, which takes seconds."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:  # a machine that only plans or starts runs
        return frozenset()
    module = ast.parse((Path(package.origin).parent / "engine/arg_utils.py").read_text("utf-8"))
    (options,) = [
        statement
        for statement in module.body
        if isinstance(statement, ast.ClassDef) and statement.name == "EngineArgs"
    ]
    return frozenset(
        each.target.id
        for each in options.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    )
