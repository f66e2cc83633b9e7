"""Validation of loaded weights against their model.

All loading uses it: models loaded by transformers, slices read by ranks, tensors sent by a trainer.
Missing, surplus and misshapen tensors are refused by name, and so are NaN and infinity, checked
once when a tensor is read. The names that a model expects are in
`backends.training.dtensor.shards.check_weights`, since they need the model.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.checkpoints.weight_files import (
    INDICES,
    WEIGHTS,
    distinct,
    files_of_index,
    first_names,
    refuse_damaged,
    stored_tensors,
    unreadable,
    weight_files,
)
from nemo_rl_core.errors import ModelError, NemoRLError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shape = tuple[int, ...]


def refuse_wrong_weights(
    source: str,
    *,
    missing: Collection[str] = (),
    misshapen: Mapping[str, tuple[Shape, Shape]] | None = None,
    surplus: Collection[str] = (),
) -> None:
    """Raises unless all three are empty.

    Args:
        source: Name of the weights' source for error messages.
        missing: Names that the model has and the source lacks.
        misshapen: Shape in the source and shape in the model, by name.
        surplus: Names that the source has and the model lacks.

    Raises:
        ModelError: With the names of all three kinds.
    """
    shapes = [
        f"{name} {actual} for {expected}" for name, (actual, expected) in (misshapen or {}).items()
    ]
    kinds = {"missing": missing, "of another shape": shapes, "surplus": surplus}
    wrong = {kind: sorted(names) for kind, names in kinds.items() if names}
    if not wrong:
        return
    problems = {
        "missing": "lacks weights",
        "of another shape": "has weights of another shape than the model's",
        "surplus": "has weights that the model does not have",
    }
    raise ModelError(
        f"{source} {problems[next(iter(wrong))]}",
        expected="every weight of the model in its shape, and no other",
        got="; ".join(
            f"{len(names)} {kind}: {first_names(names)}" for kind, names in wrong.items()
        ),
        fix="name a complete checkpoint of the architecture in its config.json; one with a "
        "scalar head has no language model's head",
    )


def require_finite(source: str, named_tensors: Iterable[tuple[str, "Tensor"]]) -> None:
    """Checks every tensor for NaN and infinity, in one pass, without copies but of one-byte floats.

    Raises:
        ModelError: Naming the first tensor with NaN or infinity.
    """
    import torch

    for name, tensor in named_tensors:
        values = tensor.detach()
        if not values.is_floating_point() or not values.numel():
            continue
        if values.element_size() == 1:
            values = values.float()
        # Both are NaN if any value is: one pass, whereas `isfinite` writes a mask.
        low, high = torch.aminmax(values)
        if not (torch.isfinite(low) & torch.isfinite(high)):
            num_nan = int(torch.isnan(values).sum())
            num_infinite = int(torch.isinf(values).sum())
            raise ModelError(
                f"{source} has weights that are not finite",
                expected="finite numbers",
                got=f"{name}: {num_nan} NaN and {num_infinite} infinite of {values.numel()}",
                fix="name a checkpoint from before the training diverged, or download it again",
            )


def load_pretrained(
    kind: Any,
    source: str | Path | None,
    *,
    called: str,
    may_lack: Collection[str] = (),
    may_have: Callable[[str], bool] = lambda _: False,
    **options: Any,
) -> tuple[Any, set[str]]:
    """Loads a model by `kind.from_pretrained`, and checks that no weight was initialized randomly.

    Args:
        kind: A class of transformers, or one of its auto classes.
        source: A folder or a hub name; None if `options` have a `state_dict`.
        called: Name of the source for error messages.
        may_lack: Weights of a new head, to be filled by the caller.
        may_have: Returns whether a surplus weight, such as of an unused head, is expected.
        **options: Options of `from_pretrained`.

    Returns:
        The model, and those of `may_lack` that the source lacks.

    Raises:
        ModelError: If transformers cannot load it, or weights are missing, surplus, misshapen or
            not finite.
    """
    if source is not None and (folder := Path(source)).is_dir():
        _refuse_damaged_files(folder)
        if "quantization_config" in options:  # 4 or 8 bits do not show NaN or infinity
            require_finite(called, stored_tensors(folder))
        else:
            options |= _dequantizing(folder, called)
    try:
        if source is not None and (Path(source) / "config.json").is_file():
            options.setdefault("config", load_config(source))
        model, report = kind.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (NemoRLError, MemoryError):
        raise
    # Named fault boundary: a damaged folder raises errors of transformers, safetensors, torch or
    # json.
    except Exception as error:
        raise unreadable(called, error) from error
    missing = set(report["missing_keys"]) - {name for name, *_ in report["mismatched_keys"]}
    misshapen = {name: (tuple(a), tuple(b)) for name, a, b in report["mismatched_keys"]}
    refuse_wrong_weights(
        called,
        missing=missing - {*may_lack},
        misshapen=misshapen,
        surplus=[name for name in report["unexpected_keys"] if not may_have(name)],
    )
    require_finite(called, distinct(model))
    choose_attention(model)
    return model, missing


def load_config(folder: str | Path, **changes: Any) -> Any:
    """Loads a config of transformers, with defaults for the form in which a model computes.

    `return_dict: false`, for one, returns the same values as a tuple, which transformers' own
    generation cannot read. `attn_implementation` names a kernel of the machine that saved the
    model, and `chunk_size_feed_forward` must divide the length of every sequence.

    Args:
        folder: A transformers folder.
        **changes: Values that the config gets.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, **changes)
    config._attn_implementation = None
    for each in (config, config.get_text_config()):
        each.return_dict, each.is_encoder_decoder = True, False
        each.output_hidden_states = each.output_attentions = False
        each.chunk_size_feed_forward = 0
    return config


