"""Configs of the installed TRL, field by field: carried over or listed."""

import dataclasses
from typing import Any

import pytest
import torch
import trl
from transformers import get_scheduler

import nemo_rl_core
from nemo_rl_core.backends.training.optimizers import learning_rate_at
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.fit.trl_configs import as_arguments, translate

CPU = {"use_cpu": True, "bf16": False}
CONFIGS = {
    "grpo": (trl.GRPOConfig, nemo_rl_core.GRPOTrainer),
    "dpo": (trl.DPOConfig, nemo_rl_core.DPOTrainer),
    "sft": (trl.SFTConfig, nemo_rl_core.SFTTrainer),
    "reward_model": (trl.RewardConfig, nemo_rl_core.RewardModelTrainer),
}
OTHER_VALUES = {
    "loss_type": "ipo",
    "lr_scheduler_type": "cosine",
    "optim": "adafactor",
    "vllm_importance_sampling_mode": "token_mask",
    "importance_sampling_level": "sequence",
    "scale_rewards": "none",
    "eval_strategy": "steps",
    "save_strategy": "no",
    "reward_weights": [0.2, 1.0],
    "max_steps": 7,
    "num_train_epochs": 9.0,
    "logging_steps": 3.0,
    "eval_steps": 4,
    "save_total_limit": 2,
    "center_rewards_coefficient": 0.01,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "generation_batch_size": 16,
    "steps_per_generation": 2,
    "vllm_importance_sampling_clip_min": 0.5,
    "epsilon_high": 0.3,
    "delta": 4.0,
}
DEFAULTS_OF_CPU = ("use_cpu", "dataloader_pin_memory")  # another value is TRL's default
ONLY_WITH = {
    # Fields that mean something only with another one.
    "vllm_importance_sampling_correction": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "vllm_importance_sampling_mode": {"use_vllm": True},
    "vllm_importance_sampling_clip_max": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "vllm_importance_sampling_clip_min": {
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_mask",
    },
    "sapo_temperature_neg": {"loss_type": "sapo"},
    "sapo_temperature_pos": {"loss_type": "sapo"},
    "eval_steps": {"eval_strategy": "steps"},
    "loss_weights": {"loss_type": ["sigmoid", "sft"]},
    "num_train_epochs": {"max_steps": -1},
}


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "another"


def made(config: Any, **values: Any) -> Any:
    """Creates a config; sets the fields afterwards if TRL refuses them."""
    fields = {"output_dir": "out", "max_steps": 5, **CPU, **values}
    try:
        return config(**fields)
    except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError):
        args = config(output_dir="out", max_steps=5, **CPU)
        for name, value in fields.items():
            setattr(args, name, value)
        return args


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_every_field_is_carried_over_or_named(algorithm: str) -> None:
    config, _ = CONFIGS[algorithm]
    silent = []
    for each in dataclasses.fields(config):
        if not each.init or each.name in DEFAULTS_OF_CPU:
            continue
        needs = ONLY_WITH.get(each.name, {})
        base = made(config, **needs)
        value = OTHER_VALUES.get(each.name, another(getattr(base, each.name)))
        before = translate(base, algorithm)
        after = translate(made(config, **{**needs, each.name: value}), algorithm)
        is_named = any(note.startswith(f"{each.name}=") for note in after.notes)
        if before.settings == after.settings and not is_named:
            silent.append(f"{each.name}={value!r}")
    assert not silent, silent


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_the_settings_are_accepted(algorithm: str) -> None:
    """With TRL's defaults, and from the error to a trainer."""
    config, trainer = CONFIGS[algorithm]
    args = config(output_dir="out", max_steps=40, **CPU)
    settings = translate(args, algorithm).settings
    made = trainer.from_pretrained("m", **settings).config
    assert made.learning_rate == args.learning_rate
    assert made.adam_beta2 == 0.999
    assert made.num_warmup_steps == 1
    assert made.schedule.kind == "linear" and made.schedule.num_decay_steps == 40
    with pytest.raises(ConfigError) as caught:
        trainer(model="m", args=args)
    assert f"{trainer.__name__}(model=..., {as_arguments(settings)})" in str(caught.value.fix)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0, 3, 0.25])
def test_the_learning_rates_are_transformers(kind: str, warmup: float) -> None:
    """Compares every update after the warm-up, which is a little longer in TRL."""
    extra = {"max_steps": 10, "learning_rate": 1.0, "lr_scheduler_type": kind}
    args = trl.SFTConfig(output_dir="out", warmup_steps=warmup, **extra, **CPU)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    length = args.get_warmup_steps(10)
    scheduler = get_scheduler(kind, optimizer, length, num_training_steps=10)
    theirs = []
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    settings = translate(args, "sft").settings
    made = nemo_rl_core.SFTTrainer.from_pretrained("m", **settings).config
    ours = [learning_rate_at(update, made) for update in range(1, 11)]
    begin = 0 if kind == "constant" else length
    assert ours[begin:] == pytest.approx(theirs[begin:])


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [("grpo", trl.SFTConfig), ("dpo", trl.RewardConfig), ("dpo", trl.GRPOConfig)],
)
def test_a_config_of_another_trainer_is_refused(algorithm: str, config: Any) -> None:
    _, trainer = CONFIGS[algorithm]
    with pytest.raises(ConfigError, match="is not a section") as caught:
        trainer(model="m", args=config(output_dir="out", **CPU))
    assert f"give settings by name: {trainer.__name__}" in str(caught.value.fix)


