"""Loading and saving of transformers folders with a language-model or scalar head."""

from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.checkpoints.model_code import code_options, copy_code
from nemo_rl_core.checkpoints.tensors import save_weights
from nemo_rl_core.checkpoints.weights import (
    as_published,
    choose_attention,
    load_config,
    load_pretrained,
    refuse_wrong_weights,
)
from nemo_rl_core.config.training import Head
from nemo_rl_core.data.pretrained import (
    copy_processors,
    load_tokenizer,
    read_model_json,
    stop_token_ids,
)
from nemo_rl_core.distributed.gathered_writes import write_on_rank_0
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.quantized import Precision, compute_dequantized, loading_options

SCALAR_HEAD = "score"
"""Transformers' name for the head of a sequence classifier."""
_LM_HEADS = ("lm_head", "embed_out")
_CLASSIFIER = "ForSequenceClassification"


def name_in_errors(folder: Path) -> str:
    """Returns the name of a model folder for error messages."""
    return f"the model folder {folder.name!r}"


def weights_that_may_be_missing(folder: Path) -> set[str]:
    """Returns names of weights that the folder may lack: the scalar head of a causal checkpoint."""
    return set() if _architecture(folder).endswith(_CLASSIFIER) else {f"{SCALAR_HEAD}.weight"}


def is_spare_head(folder: Path, name: str) -> bool:
    """Whether a weight belongs to a language-model head that a scalar head replaces."""
    return bool(weights_that_may_be_missing(folder)) and name.rpartition(".")[0] in _LM_HEADS


def load_model(folder: Path, head: Head, *, weights: Precision = "full") -> Any:
    """Loads the full model for a head; see `load_causal_model` and `load_scalar_model`."""
    load = load_scalar_model if head == "scalar" else load_causal_model
    return load(folder, weights=weights)


def load_causal_model(
    folder: Path, *, weights: Precision = "full", dtype: torch.dtype = torch.float32
) -> Any:
    """Loads a transformers folder on the CPU, in evaluation mode (no dropout).

    Vision-language models are loaded completely. `weights` other than `full` are quantized while
    reading.
    """
    model, missing = load_pretrained(
        _causal_class(folder),
        folder,
        source_name=name_in_errors(folder),
        dtype=dtype,
        **loading_options(folder, weights),
    )
    return finish_loading(model, missing, folder)


def load_scalar_model(folder: Path, *, weights: Precision = "full") -> Any:
    """Loads a folder as a model with one output per token, for reward models and critics.

    A saved scalar head is kept. For a causal checkpoint the new head is zero: it does not depend on
    random numbers, and the first pairwise loss is exactly ln 2.
    """
    require_scalar_head(folder)
    config = _scalar_config(folder)
    model, missing = load_pretrained(
        _scalar_class(folder, config),
        folder,
        source_name=name_in_errors(folder),
        may_lack=weights_that_may_be_missing(folder),
        may_have=partial(is_spare_head, folder),
        config=config,
        dtype=torch.float32,
        **loading_options(folder, weights),
    )
    return finish_loading(model, missing, folder)


def empty_model(folder: Path, head: Head) -> Any:
    """Creates the model of `load_model` without memory for parameters; see `weights.allocate`.

    Buffers, such as the frequencies of rotary embeddings, have their values.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from transformers import GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping

    is_scalar = head == "scalar"
    config = _scalar_config(folder) if is_scalar else load_config(folder)
    kind = _scalar_class(folder, config) if is_scalar else _causal_class(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # describes the folder, but this model is in float32
    with init_empty_weights():
        model = kind.from_config(config, dtype=torch.float32, **code_options(folder))
    model.tie_weights()  # accelerate creates a new parameter at each use
    choose_attention(model)
    if is_scalar:
        _require_scalar_head(model, folder)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    # Created before FSDP2 changes class names, which the conversions are looked up by.
    model._weight_conversions = get_model_conversion_mapping(model)
    return model.eval()


def finish_loading(model: Any, missing: set[str], folder: Path) -> Any:
    """Puts a loaded model in evaluation mode, zeroes a new scalar head, prepares 4 and 8 bits."""
    refuse_wrong_weights(
        name_in_errors(folder), missing=missing - weights_that_may_be_missing(folder)
    )
    if missing:
        torch.nn.init.zeros_(getattr(model, SCALAR_HEAD).weight)
    compute_dequantized(model)
    return model.eval()


def _causal_class(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_vision = _architecture(folder).endswith("ForConditionalGeneration")
    return AutoModelForImageTextToText if has_vision else AutoModelForCausalLM


def _scalar_config(folder: Path) -> Any:
    # Transformers writes labels unless there are two.
    num_labels = len(read_model_json(folder).get("id2label", ["", ""]))
    if _architecture(folder).endswith(_CLASSIFIER) and num_labels != 1:
        raise ModelError(
            f"the model folder {folder.name!r} contains a classifier with several labels",
            expected="one label",
            got=f"{num_labels} labels",
            fix="name a causal model or a reward model",
        )
    config = load_config(folder, num_labels=1)
    config.get_text_config().pad_token_id = scoring_pad_token_id(folder)
    return config


def _scalar_class(folder: Path, config: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise _no_scalar_head(folder, type(config).__name__)
    return AutoModelForSequenceClassification


def require_scalar_head(folder: Path) -> None:
    """Raises `ModelError` if the model's type has no scalar head; reads only `config.json`."""
    from accelerate import init_empty_weights

    config = load_config(folder, num_labels=1)
    with init_empty_weights():
        model = _scalar_class(folder, config).from_config(config)
    _require_scalar_head(model, folder)


