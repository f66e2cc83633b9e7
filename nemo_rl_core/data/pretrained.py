"""The tokenizer of a model folder, and the tokens that end a completion."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning.model_parts import independent_length, longest_sequence, rotary_length

HUB_NAME = "hub_name.json"
"""File of an unchanged copy of a hub's model, with its `base_names`."""
_COMPLETE_IN_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Old and new class names of tokenizers that tokenizer.json defines completely."""
PROCESSORS = ("*processor_config.json", "audio_tokenizer_config.json", "chat_template.json")
"""Files of transformers' processors; a chat template in another file is the tokenizer's."""


def load_tokenizer(model_folder: Path, *, revision: str | None = None) -> Any:
    """Loads the tokenizer of a model folder, of the class that its settings name.

    Args:
        model_folder: Or a name on the hub.
        revision: The commit there; None is the main branch.

    Raises:
        ModelError: If transformers can load no tokenizer from the folder.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        # For some families, such as Qwen2, `AutoTokenizer` uses the family's class regardless of
        # the settings, which would split text differently and drop characters.
        is_whole = _is_complete_in_file(model_folder)
        loader = PreTrainedTokenizerFast if is_whole else AutoTokenizer
        tokenizer = loader.from_pretrained(model_folder, revision=revision or "main")
    # Named fault boundary: damaged files raise errors of transformers, tokenizers or json.
    except Exception as error:
        raise ModelError(
            f"the model folder {model_folder.name!r} has no tokenizer that transformers can load",
            expected="tokenizer.json and tokenizer_config.json beside config.json",
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            fix="save the tokenizer into the same folder: tokenizer.save_pretrained(folder)",
        ) from error
    # From a folder with settings but no vocabulary, transformers builds a tokenizer that has the
    # added tokens and at most one token of its own.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1:
        raise ModelError(
            f"the tokenizer in the model folder {model_folder.name!r} has no vocabulary",
            expected="tokenizer.json (or the vocabulary files of its kind)",
            got=f"{len(tokenizer)} tokens",
            fix="save the tokenizer into the same folder: tokenizer.save_pretrained(folder)",
        )
    return tokenizer


def base_names(folder: Path) -> dict[str, Any]:
    """The fields by which peft loads a model again: name and commit on the hub; None if unknown.

    A path of this machine would change the content hash with the location of the store.
    """
    if (folder / HUB_NAME).is_file():
        return described(folder, HUB_NAME)
    name = revision = None
    if folder.parent.name == "snapshots":  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        revision = folder.name
    return {"base_model_name_or_path": name, "revision": revision}


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of tokens, special ones left out."""
    import numpy as np

    # transformers looks at the type of every element of a list, and at none of an array.
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def _is_complete_in_file(model_folder: Path) -> bool:
    """Returns whether tokenizer.json defines the tokenizer completely; False for a hub name."""
    settings = model_folder / "tokenizer_config.json"
    if not settings.is_file() or not (model_folder / "tokenizer.json").is_file():
        return False
    declared: dict[str, Any] = json.loads(settings.read_text())
    return "auto_map" not in declared and declared.get("tokenizer_class") in _COMPLETE_IN_FILE


def copy_description(source: Path, folder: Path, *, dtype: str | None = None) -> None:
    """Copies all of a model folder except the weights: configs, tokenizer, template, processors.

    Args:
        source: A transformers folder.
        folder: An existing one.
        dtype: The dtype to write into the config; None keeps the source's.

    Raises:
        ModelError: If the source has no tokenizer that transformers can load.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    copy_processors(source, folder)
    generation = source / "generation_config.json"
    if generation.exists():
        shutil.copyfile(generation, folder / generation.name)


def copy_processors(source: Path, folder: Path) -> None:
    """Copies how a model of images, video or sound prepares its inputs, with its chat template."""
    for pattern in PROCESSORS:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def shares_rows(config: Mapping[str, Any]) -> bool:
    """Returns whether sequences can be packed into one row; False for models that read images.

    The position ids of such models have several dimensions, from which transformers does not derive
    sequence boundaries.

    Args:
        config: Contents of `config.json`.
    """
    return "vision_config" not in config


def described(model_folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Reads a JSON file of a model folder.

    Raises:
        ModelError: If it is missing or not a JSON object.
    """
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
    """The longest sequence that the model is made for; see `longest_sequence`."""
    return longest_sequence(_config(model_folder))


def pair_length(model_folder: Path) -> int | None:
    """The longest sequence of a pair, in tokens: pairs are never split over micro-batches."""
    limits = [context_length(model_folder), independent_length(_config(model_folder))]
    return min((limit for limit in limits if limit is not None), default=None)


def sampling_length(model_folder: Path) -> int | None:
    """The longest prompt and completion together, in tokens; None if the config has no length.

    It is the context, or `rotary_length`: while longer sequences are sampled, earlier tokens keep
    keys of other rotary frequencies than they are trained with.
    """
    limits = [context_length(model_folder), rotary_length(_config(model_folder))]
    return min((limit for limit in limits if limit is not None), default=None)


def _config(model_folder: Path) -> Any:
    from transformers import AutoConfig

    described(model_folder)  # whose error names the file
    try:
        return AutoConfig.from_pretrained(model_folder)
    # Named fault boundary: transformers raises KeyError, ValueError, TypeError or its own.
    except Exception as error:
        raise ModelError(
            f"{model_folder / 'config.json'} is not that of a model that transformers knows",
            expected="model_type and the sizes of its architecture",
            got=f"{type(error).__name__}: {error}".splitlines()[0][:200],
            fix="copy the file from the model's source again, or install a transformers that knows "
            "the model",
        ) from error


def stop_token_ids(model_folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a completion, from the tokenizer and the generation config.

    Raises:
        ModelError: If there is none; completions would never end.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = model_folder / name
        declared = described(model_folder, name).get("eos_token_id") if path.exists() else None
        found.update([declared] if isinstance(declared, int) else declared or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise ModelError(
            f"the model {model_folder.name!r} names no end-of-sequence token",
            fix="set tokenizer.eos_token, or eos_token_id in generation_config.json",
        )
    return tuple(sorted(found))
