"""The widths of attention heads that vLLM computes with on a CPU.

Its kernels are compiled for a few widths, and raise at the first prompt of a model with another,
which in a run is after training. vLLM's source lists widths, but not all that its kernels take, so
a width outside of the list is tried with the kernels. On GPUs other kernels take other widths;
nothing is refused there.
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
# A process of its own, since vLLM's import is slow and changes the process.
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
FIX: Final = "set generation.backend: hf, or take a model with heads of one of these widths"


def refuse_heads_on_cpu(config: Mapping[str, Any], *, called: str, fix: str = FIX) -> None:
    """Refuses a model whose heads vLLM's attention on a CPU cannot compute.

    Nothing is refused where vLLM, its list of widths or the model's width is not known, or where
    its kernels cannot be asked: the list lacks widths that they take.

    Args:
        config: A transformers config.json, read.
        called: The model, as the error names it.
        fix: What to do instead.

    Raises:
        ModelError: Names the width, where it comes from, and those that vLLM takes.
    """
    listed, width = listed_head_sizes(), head_size(config)
    if width is None or not listed or width in listed:
        return
    taken = head_sizes_of_kernels(width)
    if width in taken or not taken:
        return
    text = _text_config(config)
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    said = f"hidden_size {hidden} / num_attention_heads {heads}"
    raise ModelError(
        f"vLLM cannot sample from {called} on a CPU: its attention heads have a width that vLLM "
        "does not compute there",
        expected=f"a head_dim of {', '.join(map(str, taken[:-1]))} or {taken[-1]}",
        got=f"head_dim {width}" + ("" if text.get("head_dim") else f", which is {said}"),
        fix=fix,
    )


def head_size(config: Mapping[str, Any]) -> int | None:
    """The width of a head; None where the config does not say it, or keys are compressed.

    Args:
        config: A transformers config.json, read.
    """
    text = _text_config(config)
    if text.get("kv_lora_rank"):  # computed by other kernels, at other widths
        return None
    if isinstance(own := text.get("head_dim"), int) and own > 0:
        return own
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return None
    return hidden // heads


@cache
def head_sizes_of_kernels(width: int) -> Sequence[int]:
    """The widths that vLLM's kernels take; none where they cannot be asked.

    Args:
        width: Tried besides every multiple of 8 up to 512.
    """
    widths = sorted({width, *range(8, 513, 8)})
    command = [sys.executable, "-c", _PROBE, *map(str, widths)]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    try:
        with waiting("asking vLLM for the widths of attention heads that it computes"):
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_MAX_SECONDS,
                check=True,
            )
        # None taken: the call itself has changed, and says nothing of widths.
        return tuple(json.loads(done.stdout.rpartition("taken:")[2]))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _LOG.warning(
            "whether vLLM computes attention heads of a width of %d on this CPU is not known until "
            "it samples: its kernels could not be asked (%s)",
            width,
            type(error).__name__,
        )
        _LOG.debug("vLLM's kernels were not asked: %s", error)
        return ()


@cache
def listed_head_sizes() -> Sequence[int]:
    """The widths that the installed vLLM lists; none where there is no vLLM, or no list.

    Its source is read, since an import of vLLM takes longer than all other checks of a recipe.
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
    """What the method of a class returns, if that is a list of whole numbers."""
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
