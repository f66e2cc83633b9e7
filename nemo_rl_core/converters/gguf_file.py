"""Writes a model as one GGUF file, which llama.cpp, Ollama and LM Studio run.

The package `gguf` defines the names of tensors and keys. Weights are written in float32, float16 or
bfloat16; for quantization, use llama.cpp's `llama-quantize`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from nemo_rl_core.checkpoints.model_code import refuse_conversion
from nemo_rl_core.converters.folders import StoredWeights, require_folder
from nemo_rl_core.data.pretrained import load_tokenizer, read_model_json
from nemo_rl_core.errors import ModelError, StoreError
from nemo_rl_core.store.files import discard

_SPLITS: Final = {
    "gpt-2": [{"type": "ByteLevel", "use_regex": True}],
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "use_regex": True},
    ],
    "qwen2": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
        },
        {"type": "ByteLevel", "use_regex": False},
    ],
}
"""GGUF's names of the rules that split text before merges, with the steps in tokenizer.json. Only
tokenizers with one of these rules can be written."""
_READ: Final = {"type", "individual_digits", "pattern", "use_regex"}

_NO_TEXT: Final = "\u00ff"
"""The byte 0xff in GPT-2's alphabet, which no UTF-8 text has."""

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def _texts_and_types(tokenizer: Any, state: dict[str, Any]) -> tuple[list[str], list[int]]:
    by_id = {token_id: text for text, token_id in tokenizer.get_vocab().items()}
    added = {each["id"]: each for each in state["added_tokens"]}
    special = {*tokenizer.all_special_ids}
    texts, types = [], []
    for token_id in range(max(by_id) + 1):
        text = by_id.get(token_id)
        if text is None:
            texts.append(f"[PAD{token_id}]")
            types.append(_UNUSED)
        elif token_id in special or added.get(token_id, {}).get("special"):
            texts.append(text)
            types.append(_CONTROL)
        else:
            texts.append(text)
            types.append(_USER_DEFINED if token_id in added else _NORMAL)
    return texts, types


def _pre_tokenizer(folder: Path, state: dict[str, Any]) -> str:
    model, splitter = state["model"], state["pre_tokenizer"] or {}
    steps = splitter.get("pretokenizers") or [splitter]
    is_byte_level = any(each.get("type") == "ByteLevel" for each in steps)
    is_byte_level = is_byte_level and model["type"] == "BPE" and bool(model["merges"])
    if is_byte_level and {*"".join("".join(pair) for pair in model["merges"])} == {_NO_TEXT}:
        return "gpt-2"  # nothing is ever merged, so splits make no difference
    read = [{key: value for key, value in step.items() if key in _READ} for step in steps]
    rule = next((name for name, split in _SPLITS.items() if split == read), None)
    if is_byte_level and rule is not None:
        return rule
    raise ModelError(
        f"the tokenizer of {folder.name!r} cannot be written to GGUF here",
        expected=f"byte-level BPE that splits text like one of {', '.join(_SPLITS)}, in "
        f"{folder / 'tokenizer.json'}",
        got=f"{model['type']}, {' and '.join(str(each.get('type')) for each in steps)}",
        fix="convert the folder with llama.cpp's convert_hf_to_gguf.py; for the small model, train "
        "model: {kind: text_from_config}, which has such a tokenizer",
    )


GGUFType = Literal["float32", "float16", "bfloat16"]

_ARCHITECTURES: Final = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
_BIAS: Final = ".bias"


def write_gguf(model_folder: Path, target: Path, *, dtype: GGUFType = "float32") -> int:
    """Writes a model and its tokenizer into one file; returns the number of tensors.

    Args:
        model_folder: A Llama or Qwen2 model with a byte-level tokenizer.
        dtype: Dtype of the matrices; vectors are always float32, as llama.cpp requires.
    """
    import gguf

    require_folder(model_folder, "config.json")
    refuse_conversion(model_folder)
    architecture = _architecture(model_folder)
    if target.exists():
        raise StoreError(
            f"{target} exists", expected="a new file", fix="remove it, or name another file"
        )
    part = target.with_name(target.name + ".part")
    writer = gguf.GGUFWriter(part, architecture)
    try:
        num_rows = _add_config(writer, model_folder)
        _add_tokens(writer, model_folder, num_rows)
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
            fix="free some disk space, or name another folder",
        ) from error  # fmt: skip
    finally:
        discard(part)
    return count


def _architecture(folder: Path) -> str:
    declared = read_model_json(folder).get("architectures") or []
    architecture = _ARCHITECTURES.get(str(declared[0])) if declared else None
    if architecture is None:
        raise ModelError(
            f"the architecture of {folder.name!r} cannot be written to GGUF here",
            expected=f"one of {', '.join(_ARCHITECTURES)} in {folder / 'config.json'}",
            got=", ".join(map(str, declared)) or "none",
            fix="convert the folder with llama.cpp's convert_hf_to_gguf.py",
        )
    return architecture


def _add_config(writer: Any, folder: Path) -> int:
    """Adds the sizes of a model; returns the number of rows of its vocabulary."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    positions: dict[str, Any] = dict(config.rope_parameters or {})
    if positions.get("rope_type", "default") != "default":
        raise ModelError(
            f"the scaled position encoding of {folder.name!r} cannot be written to GGUF here",
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
    return int(config.vocab_size)


def _add_tokens(writer: Any, folder: Path, num_rows: int) -> None:
    """Adds a byte-level BPE tokenizer of transformers; refuses other kinds."""
    tokenizer = load_tokenizer(folder)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(folder, state))
    texts, types = _texts_and_types(tokenizer, state)
    if len(texts) > num_rows:
        raise ModelError(
            f"the tokenizer of {folder.name!r} has tokens that the model does not",
            expected=f"{num_rows} tokens at most (vocab_size in config.json)",
            got=str(len(texts)),
            fix="name a folder whose tokenizer belongs to its model",
        )
    # Padding rows of the vocabulary need placeholder tokens.
    padding = range(len(texts), num_rows)
    writer.add_token_list([*texts, *(f"[PAD{row}]" for row in padding)])
    writer.add_token_types([*types, *(_UNUSED for _ in padding)])
    merges = state["model"].get("merges") or []
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    for name in ("bos", "eos", "pad", "unk"):
        if (token_id := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(tokenizer("1")["input_ids"][:1] == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(folder: Path, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors by their GGUF names, with heads in the order that llama.cpp expects."""
    import gguf

    config = read_model_json(folder)
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
    """Reorders each head's rows: rotated pairs become neighbors instead of halves."""
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
    """Describes the content of a GGUF file in one line."""
    import gguf

    reader = gguf.GGUFReader(path)
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    name = json.dumps(reader.fields["general.architecture"].contents())
    return f"{len(reader.tensors)} tensors of a {name} in {', '.join(types)}"
