"""TRL's `GRPOConfig`, `DPOConfig`, `SFTConfig` and `RewardConfig` as settings of this project.

Each field is carried over, or reported with the reason why not. Where the defaults differ, TRL's
value is carried over even if it was not given, so that the same script trains with the same
settings. Written against TRL 1.16: an unknown field of a different version is reported if it is not
its default. `tests/unit/trainers/test_trl_configs.py` tries each field of the installed version.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from nemo_rl_core.config.peer_names import NO_EFFECT

_SAME: Final = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "seed"),
)
_OF_MACHINE: Final = ("output_dir", "use_cpu", "bf16", "fp16")
"""Fields that are needed to create a config on every machine."""
_REQUIRED: Final = {
    "grpo": ("num_generations", "epsilon", "use_vllm"),
    "dpo": ("loss_type", "beta", "label_smoothing"),
}
"""Fields by algorithm that other configs of TRL lack."""
_SAMPLING: Final = ("top_p", "top_k", "min_p", "repetition_penalty")


@dataclasses.dataclass
class Translation:
    """A config of TRL as arguments of a trainer, and lines about fields that are not in them."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


def is_trl_config(args: Any, algorithm: str) -> bool:
    """Whether `args` has the fields of TRL's config of an algorithm."""
    names = ("per_device_train_batch_size", *_REQUIRED.get(algorithm, ()))
    return dataclasses.is_dataclass(args) and all(hasattr(args, name) for name in names)


def translate(args: Any, algorithm: str) -> Translation:
    """Translates an instance of TRL's config for an algorithm.

    Example:
        >>> import warnings; warnings.simplefilter("ignore")
        >>> from trl import DPOConfig
        >>> args = DPOConfig(loss_type=["ipo"], beta=0.3, max_steps=10, use_cpu=True, bf16=False)
        >>> translate(args, "dpo").settings["loss"]
        {'kind': 'ipo', 'beta': 0.3}
    """
    return _Reader(args).read(algorithm)


