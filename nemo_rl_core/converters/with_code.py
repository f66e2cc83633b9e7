"""Copies a model with Python code as a float32 folder, without running the code."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.checkpoints.model_code import copy_code, has_tokenizer_code
from nemo_rl_core.checkpoints.tensors import save_weights
from nemo_rl_core.checkpoints.weight_files import stored_tensors
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.data.pretrained import copy_processors, load_tokenizer, read_model_json
from nemo_rl_core.data.tokenizer_process import TokenizerProcess

if TYPE_CHECKING:
    from torch import Tensor


def copy_with_code(source: Path, target: Path) -> tuple[int, Any]:
    """Writes configs, code and weights; returns the number of weights, and the tokenizer.

    The workers that load the copy check that the weights are those of the model.
    """
    from nemo_rl_core.model_files.quantized import refuse_quantized

    refuse_quantized(source)
    target.mkdir(parents=True, exist_ok=True)
    config = read_model_json(source)
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    copy_code(source, target)
    copy_processors(source, target)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", target / "generation_config.json")
    count = 0

    def in_float32() -> "Iterator[tuple[str, Tensor]]":
        nonlocal count
        for name, tensor in stored_tensors(source):
            require_finite(f"the model {source.name!r}", [(name, tensor)])
            count += tensor.numel()
            yield name, tensor.float() if tensor.is_floating_point() else tensor

    save_weights(target, in_float32())
    if has_tokenizer_code(source):
        return count, TokenizerProcess(source)  # not a shared one, since its template may change
    return count, load_tokenizer(source)
