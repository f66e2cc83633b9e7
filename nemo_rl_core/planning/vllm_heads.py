"""Refuses models that vLLM cannot sample from: by head size on a CPU, and by type.

vLLM's kernels for CPUs are compiled for a few head sizes, and raise at the first prompt of a model
with another size, which in a run is after training. Its source lists sizes, but the kernels accept
more, so a size that is not in the list is tried with the kernels.
"""

import ast
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.errors import ModelError
from nemo_rl_core.telemetry.waiting import waiting

_LOG = logging.getLogger(__name__)
_SOURCE: Final = Path("v1/attention/backends/cpu_attn.py")
_NAMES: Final = ("CPUAttentionBackend", "get_supported_head_sizes")
_MAX_SECONDS: Final = 300.0
# Runs in a separate process, since vLLM's import is slow and has side effects.
_PROBE: Final = """
import json, sys, torch
from nemo_rl_core.backends.generation.vllm_libraries import load_libnuma
load_libnuma()
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
current_platform.import_kernels()
length, begins = torch.tensor([4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
taken = []
for width in map(int, sys.argv[1:]):
    try:
        ops.cpu_attn_get_scheduler_metadata(
            1, 2, 2, width, length, torch.float32, begins, True, -1, "vec", False)
    except RuntimeError:
        continue
    taken.append(width)
print("\\ntaken:", json.dumps(taken))
"""
FIX: Final = "set generation.backend: hf, or use a model with one of these head sizes"


def refuse_heads_on_cpu(config: Mapping[str, Any], *, called: str, fix: str = FIX) -> None:
    """Refuses a model whose head size vLLM does not support on a CPU.

    Refuses nothing if vLLM, its list of sizes or the model's head size is unknown, or if the
    kernels cannot be tried, because they accept more sizes than the list.
    """
    listed, width = listed_head_sizes(), head_size(config)
    if width is None or not listed or width in listed:
        return
    supported = head_sizes_of_kernels(width)
    if width in supported or not supported:
        return
    text = _text_config(config)
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    origin = f"hidden_size {hidden} / num_attention_heads {heads}"
    raise ModelError(
        f"vLLM cannot sample from {called} on a CPU: it does not support the size of its attention "
        "heads there",
        expected=f"a head_dim of {', '.join(map(str, supported[:-1]))} or {supported[-1]}",
        got=f"head_dim {width}" + ("" if text.get("head_dim") else f", which is {origin}"),
        fix=fix,
    )


def head_size(config: Mapping[str, Any]) -> int | None:
    """Returns the head size; None if the config does not have it, or keys are compressed."""
    text = _text_config(config)
    if text.get("kv_lora_rank"):  # other kernels, with other sizes
        return None
    if isinstance(explicit := text.get("head_dim"), int) and explicit > 0:
        return explicit
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None
    return hidden // heads


@cache
def head_sizes_of_kernels(width: int) -> Sequence[int]:
    """Returns the head sizes that vLLM's kernels accept; empty if they cannot be tried."""
    widths = sorted({width, *range(8, 513, 8)})
    command = [sys.executable, "-c", _PROBE, *map(str, widths)]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    try:
        with waiting("asking vLLM for the attention head sizes that it supports"):
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_MAX_SECONDS,
                check=True,
            )
        # If none is accepted, the function itself has changed, and sizes remain unknown.
        return tuple(json.loads(done.stdout.rpartition("taken:")[2]))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _LOG.warning(
            "whether vLLM supports attention heads of size %d on this CPU is unknown until it "
            "samples: its kernels could not be tried (%s)",
            width,
            type(error).__name__,
        )
        _LOG.debug("vLLM's kernels could not be tried: %s", error)
        return ()


@cache
def listed_head_sizes() -> Sequence[int]:
    """Returns the head sizes that the installed vLLM lists; empty without vLLM or a list.

    Reads vLLM's source, since importing it takes longer than all other checks of a recipe.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return ()
    try:
        tree = ast.parse((Path(spec.origin).parent / _SOURCE).read_text())
    except (OSError, SyntaxError):
        return ()
    return _listed(tree, *_NAMES)


def _listed(tree: ast.Module, kind: str, method: str) -> Sequence[int]:
    for section in tree.body:
        if isinstance(section, ast.ClassDef) and section.name == kind:
            for part in section.body:
                if isinstance(part, ast.FunctionDef) and part.name == method:
                    return _returned(part.body[-1])
    return ()


def _returned(statement: ast.stmt) -> Sequence[int]:
    if not isinstance(statement, ast.Return) or statement.value is None:
        return ()
    try:
        values = ast.literal_eval(statement.value)
    except ValueError:
        return ()
    is_list = isinstance(values, list) and all(isinstance(each, int) for each in values)
    return tuple(sorted(values)) if is_list else ()


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or config


# `python -m tests.type_engines` measures these types.
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
    """Refuses types of models that vLLM cannot sample from or cannot load new weights into."""
    kind = str(config.get("model_type"))
    reason = "vLLM has no class for it" if kind in _UNKNOWN else None
    reason = reason or (_NEW_WEIGHTS.get(kind) if is_trained else None)
    reason = reason or (None if has_gpu else _ON_CPU.get(kind))
    if reason is not None:
        raise ModelError(
            f"vLLM cannot sample from {called}",
            expected="a model_type that vLLM supports here, with new weights in training",
            got=f"model_type {kind}: {reason}",
            fix=fix,
        )
