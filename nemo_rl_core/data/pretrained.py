"""The tokenizer of a model folder, and the tokens that end a completion."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ModelError

_WHOLE_IN_ITS_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes, by their old name and their new one, of a tokenizer that tokenizer.json says all of."""


def load_tokenizer(model_folder: Path) -> Any:
    """The tokenizer that lies in a model folder, of the class that its settings name.

    Raises:
        ModelError: If there is none that transformers can load.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        # Beside the config of some families, such as Qwen2, `AutoTokenizer` takes the family's
        # class whatever the settings say: it would split texts, and drop characters, as that does.
        is_whole = _is_whole_in_its_file(model_folder)
        loader = PreTrainedTokenizerFast if is_whole else AutoTokenizer
        tokenizer = loader.from_pretrained(model_folder)
    # Named fault boundary: damaged files fail in transformers, tokenizers or json, each in its way.
    except Exception as error:
        raise ModelError(
            f"the model folder {model_folder.name!r} has no tokenizer that transformers can load",
            expected="tokenizer.json and tokenizer_config.json beside config.json",
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            fix="save the tokenizer into the same folder: tokenizer.save_pretrained(folder)",
        ) from error
    # Of a folder that has settings but no vocabulary, transformers makes a tokenizer that knows the
    # added tokens, and at most one of its own.
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1:
        raise ModelError(
            f"the tokenizer in the model folder {model_folder.name!r} knows no words",
            expected="tokenizer.json (or the vocabulary files of its kind)",
            got=f"{len(tokenizer)} tokens",
            fix="save the tokenizer into the same folder: tokenizer.save_pretrained(folder)",
        )
    return tokenizer


def _is_whole_in_its_file(model_folder: Path) -> bool:
    """Not so for a hub name: what AutoTokenizer makes of that is what its users know."""
    settings = model_folder / "tokenizer_config.json"
    if not settings.is_file() or not (model_folder / "tokenizer.json").is_file():
        return False
    declared: dict[str, Any] = json.loads(settings.read_text())
    return "auto_map" not in declared and declared.get("tokenizer_class") in _WHOLE_IN_ITS_FILE


def copy_description(source: Path, folder: Path, *, dtype: str | None = None) -> None:
    """Writes into `folder` all of a model folder but its weights: configs, tokenizer, template.

    Args:
        source: A transformers folder.
        folder: An existing one.
        dtype: What the config is to say that the weights are; None leaves it.

    Raises:
        ModelError: If the source has no tokenizer that transformers can load.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    generation = source / "generation_config.json"
    if generation.exists():
        shutil.copyfile(generation, folder / generation.name)


def shares_rows(config: Mapping[str, Any]) -> bool:
    """Whether sequences of a model may lie in one row: not where it sees images as well.

    Positions of such a model have several dimensions, off which transformers does not read where
    a sequence begins.

    Args:
        config: What its `config.json` holds.
    """
    return "vision_config" not in config


def described(model_folder: Path, name: str = "config.json") -> dict[str, Any]:
    """What a JSON file of a model folder says.

    Raises:
        ModelError: If it is missing, or no JSON object.
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
    """The most tokens that the model was made for, where its config says so."""
    length = described(model_folder).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def stop_token_ids(model_folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a completion: those of the tokenizer and of the generation config.

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