def _require_scalar_head(model: Any, folder: Path) -> None:
    names = {name for name, _ in model.named_parameters() if name.startswith(f"{SCALAR_HEAD}.")}
    if names != {f"{SCALAR_HEAD}.weight"}:
        raise _no_scalar_head(folder, type(model).__name__)


def save_model(
    folder: Path,
    model: Any,
    source: Path,
    tokenizer: Any,
    named_weights: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Writes a transformers folder; every rank iterates over `named_weights`, a collective.

    The model's `save_pretrained` is not used, since it gathers all weights before writing.
    """

    def write(gathered: Iterable[tuple[str, torch.Tensor]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # FSDP2 changes class names, which are needed to load the folder again.
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = "float32"
        model.config.save_pretrained(folder)
        if model.can_generate():
            # Unlike save_pretrained, this accepts invalid published configs, such as Vicuna's.
            model.generation_config.to_json_file(folder / "generation_config.json")
        tokenizer.save_pretrained(folder)
        copy_processors(source, folder)
        copy_code(source, folder)
        save_weights(folder, gathered)

    write_on_rank_0(named_weights, write)


def with_tied_weights(
    weights: Mapping[str, torch.Tensor], folder: Path, head: Head = "lm"
) -> dict[str, torch.Tensor]:
    """Adds the other names of weights that are stored once, so that a strict load succeeds."""
    added: dict[str, torch.Tensor] = {}
    for names in _tied_names(folder, head):
        present = next((name for name in names if name in weights), None)
        if present is not None:
            added |= dict.fromkeys(names, weights[present])
    return {**added, **weights}


@cache
def _tied_names(folder: Path, head: Head) -> list[list[str]]:
    model = empty_model(folder, head)
    names_by_id: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_by_id.setdefault(id(tensor), []).append(name)
    empty = torch.empty(0, device="meta")
    return [
        [name for name, _ in as_published(model, dict.fromkeys(names, empty).items())]
        for names in names_by_id.values()
        if len(names) > 1
    ]


def scoring_pad_token_id(folder: Path) -> int:
    """Returns the padding token of a scoring model, which must not be an end-of-sequence token.

    Transformers reads the score at the last token that is not padding. If padding uses the
    end-of-sequence token, as in many causal checkpoints, that is not the sequence's last token.
    """
    tokenizer = load_tokenizer(folder)
    declared = read_model_json(folder).get("pad_token_id")
    token_ids = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    stops = stop_token_ids(folder, tokenizer)
    for candidate in (declared, *token_ids, *tokenizer.all_special_ids):
        if candidate is not None and candidate not in stops:
            return int(candidate)
    raise ModelError(
        f"the tokenizer in {folder.name!r} has no padding token other than end-of-sequence tokens",
        expected="a padding token other than the end-of-sequence token",
        got=f"special tokens {tokenizer.all_special_tokens}",
        fix="add a separate padding token to the tokenizer before training a scalar head",
    )


def shared_vocabulary_size(student: Path, teacher: Path) -> int:
    """Returns the vocabulary size of two folders after checking that their tokenizers agree.

    Heads are not compared: larger models of a family often have more unused rows.
    """
    ours, theirs = (load_tokenizer(folder).get_vocab() for folder in (student, teacher))
    if ours != theirs:
        differing = sorted({token for token, _ in ours.items() ^ theirs.items()})
        raise ModelError(
            f"the reference model {teacher.name!r} has a different vocabulary than the trained one",
            expected=f"the same ids for the same {len(ours)} tokens",
            got=f"{len(theirs)} tokens; {len(differing)} differ, such as {differing[:3]}",
            fix="choose a reference or teacher of the same model family and tokenizer",
        )
    return int(max(ours.values())) + 1


def _architecture(folder: Path) -> str:
    return str((read_model_json(folder).get("architectures") or [""])[0])


def _no_scalar_head(folder: Path, name: str) -> ModelError:
    return ModelError(
        f"the model in {folder.name!r} has no class with a scalar head in transformers",
        expected=f"a decoder for sequence classification with a linear {SCALAR_HEAD!r} and no bias",
        got=name,
        fix="choose another model, such as one of the Qwen or Llama type",
    )
