"""Arguments of TRL's configs, each with the line to write instead."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from nemo_rl_core.config.names import closest_name
from nemo_rl_core.config.peer_names import ALGORITHM_SECTIONS, NO_EFFECT, PEER_NAMES, peer_hint

_NOT_IN_LORA: Final = ("lora_dropout", "use_rslora", "use_dora", "modules_to_save")
_OTHER_VALUES: Final = frozenset(
    {"keep_top_k", "num_nodes", "nnodes", "kl_loss_type", "loss_agg_mode", "loss_fn"}
    | {"lr_scheduler_type", "use_vllm", "vllm_mode", "warmup_style"}
)
"""Settings whose values have a different form here."""
_PATH: Final = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+")
_IN_SECTION: Final = re.compile(r"(\w+), in the algorithm's section")
_TRACKERS: Final = {"wandb": {"kind": "wandb"}, "mlflow": {"kind": "mlflow"}} | {
    "tensorboard": {"kind": "tensorboard", "folder": "runs"}
}


def python_hint(
    name: str,
    value: Any,
    *,
    section: str,
    names: Collection[str],
    sections: Collection[str],
    has_scalar_head: bool = False,
) -> str | None:
    """Returns what to write in Python for a setting of another framework; None if unknown.

    A line of code is returned only for settings of the trainer, and includes the value only if it
    is a number with the same meaning here.

    Args:
        name: Name of the setting; it may be misspelled unless it is close to one of the trainer's.
        value: Value of the setting.
        section: Name of the algorithm's section.
        names: Settings that the trainer accepts by name.
        sections: Sections that the trainer accepts as a mapping.
        has_scalar_head: Whether the algorithm trains a model with a scalar head.

    Example:
        >>> has = {"section": "grpo", "names": ["loss", "max_new_tokens"], "sections": []}
        >>> python_hint("max_completion_length", 64, **has)
        'write max_new_tokens=64'
        >>> python_hint("epsilon_high", 0.28, **has)
        "write loss={'clip_high': 0.28}"
        >>> python_hint("num_generations", 8, **has)
        'here it is grpo.num_generations_per_prompt'
    """
    names_of_peers = {*PEER_NAMES, *NO_EFFECT, *_SPECIAL_HINTS}
    if name not in names_of_peers and closest_name(name, names) is None:
        name = closest_name(name, names_of_peers) or name
    if name == "expert_model_parallel_size" and has_scalar_head:
        return peer_hint(name)  # the backend with experts has no scalar head
    if name in _SPECIAL_HINTS:
        return _SPECIAL_HINTS[name](value, section, names)
    equivalent = PEER_NAMES.get(name)
    if equivalent is None:
        return peer_hint(name)
    in_section = _IN_SECTION.match(equivalent)
    text = f"{section}.{in_section[1]}" if in_section else equivalent
    match = _PATH.match(text)
    path = _argument(match[0], section, names, sections) if match else None
    if path is None:
        return peer_hint(name)
    is_only_path = equivalent == (in_section or match)[0]  # type: ignore[index]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_only_path and is_number and name not in _OTHER_VALUES:
        return f"write {_as_code(path, repr(value))}"
    return f"{peer_hint(name)}; in Python {_as_code(path, '…')}"


def _argument(
    dotted: str, section: str, names: Collection[str], sections: Collection[str]
) -> list[str] | None:
    """Converts `grpo.loss.clip_low` to the path of an argument; None if the trainer has none."""
    first, *inner = dotted.split(".")
    if first == section or first not in sections:
        return inner if inner[0] in names and first not in ALGORITHM_SECTIONS - {section} else None
    return inner if inner[0] in names else [first, *inner]


def _as_code(path: Sequence[str], value: str) -> str:
    for key in reversed(path[1:]):
        value = f"{{{key!r}: {value}}}"
    return f"{path[0]}={value}"


def _steps(value: Any, section: str, names: Collection[str]) -> str | None:
    counts = [name for name in ("num_steps_per_iteration", "num_steps") if name in names]
    return f"write {counts[0]}={_shown(value)}" if counts else None


def _kl(value: Any, section: str, names: Collection[str]) -> str | None:
    if section == "dpo":
        return f"write loss={{'beta': {_shown(value)}}}"
    if section != "grpo":
        return peer_hint("beta")
    kl = {"beta": value} if value else None
    return f"write loss={{'kl': {_shown(kl)}}}"


def _peft(value: Any, section: str, names: Collection[str]) -> str:
    # A LoraConfig, or its fields as a mapping.
    field = value.get if isinstance(value, Mapping) else partial(_field, value)
    rank, alpha, modules = (field(each) for each in ("r", "lora_alpha", "target_modules"))
    # PEFT's defaults for a mapping; a LoraConfig has both values.
    default = (8, 8) if isinstance(value, Mapping) else (16, 32)
    lora: dict[str, Any] = {"rank": rank or default[0], "alpha": float(alpha or default[1])}
    if modules is not None and not isinstance(modules, str):
        lora["target_modules"] = sorted([*modules, *(field("target_parameters") or ())])
    unsupported = [name for name in _NOT_IN_LORA if field(name)]
    if isinstance(modules, str) and modules != "all-linear":
        unsupported.append("a pattern as target_modules")
    if field("target_parameters") and "target_modules" not in lora:
        unsupported.append("target_parameters with target_modules: all-linear")
    line = f"write training={{'lora': {_shown(lora)}}}"
    return f"{line}; there is no {' or '.join(unsupported)}" if unsupported else line


def _field(value: Any, name: str) -> Any:
    return getattr(value, name, None)


def _lora(value: Any, section: str, names: Collection[str]) -> str:
    lora = {"rank": value} if isinstance(value, int) else value
    return f"write training={{'lora': {_shown(lora)}}}"


def _report_to(value: Any, section: str, names: Collection[str]) -> str:
    kinds = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    trackers = [_TRACKERS[each] for each in kinds if each in _TRACKERS]
    if not trackers:
        return "leave it out: the store records every run, and choose trackers with tracking="
    return f"write tracking={{'trackers': {_shown(trackers)}}}, of train or fit"


def _output_dir(value: Any, section: str, names: Collection[str]) -> str:
    return (
        "leave it out: the model is in result.checkpoint, in the store that NEMO_RL_HOME names; "
        f"name={Path(str(value)).name!r}, of train or fit, continues an interrupted run"
    )


def _experts(value: Any, section: str, names: Collection[str]) -> str | None:
    return f"write training={{'backend': 'megatron', 'expert_parallel_size': {_shown(value)}}}"


def _model(value: Any, section: str, names: Collection[str]) -> str:
    return f"write the model first: {_shown(value)}"


_SPECIAL_HINTS: Final[dict[str, Callable[[Any, str, Collection[str]], str | None]]] = {
    "lora": _lora,
    "max_steps": _steps,
    # Names that other algorithms here use.
    "num_steps": _steps,
    "num_steps_per_iteration": _steps,
    "peft_config": _peft,
    "report_to": _report_to,
    "output_dir": _output_dir,
    "beta": _kl,
    "expert_model_parallel_size": _experts,
    **dict.fromkeys(("model_name", "model_name_or_path", "pretrain"), _model),
}
"""Settings whose replacement depends on the value or the algorithm."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else "…"
