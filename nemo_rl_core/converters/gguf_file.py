"""A model as one GGUF file, which llama.cpp, Ollama and LM Studio run.

The names of tensors and keys are those of the package `gguf`. Weights are written as they are
stored, in float32, float16 or bfloat16; quantization is llama.cpp's own (`llama-quantize`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from nemo_rl_core.converters.folders import StoredWeights, require_folder
from nemo_rl_core.converters.gguf_tokens import GGUFTokens, read_tokens
from nemo_rl_core.data.pretrained import described, load_tokenizer
from nemo_rl_core.errors import ModelError, StoreError
from nemo_rl_core.store.files import discard

GGUFType = Literal["float32", "float16", "bfloat16"]

_ARCHITECTURES: Final = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
_BIAS: Final = ".bias"


def write_gguf(model_folder: Path, target: Path, *, dtype: GGUFType = "float32") -> int:
    """Writes config, tokenizer and weights of a transformers folder into one file.

    Args:
        model_folder: A Llama or Qwen2 model with a byte-level tokenizer.
        target: A file that does not exist yet.
        dtype: Type of the matrices; vectors are always float32, as llama.cpp computes with them.

    Returns:
        The number of tensors.

    Raises:
        ModelError: If the architecture, its position encoding or its tokenizer has no place in the
            file, or the weights are not those of the config.
        StoreError: If the target exists, or writing fails.
    """
    import gguf

    require_folder(model_folder, "config.json")
    architecture = _architecture(model_folder)
    if target.exists():
        raise StoreError(
            f"{target} exists", expected="a new file", fix="remove it, or name another"
        )
    tokens = read_tokens(model_folder, load_tokenizer(model_folder))
    part = target.with_name(target.name + ".part")
    writer = gguf.GGUFWriter(part, architecture)
    try:
        _add_config(writer, model_folder, tokens)
        _add_tokens(writer, tokens)
        count = 0
        for name, tensor in _tensors(model_folder, architecture):
            _add_tensor(writer, name, tensor, dtype)
            count += 1
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.rename(target)
    except OSError as error:
        raise StoreError(
            f"{target} cannot be written", got=error.strerror or str(error),
            fix="free disk, or name another folder",
        ) from error  # fmt: skip
    finally:
        discard(part)
    return count


def _architecture(folder: Path) -> str:
    declared = described(folder).get("architectures") or []
    known = _ARCHITECTURES.get(str(declared[0])) if declared else None
    if known is None:
        raise ModelError(
            f"the architecture of {folder.name!r} is not written to GGUF here",
            expected=f"one of {', '.join(_ARCHITECTURES)} in {folder / 'config.json'}",
            got=", ".join(map(str, declared)) or "none",
            fix="convert the folder with llama.cpp's convert_hf_to_gguf.py",
        )
    return known


def _add_config(writer: Any, folder: Path, tokens: GGUFTokens) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    positions: dict[str, Any] = dict(config.rope_parameters or {})
    if positions.get("rope_type", "default") != "default":
        raise ModelError(
            f"the scaled position encoding of {folder.name!r} is not written to GGUF here",
            expected="rope_type: default in config.json",
            got=str(positions["rope_type"]),
            fix="convert the folder with llama.cpp's convert_hf_to_gguf.py",
        )
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    writer.add_name(folder.parent.name if folder.name == "model" else folder.name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(positions.get("rope_theta", 10_000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if len(tokens.texts) > config.vocab_size:
        raise ModelError(
            f"the tokenizer of {folder.name!r} has tokens that the model does not",
            expected=f"{config.vocab_size} tokens at most (vocab_size in config.json)",
            got=str(len(tokens.texts)),
            fix="name a folder whose tokenizer belongs to its model",
        )
    # Rows beyond the tokenizer's need a text each.
    tokens.pad(config.vocab_size)


def _add_tokens(writer: Any, tokens: GGUFTokens) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens.pre_tokenizer)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.types)
    writer.add_token_merges(tokens.merges)
    for name, token_id in tokens.special.items():
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(tokens.adds_bos)
    if tokens.chat_template:
        writer.add_chat_template(tokens.chat_template)


def _tensors(folder: Path, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by their names in GGUF, heads in the order that llama.cpp expects."""
    import gguf

    config = described(folder)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    stored = StoredWeights(folder)
    for name in stored.names:
        new = names.get_name(name, try_suffixes=(".weight", _BIAS))
        if new is None:
            raise ModelError(
                f"the weight {name!r} of {folder.name!r} has no name in GGUF",
                expected=f"the weights of a {architecture} model",
                fix="convert the folder with llama.cpp's convert_hf_to_gguf.py",
            )
        tensor = stored.read(name)
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            tensor = _interleaved(tensor, config.get(heads, config["num_attention_heads"]))
        yield new, tensor


def _interleaved(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head in llama.cpp's order of rotated pairs: neighbours, not halves."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: Any, name: str, tensor: torch.Tensor, dtype: GGUFType) -> None:
    import gguf

    if tensor.dim() < 2 or dtype == "float32":
        writer.add_tensor(name, tensor.float().numpy())
    elif dtype == "float16":
        writer.add_tensor(name, tensor.half().numpy())
    else:
        data = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(
            name, np.ascontiguousarray(data), raw_dtype=gguf.GGMLQuantizationType.BF16
        )


def described_file(path: Path) -> str:
    """One line of what a GGUF file holds."""
    import gguf

    reader = gguf.GGUFReader(path)
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    name = json.dumps(reader.fields["general.architecture"].contents())
    return f"{len(reader.tensors)} tensors of a {name} in {', '.join(types)}"
