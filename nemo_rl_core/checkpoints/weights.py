"""Validation of loaded weights against their model, and their published names and dtypes."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.checkpoints.model_code import code_options
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
    """Raises `ModelError` if the weights of a source do not match a model."""
    shapes = [
        f"{name} {actual} for {expected}" for name, (actual, expected) in (misshapen or {}).items()
    ]
    wrong = [
        (problem, f"{len(names)} {kind}: {first_names(sorted(names))}")
        for problem, kind, names in (
            ("lacks weights", "missing", missing),
            ("has weights whose shapes differ from the model's", "of another shape", shapes),
            ("has weights that the model does not have", "surplus", surplus),
        )
        if names
    ]
    if not wrong:
        return
    raise ModelError(
        f"{source} {wrong[0][0]}",
        expected="every weight of the model in its shape, and no other",
        got="; ".join(listed for _, listed in wrong),
        fix="name a complete checkpoint of the architecture in its config.json; one with a "
        "scalar head has no language-model head",
    )


def require_finite(source: str, named_tensors: Iterable[tuple[str, "Tensor"]]) -> None:
    """Checks every tensor for NaN and infinity in one pass; copies only one-byte floats."""
    import torch

    for name, tensor in named_tensors:
        values = tensor.detach()
        if not values.is_floating_point() or not values.numel():
            continue
        if values.element_size() == 1:
            values = values.float()
        # If any value is NaN, both are. This takes one pass; `isfinite` would write a mask.
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
    source_name: str,
    may_lack: Collection[str] = (),
    may_have: Callable[[str], bool] = lambda _: False,
    **options: Any,
) -> tuple[Any, set[str]]:
    """Loads a model by `kind.from_pretrained` and checks that no weight was initialized randomly.

    Args:
        source_name: Name of the source in errors.
        may_lack: Names of weights that the source may lack, such as those of a new head.
        may_have: Returns whether a surplus weight, such as one of an unused head, is expected.

    Returns:
        The model, and those of `may_lack` that the source lacks.
    """
    if source is not None and (folder := Path(source)).is_dir():
        for index in INDICES:
            files_of_index(folder / index)
        if any((folder / name).is_file() for name in (WEIGHTS, INDICES[0])):
            for path in weight_files(folder):
                refuse_damaged(path)  # transformers' error would not name the file
        if "quantization_config" in options:
            # Before quantization to 4 or 8 bits, which hides NaN and infinity.
            require_finite(source_name, stored_tensors(folder))
        elif "gguf_file" not in options:  # a GGUF file has its config in it
            options |= _dequantizing(folder, source_name)
    try:
        if source is not None and (Path(source) / "config.json").is_file():
            options.setdefault("config", load_config(source))
        if source is not None:
            options |= code_options(source)
        model, report = kind.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (NemoRLError, MemoryError):
        raise
    # Broad on purpose: a damaged folder raises errors of transformers, safetensors, torch or json.
    except Exception as error:
        raise unreadable(source_name, error) from error
    missing = set(report["missing_keys"]) - {name for name, *_ in report["mismatched_keys"]}
    misshapen = {name: (tuple(a), tuple(b)) for name, a, b in report["mismatched_keys"]}
    refuse_wrong_weights(
        source_name,
        missing=missing - {*may_lack},
        misshapen=misshapen,
        surplus=[name for name in report["unexpected_keys"] if not may_have(name)],
    )
    require_finite(source_name, distinct(model))
    choose_attention(model)
    return model, missing


def load_config(folder: str | Path, **changes: Any) -> Any:
    """Loads a transformers config, and resets options that change how a model computes.

    For example, with `return_dict: false` a model returns a tuple, which transformers' own
    generation cannot read. `attn_implementation` names a kernel of the machine that saved the
    model, and `chunk_size_feed_forward` must divide the length of every sequence.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, **code_options(folder), **changes)
    config._attn_implementation = None
    for each in (config, config.get_text_config()):
        each.return_dict, each.is_encoder_decoder = True, False
        each.output_hidden_states = each.output_attentions = False
        each.chunk_size_feed_forward = 0
    return config


def keeps_float32(model: Any, name: str) -> bool:
    """Whether transformers keeps a tensor in float32 in a model of any dtype.

    For example, the correction bias of DeepSeek-V3's router would choose other experts if rounded.
    """
    return any(part in name for part in model._keep_in_fp32_modules_strict or ())


def as_published(
    model: Any, named_weights: Iterable[tuple[str, "Tensor"]]
) -> Iterator[tuple[str, "Tensor"]]:
    """Converts weights to the names and shapes of the published architecture.

    Tensors can be converted separately: on loading, transformers merges several published tensors
    into one (the experts of a layer), but never splits one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    ignored = set(model._keys_to_ignore_on_save or ())
    for name, tensor in named_weights:
        if name not in ignored:
            yield from revert_weight_conversion(model, {name: tensor}).items()


def rounded_weights(folder: Path, dtype: "torch.dtype") -> "Iterator[tuple[str, Tensor]]":
    """Yields the stored tensors of a model in a dtype, except those that stay in float32."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
    )

    config = type(AutoConfig.from_pretrained(folder, **code_options(folder)))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(
        config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(config, None)
    )
    for name, tensor in stored_tensors(folder):
        yield name, tensor if kind and keeps_float32(kind, name) else tensor.to(dtype)


def choose_attention(model: Any) -> None:
    """Selects eager attention if `sdpa` would ignore the model's cap on attention scores."""
    if caps_scores(model.config.get_text_config()):
        model.set_attn_implementation("eager")


def caps_scores(config: Any) -> bool:
    """Whether a config caps attention scores, such as Gemma 2's."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def _dequantizing(folder: Path, source_name: str) -> dict[str, Any]:
    """Returns options of `from_pretrained` that dequantize FP8 and FP4, even with a GPU."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise unreadable(source_name, error) from error
    declared = config.get("quantization_config") or {}
    if declared.get("quant_method") not in ("fp8", "mxfp4"):
        return {}
    from transformers.quantizers.auto import AutoQuantizationConfig

    options = AutoQuantizationConfig.from_dict({**declared, "dequantize": True})
    return {"quantization_config": options}
