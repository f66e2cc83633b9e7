"""Tokenizer, limits and stop tokens of a model folder."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.model_code import (
    code_options,
    described_config,
    has_tokenizer_code,
    is_trusted,
    not_run_here,
    tokenizer_needs_code,
)
from nemo_rl_core.config.model import ModelSource
from nemo_rl_core.data.tokenizer_process import tokenizer_with_code
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.planning.model_parts import independent_length, longest_sequence, rotary_length

HUB_NAME = "hub_name.json"
"""File with the `base_names` of an unchanged copy of a hub model."""
_COMPLETE_IN_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Old and new class names of tokenizers that are completely defined by tokenizer.json."""
PROCESSORS = ("*processor_config.json", "audio_tokenizer_config.json", "chat_template.json")
"""Files of transformers processors; a chat template in another file belongs to the tokenizer."""


def load_tokenizer(model_folder: Path, *, revision: str | None = None) -> Any:
    """Loads the tokenizer of a model folder with the class that its settings name.

    Args:
        model_folder: Folder of the model, or a name on the hub.
        revision: Commit on the hub; None for the main branch.

    Raises:
        ModelError: If transformers cannot load a tokenizer from the folder.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if tokenizer_needs_code(model_folder) and not is_trusted(model_folder):
        raise not_run_here(model_folder)
    try:
        # For some families, such as Qwen2, `AutoTokenizer` ignores the class in the settings, and
        # the family's class would split text differently and drop characters.
        is_complete = _is_complete_in_file(model_folder)
        if has_tokenizer_code(model_folder) and is_trusted(model_folder):
            tokenizer = tokenizer_with_code(model_folder)
        elif is_complete:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                model_folder, revision=revision or "main", trust_remote_code=False
            )
    # Fault boundary: damaged files raise errors of transformers, tokenizers or json.
    except Exception as error:
        raise ModelError(
            f"the model folder {model_folder.name!r} has no tokenizer that transformers can load",
            expected="tokenizer.json and tokenizer_config.json next to config.json",
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            fix="save the tokenizer into the same folder: tokenizer.save_pretrained(folder)",
        ) from error
    # From a folder with settings but no vocabulary, transformers builds a tokenizer with only the
    # added tokens and at most one other.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1:
        raise ModelError(
            f"the tokenizer in the model folder {model_folder.name!r} has no vocabulary",
            expected="tokenizer.json (or the vocabulary files of its kind)",
            got=f"{len(tokenizer)} tokens",
            fix="save the tokenizer into the same folder: tokenizer.save_pretrained(folder)",
        )
    return tokenizer


def base_names(folder: Path) -> dict[str, Any]:
    """Returns the fields by which peft identifies a base model: hub name and commit, or None.

    A local path would make the content hash depend on the location of the store.
    """
    if (folder / HUB_NAME).is_file():
        return read_model_json(folder, HUB_NAME)
    name = revision = None
    if folder.parent.name == "snapshots":  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        revision = folder.name
    return {"base_model_name_or_path": name, "revision": revision}


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Returns the text of tokens without special tokens."""
    import numpy as np

    # transformers checks the type of every element of a list, but not of an array.
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def _is_complete_in_file(model_folder: Path) -> bool:
    """Whether tokenizer.json defines the tokenizer completely; False for a hub name."""
    settings = model_folder / "tokenizer_config.json"
    if not settings.is_file() or not (model_folder / "tokenizer.json").is_file():
        return False
    declared: dict[str, Any] = json.loads(settings.read_text())
    return "auto_map" not in declared and declared.get("tokenizer_class") in _COMPLETE_IN_FILE


