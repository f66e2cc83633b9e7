"""Checks a model folder before a run, in seconds, from its JSON files and safetensors headers."""

import logging
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.checkpoints.model_code import (
    UNCHECKED,
    code_files,
    described_config,
    has_tokenizer_code,
    refuse_code,
)
from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.data.pretrained import load_tokenizer, read_model_json, stop_token_ids
from nemo_rl_core.errors import ModelError

_LOG = logging.getLogger(__name__)
_NEEDED: Final = ("config.json", "tokenizer_config.json")
_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SAVE_AGAIN: Final = "save model and tokenizer there again with save_pretrained(folder)"


def check_model_folder(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Refuses a folder that cannot be loaded, as far as its descriptions and headers show.

    Python code that comes with the model is not run; what is then unknown is logged.
    """
    names = sorted(path.name for path in folder.iterdir())
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise ModelError(
                f"the model folder has no {name}",
                expected="a transformers folder with model and tokenizer",
                got=f"{folder}: {', '.join(names[:6]) or 'empty'}",
                fix="save model and tokenizer there with save_pretrained(folder)",
            )
    refuse_code(folder, trust=trust_remote_code, name=str(folder))
    has_code = trust_remote_code and bool(code_files(folder))
    _check_config(folder)
    for name in ("tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        if (folder / name).is_file():
            read_model_json(folder, name)
    if has_code:
        _LOG.warning(
            "unknown before the run, since only workers run the code of %s (%s): %s",
            folder,
            ", ".join(code_files(folder)),
            UNCHECKED,
        )
    if not (has_code and has_tokenizer_code(folder)):
        _check_tokenizer(folder)
    _check_weights(folder, has_code=has_code)


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    values = read_model_json(folder)
    for name in _SIZES:
        size = values.get(name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ModelError(
                f"{path} is not a valid model config",
                expected=f"{name}: an integer of at least 1",
                got=f"{name}: {size!r}"[:100],
                fix="copy the file from the model's source again",
            )
    try:
        described_config(folder)
    # Broad on purpose: transformers raises KeyError, ValueError, TypeError or its own.
    except Exception as error:
        raise ModelError(
            f"{path} is not the config of a model that transformers supports",
            expected="model_type and the sizes of its architecture",
            got=_one_line(error),
            fix="copy the file from the model's source again, or install a transformers version "
            "that supports the model",
        ) from error


def _check_tokenizer(folder: Path) -> None:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    tokenizer = load_tokenizer(folder)
    stop_token_ids(folder, tokenizer)
    rows = read_model_json(folder).get("vocab_size")
    # By the highest id, not by the number of tokens, which may exceed the rows of the embedding: in
    # some models, added tokens that are never read share rows.
    highest = max(tokenizer.get_vocab().values())
    if isinstance(rows, int) and highest >= rows:
        file, described = folder / "tokenizer.json", folder / "tokenizer_config.json"
        raise ModelError(
            f"the tokenizer of {folder} has tokens that the model does not",
            expected=f"ids below {rows}, the vocab_size in {folder / 'config.json'}",
            got=f"ids up to {highest} in {file if file.is_file() else described}",
            fix="copy this model's tokenizer files into the folder",
        )
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
            environment.parse(text or "")
        except TemplateError as error:
            raise ModelError(
                f"the chat template of {folder} cannot be read",
                expected="a jinja template, in chat_template.jinja or tokenizer_config.json",
                got=_one_line(error),
                fix="copy the template from the model's source again",
            ) from error


def _check_weights(folder: Path, *, has_code: bool) -> None:
    from nemo_rl_core.model_files.loading import empty_model
    from nemo_rl_core.model_files.weights import check_folder

    values = read_model_json(folder)
    if list(folder.glob("pytorch_model*.bin")) and not list(folder.glob("*.safetensors")):
        return  # pickles have no headers; they are read with torch's restricted unpickler
    for path in weight_files(folder):
        with open_weights(path):
            pass
    declared = str((values.get("architectures") or ["..."])[0])
    # Quantized weights are stored in other shapes. Stages check the other kinds of heads.
    is_causal = declared.endswith("ForCausalLM")
    if has_code or not is_causal or "quantization_config" in values:
        return
    try:
        model: Any = empty_model(folder, "lm")
    except ModelError:
        raise
    # Broad on purpose: sizes that contradict each other raise errors of torch.
    except Exception as error:
        raise ModelError(
            f"no model can be built from {folder / 'config.json'}",
            expected="sizes that fit together, such as hidden_size and num_attention_heads",
            got=_one_line(error),
            fix="copy the file from the model's source again",
        ) from error
    try:
        check_folder(model, folder)
    except ModelError as error:
        files = weight_files(folder)
        named = files[0] if len(files) == 1 else folder / "model.safetensors.index.json"
        raise ModelError(
            f"{error.problem} ({named} against {folder / 'config.json'})",
            error.expected,
            error.got,
            f"{error.fix or _SAVE_AGAIN}",
        ) from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