def test_grpo_by_hand() -> None:
    args = trl.GRPOConfig(
        output_dir="short",
        learning_rate=1e-4,
        seed=7,
        temperature=0.7,
        reward_weights=[0.2, 1.0],
        weight_decay=0.1,
        max_grad_norm=0.2,
        top_k=20,
        num_iterations=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=64,
        max_steps=100,
        warmup_steps=0.1,
        epsilon_high=0.28,
        beta=0.04,
        loss_type="dr_grpo",
        **CPU,
    )
    translation = translate(args, "grpo")
    assert translation.settings == {
        "learning_rate": 1e-4,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 0.2,
        "seed": 7,
        "num_warmup_steps": 11,
        "schedule": {"kind": "linear", "num_decay_steps": 90},
        "num_generations_per_prompt": 4,
        "num_prompts_per_step": 8,
        "num_steps_per_iteration": 100,
        "max_new_tokens": 64,
        "temperature": 0.7,
        "loss": {
            "reduction": {"kind": "constant", "max_tokens": 64},
            "clip_low": 0.2,
            "clip_high": 0.28,
            "kl": {"beta": 0.04},
        },
        "advantage": {"kind": "group_normalized"},
        "reward_weights": [0.2, 1.0],
    }
    assert [note.partition(":")[0] for note in translation.notes] == [
        "top_k=20",
        "output_dir='short'",
        "bf16=False",
        "use_cpu=True",
        "num_iterations=2",
    ]


def test_several_optimizer_steps_per_rollout() -> None:
    """TRL counts optimizer steps; here a step is a rollout with all training on it."""
    args = trl.GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        num_generations=8,
        max_steps=40,
        **CPU,
    )
    settings = translate(args, "grpo").settings
    assert settings["num_prompts_per_step"] == 8  # 64 completions
    assert settings["train_global_batch_size"] == 16
    assert settings["num_steps_per_iteration"] == 10


@pytest.mark.parametrize(
    ("fields", "loss"),
    [
        ({"loss_type": ["ipo"], "beta": 0.3}, {"kind": "ipo", "beta": 0.3}),
        ({"loss_type": ["hinge"]}, {"kind": "hinge", "beta": 0.1}),
        (
            {"loss_type": ["robust"], "label_smoothing": 0.1},
            {"kind": "robust", "beta": 0.1, "label_smoothing": 0.1},
        ),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
            {"kind": "sigmoid", "beta": 0.1, "sft": {"weight": 0.5}},
        ),
    ],
)
def test_dpo_losses_keep_their_kind(fields: dict[str, Any], loss: dict[str, Any]) -> None:
    args = trl.DPOConfig(output_dir="out", max_steps=2, **CPU, **fields)
    settings = translate(args, "dpo").settings
    assert settings["loss"] == loss
    nemo_rl_core.DPOTrainer.from_pretrained("m", **settings)


@pytest.mark.parametrize(
    ("fields", "loss"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"kind": "cispo", "clip_high": 4.0}),
        ({"loss_type": "sapo"}, {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}),
        ({"loss_type": "grpo"}, {"reduction": "sequence_mean", "clip_low": 0.2}),
        (
            {"importance_sampling_level": "sequence", "epsilon": 3e-4},
            {"kind": "gspo", "clip_low": 3e-4, "reduction": "sequence_mean"},
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            {"importance": {"kind": "truncated", "cap": 3.0}},
        ),
    ],
)
def test_grpo_losses(fields: dict[str, Any], loss: dict[str, Any]) -> None:
    args = trl.GRPOConfig(output_dir="out", max_steps=2, **CPU, **fields)
    settings = translate(args, "grpo").settings
    assert loss.items() <= settings["loss"].items()
    assert settings["loss"]["kl"] is None  # TRL's beta is 0
    nemo_rl_core.GRPOTrainer.from_pretrained("m", **settings)


def test_a_warm_up_ratio_is_rounded_up_as_in_transformers() -> None:
    args = trl.SFTConfig(output_dir="out", max_steps=25, warmup_steps=0.1, **CPU)
    expected = args.get_warmup_steps(25) + 1  # see the test of learning rates
    assert translate(args, "sft").settings["num_warmup_steps"] == expected == 4


def test_a_custom_function_replaces_what_trl_says_about_it() -> None:
    args = trl.GRPOConfig(output_dir="out", **CPU)
    with pytest.raises(ConfigError) as raised:
        nemo_rl_core.GRPOTrainer(model="m", args=args, loss_fn=len)
    assert "loss=" not in (raised.value.fix or "") and "advantage=" in (raised.value.fix or "")
