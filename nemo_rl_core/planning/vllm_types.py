"""Types of models that the installed vLLM cannot sample from, or not as a trainer's engine.

`python -m tests.type_engines` measures them. What depends on sizes is refused when an engine
starts.
"""

from collections.abc import Mapping
from typing import Any, Final

from nemo_rl_core.errors import ModelError

_STATE: Final = "vLLM has the kernel of its state-space layers for GPUs only"
_SPARSE: Final = "vLLM has sparse attention for GPUs only"
_ON_CPU: Final = {
    "deepseek_v32": _SPARSE,
    "falcon_mamba": _STATE,
    "glm_moe_dsa": _SPARSE,
    "jamba": _STATE,
    "mamba": _STATE,
}
_UNKNOWN: Final = (
    *("bamba", "bart", "bert", "big_bird", "bigbird_pegasus", "blenderbot"),
    *("blenderbot-small", "camembert", "codegen", "data2vec-text", "diffllama", "electra", "ernie"),
    *("gpt_neo", "gpt_neox_japanese", "marian", "mbart", "megatron-bert", "minimax"),
    *("modernbert-decoder", "mpt", "mvp", "openai-gpt", "pegasus", "plbart", "qwen3_5_moe_text"),
    *("qwen3_5_text", "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roformer"),
    *("trocr", "whisper", "xglm", "xlm-roberta", "xlm-roberta-xl"),
)
_NEW_WEIGHTS: Final = {
    "bert-generation": "vLLM does not load a new bias of its head",
    "gpt_oss": "vLLM does not load new weights into its experts",
}


def refuse_type(
    config: Mapping[str, Any], *, called: str, fix: str, has_gpu: bool, is_trained: bool
) -> None:
    """Refuses a model of a type that vLLM cannot sample from.

    Args:
        config: Contents of `config.json`.
        called: Name of the model in the message.
        fix: Advice in the message.
        has_gpu: Whether the engine computes on a GPU.
        is_trained: Whether the engine gets new weights.

    Raises:
        ModelError: Gives the reason.
    """
    kind = str(config.get("model_type"))
    reason = "vLLM has no class that computes it" if kind in _UNKNOWN else None
    reason = reason or (_NEW_WEIGHTS.get(kind) if is_trained else None)
    reason = reason or (None if has_gpu else _ON_CPU.get(kind))
    if reason is not None:
        raise ModelError(
            f"vLLM cannot sample from {called}",
            expected="a model_type that vLLM computes here, with new weights in training",
            got=f"model_type {kind}: {reason}",
            fix=fix,
        )