def keeps_float32(model: Any, name: str) -> bool:
    """Whether transformers keeps a tensor in float32 in a model of any dtype.

    Such is the correction bias of DeepSeek-V3's router: rounded, it would choose other experts.

    Args:
        model: A transformers model, or its class.
        name: Name of a parameter or buffer.
    """
    return any(part in name for part in model._keep_in_fp32_modules_strict or ())


def rounded_weights(folder: Path, dtype: "torch.dtype") -> "Iterator[tuple[str, Tensor]]":
    """The stored tensors of a model in a dtype, without those that stay in float32."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
    )

    config = type(AutoConfig.from_pretrained(folder))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(
        config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(config, None)
    )
    for name, tensor in stored_tensors(folder):
        yield name, tensor if kind and keeps_float32(kind, name) else tensor.to(dtype)


def choose_attention(model: Any) -> None:
    """Has transformers compute a model's attention eagerly if `sdpa` would drop a cap on scores."""
    if caps_scores(model.config.get_text_config()):
        model.set_attn_implementation("eager")


def caps_scores(config: Any) -> bool:
    """Whether a config caps attention scores, as that of Gemma 2 does."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def _dequantizing(folder: Path, called: str) -> dict[str, Any]:
    """Options of `from_pretrained` that dequantize FP8 and FP4, also where there is a GPU."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise unreadable(called, error) from error
    declared = config.get("quantization_config") or {}
    if declared.get("quant_method") not in ("fp8", "mxfp4"):
        return {}
    from transformers.quantizers.auto import AutoQuantizationConfig

    options = AutoQuantizationConfig.from_dict({**declared, "dequantize": True})
    return {"quantization_config": options}


def _refuse_damaged_files(folder: Path) -> None:
    for index in INDICES:
        files_of_index(folder / index)
    if any((folder / name).is_file() for name in (WEIGHTS, INDICES[0])):
        for path in weight_files(folder):
            refuse_damaged(path)  # the error of transformers would not name the file