class _Reader:
    def __init__(self, args: Any) -> None:
        self._args = args
        # An instance, since TRL derives fields from others in the constructor.
        machine = {name: getattr(args, name) for name in _OF_MACHINE}
        self._defaults = type(args)(**machine)
        self._read: set[str] = set()
        self._result = Translation()

    def read(self, algorithm: str) -> Translation:
        settings = self._result.settings
        settings |= {name: self._field(name) for name in _SAME}
        self._optimizer()
        self._checkpoints()
        if self._is_changed("gradient_checkpointing"):
            recomputes = self._field("gradient_checkpointing")
            settings["training"] = {"activation_checkpointing": recomputes}
        batch = self._field("per_device_train_batch_size") * self._field(
            "gradient_accumulation_steps"
        )
        {
            "grpo": self._grpo,
            "dpo": self._dpo,
            "sft": self._sft,
            "reward_model": self._reward_model,
        }.get(algorithm, self._nothing)(batch)
        self._note_unread()
        return self._result

    def _field(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return getattr(self._args, name, default)

    def _note(self, name: str, text: str) -> None:
        self._result.notes.append(f"{name}={getattr(self._args, name)!r:.60}: {text}")

    def _nothing(self, batch: int) -> None:
        self._read -= {"per_device_train_batch_size", "gradient_accumulation_steps"}

    def _optimizer(self) -> None:
        optim = self._plain(self._field("optim", "adamw_torch"))
        if optim == "adamw_bnb_8bit":
            self._result.settings["moments"] = "8bit"
        elif not optim.startswith("adamw_torch") or "bit" in optim:
            self._note("optim", "the optimizer is AdamW, with moments='float32' or '8bit'")
        num_steps = self._field("max_steps", -1)
        warmup = self._field("warmup_steps", 0) or 0
        if 0 < warmup < 1:  # a share of all steps
            if num_steps > 0:
                warmup = math.ceil(num_steps * warmup)  # as transformers does
            else:
                self._note("warmup_steps", "num_warmup_steps counts steps")
                warmup = 0
        schedule = self._plain(self._field("lr_scheduler_type", "linear"))
        decays = schedule in ("linear", "cosine") and num_steps > warmup
        # In TRL the first update after the warm-up has the full rate, here the last one of the
        # warm-up: without one more step, the decay would be one update ahead.
        num_warmup_steps = warmup if schedule != "constant" else 0
        self._result.settings["num_warmup_steps"] = int(num_warmup_steps) + decays
        if decays:
            decay = {"kind": schedule, "num_decay_steps": int(num_steps - warmup)}
            self._result.settings["schedule"] = decay
        elif schedule not in ("constant", "constant_with_warmup"):
            self._note(
                "lr_scheduler_type",
                "schedule={'kind': 'linear' or 'cosine', 'num_decay_steps': ...}; without it, "
                "the learning rate is constant",
            )

    def _steps(self, name: str, *, divisor: int = 1) -> None:
        num_steps = self._field("max_steps", -1)
        epochs = self._field("num_train_epochs", 3.0)
        if num_steps > 0:
            self._result.settings[name] = max(1, -(-num_steps // divisor))
        else:
            self._note("num_train_epochs", f"{name}=..., {epochs:g} times the steps of all rows")

    def _checkpoints(self) -> None:
        settings = self._result.settings
        if self._is_changed("save_steps"):
            self._step_count("save_steps", "save_every_num_steps")
        if self._plain(self._field("eval_strategy", "no")) == "steps":
            if self._field("eval_steps") is None:
                settings["validate_every_num_steps"] = self._args.logging_steps
            else:
                self._step_count("eval_steps", "validate_every_num_steps")
        if (limit := self._field("save_total_limit")) is not None:
            settings["keep_latest"] = limit
        if self._field("load_best_model_at_end"):
            self._note("load_best_model_at_end", "keep_best={'metric': ..., 'mode': ...}")

    def _step_count(self, name: str, here: str) -> None:
        value = self._field(name)
        if value is None or value < 1:
            self._note(name, f"{here} counts steps")
        else:
            self._result.settings[here] = int(value)

    def _grpo(self, batch: int) -> None:
        settings = self._result.settings
        group = self._field("num_generations")
        per_rollout = self._field("generation_batch_size") or batch
        self._field("steps_per_generation")
        settings["num_generations_per_prompt"] = group
        settings["num_prompts_per_step"] = max(1, per_rollout // group)
        if batch < per_rollout:
            settings["train_global_batch_size"] = batch
        self._steps("num_steps_per_iteration", divisor=max(1, per_rollout // batch))
        settings["max_new_tokens"] = self._field("max_completion_length")
        settings["temperature"] = self._field("temperature")
        for name in _SAMPLING:
            if self._is_changed(name):
                self._note(name, "training samples from the distribution that it trains")
            self._read.add(name)
        settings["loss"] = self._grpo_loss()
        settings["advantage"] = self._advantage()
        if self._field("mask_truncated_completions"):
            settings["overlong"] = {"kind": "filter"}
        if (weights := self._field("reward_weights")) is not None:
            settings["reward_weights"] = list(weights)
        engine = {
            "gpu_memory_utilization": self._field("vllm_gpu_memory_utilization"),
            "tensor_parallel_size": self._field("vllm_tensor_parallel_size"),
        }
        changed = [name for name in engine if self._is_changed(f"vllm_{name}")]
        settings |= {name: engine[name] for name in changed}

    def _grpo_loss(self) -> dict[str, Any]:
        kind, reduction = self._plain(self._field("loss_type")), "token_mean"
        loss: dict[str, Any] = {}
        if kind == "grpo":
            reduction = "sequence_mean"
        elif kind == "dr_grpo":
            length = self._field("max_completion_length")
            loss["reduction"] = {"kind": "constant", "max_tokens": length}
        elif kind not in ("dapo", "cispo", "sapo"):
            self._note("loss_type", "not supported; see loss and its kinds")
        loss.setdefault("reduction", reduction)
        low, high = self._field("epsilon"), self._field("epsilon_high")
        if kind == "cispo":
            # TRL's bound of the ratio itself.
            loss |= {"kind": "cispo", "clip_high": (low if high is None else high) - 1.0}
        elif kind == "sapo":
            loss |= {"kind": "sapo"}
            loss["tau_positive"] = self._field("sapo_temperature_pos")
            loss["tau_negative"] = self._field("sapo_temperature_neg")
        else:
            loss |= {"clip_low": low, "clip_high": low if high is None else high}
            if self._plain(self._field("importance_sampling_level")) == "sequence":
                loss |= {"kind": "gspo", "reduction": "sequence_mean"}
            elif (bound := self._field("delta")) is not None:
                loss["dual_clip"] = bound
        beta = self._field("beta")
        loss["kl"] = {"beta": beta} if beta else None
        if bonus := self._field("entropy_coef"):
            loss["entropy_bonus"] = bonus
        if importance := self._importance():
            loss["importance"] = importance
        return loss

    def _importance(self) -> dict[str, Any] | None:
        """The correction for the engine's logprobs, which TRL applies only with vLLM."""
        corrects = self._field("vllm_importance_sampling_correction")
        mode = self._plain(self._field("vllm_importance_sampling_mode"))
        low = self._field("vllm_importance_sampling_clip_min") or 0.0
        high = self._field("vllm_importance_sampling_clip_max")
        if not (self._args.use_vllm and corrects):
            return None
        if mode == "token_truncate":
            return {"kind": "truncated", "cap": high}
        if mode == "token_mask":
            return {"kind": "band", "low": low, "high": high}
        self._note(
            "vllm_importance_sampling_mode",
            "loss={'importance': {'kind': 'sequence_mask'}} bounds the mean log-ratio, not the sum",
        )
        return None

    def _advantage(self) -> dict[str, Any]:
        scale = self._plain(self._field("scale_rewards"))
        if scale not in ("group", "none", "True", "False"):
            self._note(
                "scale_rewards",
                "advantages are computed within a group; see advantage and its kinds",
            )
        centered = scale in ("none", "False")
        return {"kind": "group_centered" if centered else "group_normalized"}

    def _dpo(self, batch: int) -> None:
        settings = self._result.settings
        settings["num_pairs_per_step"] = batch
        self._steps("num_steps_per_iteration")
        kinds = self._field("loss_type")
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        kind = {"sigmoid_norm": "length_normalized"}.get(kinds[0], kinds[0])
        if kind not in ("sigmoid", "hinge", "ipo", "robust", "length_normalized"):
            self._note("loss_type", "not supported; see loss and its kinds")
            kind = "sigmoid"
        loss: dict[str, Any] = {"kind": kind, "beta": self._field("beta")}
        if kind in ("sigmoid", "robust") and (smoothing := self._field("label_smoothing")):
            loss["label_smoothing"] = smoothing
        weights = self._field("loss_weights")
        if kinds[1:] == ["sft"]:
            loss["sft"] = {"weight": (weights or [1.0, 1.0])[1]}
        elif kinds[1:]:
            self._note(
                "loss_type", "a loss has one kind, optionally with loss={'sft': {'weight': ...}}"
            )
        settings["loss"] = loss

    def _sft(self, batch: int) -> None:
        self._result.settings["global_batch_size"] = batch
        self._steps("num_steps")

    def _reward_model(self, batch: int) -> None:
        self._result.settings["num_pairs_per_step"] = batch
        self._steps("num_steps")
        if (coefficient := self._field("center_rewards_coefficient")) is not None:
            self._result.settings["loss"] = {"centering_coefficient": coefficient}

    def _note_unread(self) -> None:
        for each in dataclasses.fields(self._args):
            name = each.name
            if name in self._read and name not in NO_EFFECT:
                continue
            if self._is_changed(name) and each.init:
                self._note(name, NO_EFFECT.get(name, "not supported"))

    def _is_changed(self, name: str) -> bool:
        defaults = type(self._args) if name in _OF_MACHINE else self._defaults
        return bool(getattr(self._args, name) != getattr(defaults, name))

    @staticmethod
    def _plain(value: Any) -> str:
        return str(getattr(value, "value", value))


def as_arguments(settings: Mapping[str, Any]) -> str:
    """Formats settings as the arguments of a call."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
