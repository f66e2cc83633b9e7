"""Checks of a model folder before a run begins: from its descriptions and headers, in seconds.

No weight is read here. Whether weights are finite is checked where they are read.
"""

from pathlib import Path
from typing import Any, Final

from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.data.pretrained import described, load_tokenizer, stop_token_ids
from nemo_rl_core.errors import ModelError

_NEEDED: Final = ("config.json", "tokenizer_config.json")
_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SAVE_AGAIN: Final = "save model and tokenizer there again with save_pretrained(folder)"


def check_model_folder(folder: Path) -> None:
    """Refuses a folder that could not be loaded, as far as its files show without being read.

    Args:
        folder: In the transformers layout.

    Raises:
        ModelError: Names the file, what was expected of it, and the fix.
    """
    found = sorted(path.name for path in folder.iterdir())
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise ModelError(
                f"the model folder has no {name}",
                expected="a transformers folder with model and tokenizer",
                got=f"{folder}: {', '.join(found[:6]) or 'empty'}",
                fix="save model and tokenizer there with save_pretrained(folder)",
            )
    _check_config(folder)
    for name in ("tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        if (folder / name).is_file():
            described(folder, name)
    _check_tokenizer(folder)
    _check_weights(folder)


def _check_config(folder: Path) -> None:
    from transformers import AutoConfig

    path = folder / "config.json"
    values = described(folder)
    for name in _SIZES:
        size = values.get(name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ModelError(
                f"{path} is not that of a model",
                expected=f"{name}: a whole number of at least 1",
                got=f"{name}: {size!r}"[:100],
                fix="copy the file from the model's source again",
            )
    try:
        AutoConfig.from_pretrained(folder)
    # Named fault boundary: transformers raises KeyError, ValueError, TypeError or its own.
    except Exception as error:
        raise ModelError(
            f"{path} is not that of a model that transformers knows",
            expected="model_type and the sizes of its architecture",
            got=_in_a_line(error),
            fix="copy the file from the model's source again, or install a transformers that knows "
            "the model",
        ) from error


def _check_tokenizer(folder: Path) -> None:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    tokenizer = load_tokenizer(folder)
    stop_token_ids(folder, tokenizer)
    rows = described(folder).get("vocab_size")
    # Some models share the rows of added tokens that they never read.
    highest = max(tokenizer.get_vocab().values())
    if isinstance(rows, int) and highest >= rows:
        raise ModelError(
            f"the tokenizer of {folder} has tokens that the model does not",
            expected=f"ids below {rows}, the vocab_size in {folder / 'config.json'}",
            got=f"ids up to {highest} in {_tokenizer_file(folder)}",
            fix="copy the tokenizer's files of this model into the folder",
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
                got=_in_a_line(error),
                fix="copy the template from the model's source again",
            ) from error


def _tokenizer_file(folder: Path) -> Path:
    whole = folder / "tokenizer.json"
    return whole if whole.is_file() else folder / "tokenizer_config.json"


def _check_weights(folder: Path) -> None:
    from nemo_rl_core.backends.training.dtensor.loading import empty_model
    from nemo_rl_core.backends.training.dtensor.matching import check_folder

    values = described(folder)
    if list(folder.glob("pytorch_model*.bin")) and not list(folder.glob("*.safetensors")):
        return  # pickles have no headers; they are read with torch's restricted unpickler
    for path in weight_files(folder):
        with open_weights(path):
            pass
    declared = str((values.get("architectures") or ["..."])[0])
    # Stored forms of quantized weights have other shapes; other heads are checked by their stages.
    if not declared.endswith("ForCausalLM") or "quantization_config" in values:
        return
    try:
        model: Any = empty_model(folder, "lm")
    except ModelError:
        raise
    # Named fault boundary: sizes that contradict each other raise errors of torch.
    except Exception as error:
        raise ModelError(
            f"no model can be made from {folder / 'config.json'}",
            expected="sizes that fit each other, as of hidden_size and num_attention_heads",
            got=_in_a_line(error),
            fix="copy the file from the model's source again",
        ) from error
    try:
        check_folder(model, folder)
    except ModelError as error:
        raise ModelError(
            f"{error.problem} ({_weights_file(folder)} against {folder / 'config.json'})",
            error.expected,
            error.got,
            f"{error.fix or _SAVE_AGAIN}",
        ) from error


def _weights_file(folder: Path) -> Path:
    files = weight_files(folder)
    return files[0] if len(files) == 1 else folder / "model.safetensors.index.json"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