def copy_description(source: Path, folder: Path, *, dtype: str | None = None) -> None:
    """Copies all of a model folder except the weights: configs, tokenizer, template, processors.

    Args:
        dtype: Dtype to write into the config; None keeps that of the source.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, **code_options(source))
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    copy_processors(source, folder)
    generation = source / "generation_config.json"
    if generation.exists():
        shutil.copyfile(generation, folder / generation.name)


def copy_processors(source: Path, folder: Path) -> None:
    """Copies the processor files of a multimodal model, with its chat template."""
    for pattern in PROCESSORS:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def shares_rows(config: Mapping[str, Any]) -> bool:
    """Whether sequences can be packed into one row; False for models that read images.

    The position ids of such models have several dimensions, from which transformers does not derive
    sequence boundaries.

    Args:
        config: Content of `config.json`.
    """
    return "vision_config" not in config


def read_model_json(model_folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Reads a JSON file of a model folder."""
    path = model_folder / name
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"the model's {path} cannot be read",
            expected="a JSON object",
            got=f"{type(error).__name__}: {error}"[:200],
            fix="save the model again with save_pretrained, or copy the file again",
        ) from error


def context_length(model_folder: Path) -> int | None:
    """Returns the maximum sequence length of the model in tokens; see `longest_sequence`."""
    return longest_sequence(_config(model_folder))


def pair_length(model_folder: Path) -> int | None:
    """Returns the maximum sequence length in a pair, which is never split over micro-batches."""
    limits = [context_length(model_folder), independent_length(_config(model_folder))]
    return min((limit for limit in limits if limit is not None), default=None)


def sampling_length(model_folder: Path) -> int | None:
    """Returns the maximum tokens of prompt and completion; None if the config has no length.

    It is the context or, if smaller, `rotary_length`: in longer sampled sequences, earlier tokens
    keep keys with other rotary frequencies than in training.
    """
    limits = [context_length(model_folder), rotary_length(_config(model_folder))]
    return min((limit for limit in limits if limit is not None), default=None)


def _config(model_folder: Path) -> Any:
    read_model_json(model_folder)  # its error names the file
    try:
        return described_config(model_folder)
    # Fault boundary: transformers raises KeyError, ValueError, TypeError or its own classes.
    except Exception as error:
        raise ModelError(
            f"{model_folder / 'config.json'} does not describe a model that transformers supports",
            expected="model_type and the sizes of its architecture",
            got=f"{type(error).__name__}: {error}".splitlines()[0][:200],
            fix="copy the file from the model's source again, or install a version of transformers "
            "that supports the model",
        ) from error


def stop_token_ids(model_folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Returns token ids that end a completion, from the tokenizer and the generation config."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = model_folder / name
        declared = (
            read_model_json(model_folder, name).get("eos_token_id") if path.exists() else None
        )
        ids.update([declared] if isinstance(declared, int) else declared or [])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if not ids:
        raise ModelError(
            f"the model {model_folder.name!r} has no end-of-sequence token",
            fix="set tokenizer.eos_token, or eos_token_id in generation_config.json",
        )
    return tuple(sorted(ids))


def set_template(tokenizer: Any, model: ModelSource) -> None:
    """Stores a recipe's date, tool parser and chat template variables in the tokenizer.

    The variables become defaults in the first lines of the template: a caller that passes none gets
    the recipe's values, and a caller may pass others.
    """
    tokenizer.init_kwargs = {**tokenizer.init_kwargs, "template_date": model.template_date}
    if model.tool_parser:
        tokenizer.init_kwargs["tool_parser"] = model.tool_parser
    variables = model.chat_template_kwargs
    if not variables:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigError(
            "model.chat_template_kwargs needs a chat template",
            got="several templates" if template else "a tokenizer without one",
            fix="use a chat model, or remove chat_template_kwargs",
        )
    unread = [name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)]
    if unread:
        raise ConfigError(
            "the chat template does not read a variable of model.chat_template_kwargs",
            got=", ".join(unread),
            fix="use the names in the template, or remove these variables",
        )
    # On separate lines, since the template may begin with white space that jinja strips.
    tokenizer.chat_template = "".join(map(_template_line, variables, variables.values())) + template


def _template_line(name: str, value: bool | float | str) -> str:
    test = f"{{%- if {name} is not defined %}}"
    return f"{test}{{%- set {name} = {json.dumps(value, ensure_ascii=False)} %}}{{%- endif %}}\n"
