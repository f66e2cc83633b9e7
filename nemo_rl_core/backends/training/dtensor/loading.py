"""Transformers folders as models to train: with the language model's head, or with a scalar one."""

import json
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.dtensor.quantized import Precision, loading_options
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.errors import ModelError

SCALAR_HEAD = "score"
"""What transformers calls the head of a decoder that classifies sequences."""


def load_causal_model(folder: Path, *, weights: Precision = "full") -> Any:
    """Loads a transformers folder with float32 parameters, in evaluation mode (no dropout).

    A model that also reads images is loaded whole. `weights` other than `full` are quantized while
    they are read.

    Raises:
        ModelError: If the folder lacks weights of a causal model, as one with a scalar head does.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    whole = _architecture(folder).endswith("ForConditionalGeneration")
    kind = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **loading_options(weights)
    )
    _refuse_missing(report["missing_keys"], folder)
    return _on_device(model)


def load_scalar_model(folder: Path, *, weights: Precision = "full") -> Any:
    """Loads a folder as a model with one output a token, as reward models and critics are kept.

    A saved scalar head is kept. Over a causal checkpoint, the new head is all zeros: it draws
    nothing, and the first loss over pairs is exactly ln 2.

    Args:
        folder: A transformers folder of either kind, with its tokenizer.
        weights: Other than `full`, quantized while they are read.

    Returns:
        An `AutoModelForSequenceClassification` with float32 parameters, in evaluation mode.

    Raises:
        ModelError: If the architecture has no scalar head without bias, if the folder holds a
            classifier of several labels, or lacks other weights than those of a new head.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    _refuse_several_labels(folder)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    config.get_text_config().pad_token_id = scoring_pad_token_id(folder)
    try:
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            **loading_options(weights),
        )
    except ValueError as error:
        raise _no_scalar_head(folder, type(config).__name__) from error
    names = {name for name, _ in model.named_parameters() if name.startswith(f"{SCALAR_HEAD}.")}
    if names != {f"{SCALAR_HEAD}.weight"}:
        raise _no_scalar_head(folder, type(model).__name__)
    missing = set(report["missing_keys"])
    _refuse_missing(missing - names, folder)
    if missing:
        torch.nn.init.zeros_(getattr(model, SCALAR_HEAD).weight)
    return _on_device(model)


def scoring_pad_token_id(folder: Path) -> int:
    """The padding token of a model that scores sequences: one that ends none.

    Transformers reads the score off the last token that is not padding. Where the padding token is
    the end-of-sequence token, as in many causal checkpoints, that is not the sequence's last token.

    Raises:
        ModelError: If every special token of the tokenizer ends a sequence.
    """
    tokenizer = load_tokenizer(folder)
    declared = _declared(folder).get("pad_token_id")
    names = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    stops = stop_token_ids(folder, tokenizer)
    for candidate in (declared, *names, *tokenizer.all_special_ids):
        if candidate is not None and candidate not in stops:
            return int(candidate)
    raise ModelError(
        f"the tokenizer in {folder.name!r} has no token to pad with that ends no sequence",
        expected="a padding token other than the end-of-sequence token",
        got=f"special tokens {tokenizer.all_special_tokens}",
        fix="give the tokenizer a padding token of its own before training a scalar head",
    )


def shared_vocabulary_size(student: Path, teacher: Path) -> int:
    """How many ids the tokenizers of both folders give the same tokens: all, or it is an error.

    Heads are not compared: of one family, larger models often have more unused rows in them.

    Raises:
        ModelError: If any token has another id, or is missing in one of them.
    """
    ours, theirs = (load_tokenizer(folder).get_vocab() for folder in (student, teacher))
    if ours != theirs:
        differing = sorted({token for token, _ in ours.items() ^ theirs.items()})
        raise ModelError(
            f"the reference model {teacher.name!r} has another vocabulary than the trained one",
            expected=f"the same ids for the same {len(ours)} tokens",
            got=f"{len(theirs)} tokens; {len(differing)} differ, such as {differing[:3]}",
            fix="choose a reference or teacher of the same model family and tokenizer",
        )
    return int(max(ours.values())) + 1


def _declared(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _architecture(folder: Path) -> str:
    return str((_declared(folder).get("architectures") or [""])[0])


def _on_device(model: Any) -> Any:
    if getattr(model, "is_quantized", False):  # there already
        return model.eval()
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _refuse_missing(names: set[str], folder: Path) -> None:
    if names:
        raise ModelError(
            f"the model folder {folder.name!r} lacks weights",
            expected="every weight of the model that it is loaded as",
            got=f"{len(names)} missing, such as {', '.join(sorted(names)[:3])}",
            fix="name a complete checkpoint; one with a scalar head has no language model's head",
        )


def _refuse_several_labels(folder: Path) -> None:
    # Transformers writes labels down unless there are two.
    num_labels = len(_declared(folder).get("id2label", ["", ""]))
    if _architecture(folder).endswith("ForSequenceClassification") and num_labels != 1:
        raise ModelError(
            f"the model folder {folder.name!r} holds a classifier, not a model of one score",
            expected="one label",
            got=f"{num_labels} labels",
            fix="name a causal model or a reward model",
        )


def _no_scalar_head(folder: Path, name: str) -> ModelError:
    return ModelError(
        f"the model in {folder.name!r} has no form with a scalar head in transformers",
        expected=f"a decoder for sequence classification with a linear {SCALAR_HEAD!r} and no bias",
        got=name,
        fix="choose another model, such as one of the Qwen or Llama type",
    )
