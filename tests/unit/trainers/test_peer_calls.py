"""TRL's names in Python: accepted if they mean the same, else refused with the line to write."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

import nemo_rl_core
from nemo_rl_core.algorithms.grpo.config import GRPOConfig
from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.algorithms.sft.trainer import SFTTrainer
from nemo_rl_core.api.functional import algorithm_named
from nemo_rl_core.config.peer_names import PEER_NAMES
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.fit.overrides import hint_of
from tests.training import AddConfig, AddTrainer

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """In TRL's form."""
    return [float(each) for each in completions]


def test_a_trainer_is_constructed_and_trained_like_trls(tiny_model: Path) -> None:
    trainer = AddTrainer(
        model=str(tiny_model),
        args=AddConfig(num_steps=2),
        reward_funcs=[digits, digits],
        reward_weights=[1.0, 0.5],
        train_dataset=ROWS[:6],
        eval_dataset=ROWS[6:],
    )
    result = trainer.train()
    plain = AddTrainer.from_pretrained(tiny_model, num_steps=2).fit(
        ROWS[:6], reward_fn=[digits, digits], reward_weights=[1.0, 0.5], validation=ROWS[6:]
    )
    assert result.step == 2
    assert result.manifest.weights_hash == plain.manifest.weights_hash


def test_arguments_of_fit_override_those_of_the_constructor(tiny_model: Path) -> None:
    trainer = AddTrainer(str(tiny_model), train_dataset=ROWS[:3], num_steps=1)
    assert trainer.fit(ROWS, reward_funcs=digits).manifest.parents[1].stage == "prepare_data train"
    with pytest.raises(ConfigError, match="reward_funcs means reward_fn, which is also given"):
        trainer.fit(ROWS, reward_fn=digits, reward_funcs=[digits])
    with pytest.raises(ConfigError, match="there are no rows"):
        AddTrainer(str(tiny_model)).train()


def test_a_section_as_args_keeps_the_defaults_of_the_model(tiny_model: Path) -> None:
    """Other settings still depend on the model, the same as for settings by name."""
    args = GRPOConfig(num_prompts_per_step=8, loss={"kind": "gspo"})
    one = GRPOTrainer(model=str(tiny_model), args=args)
    other = GRPOTrainer.from_pretrained(
        str(tiny_model), num_prompts_per_step=8, loss={"kind": "gspo"}
    )
    assert one.settings == other.settings
    assert one.settings.grpo.learning_rate != GRPOConfig().learning_rate


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("num_generations", "here it is grpo.num_generations_per_prompt"),
        ("seed", "here it is seed, of the trainer"),
        ("reward_weights", "here it is reward_weights of train and fit"),
        ("logging_steps", "leave it out: every step is recorded"),
    ],
)
def test_a_setting_of_another_section_is_refused_with_the_fix(name: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**{name: 8})
    assert str(caught.value.fix).startswith(fix)


def test_a_loaded_model_and_a_missing_one_are_refused(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(ConfigError, match="a model is named here, not loaded"):
        GRPOTrainer(model=loaded, train_dataset=ROWS)
    for trainer in (GRPOTrainer, nemo_rl_core.PPOTrainer):
        with pytest.raises(ConfigError, match=f"this {trainer.__name__} has no model to train"):
            trainer(train_dataset=ROWS)


def test_unsupported_options_of_lora_are_named() -> None:
    peft_config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=".*_proj")
    with pytest.raises(ConfigError, match="there is no lora_dropout or a pattern as target"):
        GRPOTrainer.from_pretrained("m", peft_config=peft_config)


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("num_generations", 8, "write num_generations_per_prompt=8"),
        ("max_completion_length", 64, "write max_new_tokens=64"),
        ("max_steps", 10, "write num_steps_per_iteration=10"),
        ("beta", 0.04, "write loss={'kl': {'beta': 0.04}}"),
        ("beta", 0, "write loss={'kl': None}"),
        ("epsilon_high", 0.28, "write loss={'clip_high': 0.28}"),
        ("num_steps", 10, "write num_steps_per_iteration=10"),
        ("lora", {"rank": 8}, "write training={'lora': {'rank': 8}}"),
        ("report_to", "wandb", "write tracking={'trackers': [{'kind': 'wandb'}]}"),
        ("report_to", "none", "leave it out"),
        ("output_dir", "out/short", "name='short'"),
        ("gradient_checkpointing", True, "in Python training={'activation_checkpointing': …}"),
        ("loss_agg_mode", "token-mean", "in Python loss={'reduction': …}"),
        ("logging_steps", 5, "leave it out: every step is recorded"),
        ("eval_strategy", "steps", "leave it out: validate_every_num_steps=... says when"),
        ("warmup_ratio", 0.1, "a number instead of a ratio; in Python num_warmup_steps=…"),
        (
            "peft_config",
            {"r": 4},
            "write training={'lora': {'rank': 4, 'alpha': 8.0}}",
        ),
        (
            "peft_config",
            LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]),
            "write training={'lora': {'rank': 8, 'alpha': 16.0, 'target_modules': ['q_proj']}}",
        ),
    ],
)
def test_a_setting_of_trl_is_refused_with_the_line_to_write(
    name: str, value: Any, line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOTrainer.from_pretrained("m", **{name: value})
    assert line in str(caught.value.fix)
    assert caught.value.expected is None, "dozens of settings would hide the line"
    written = str(caught.value.fix).partition("write ")[2]
    if written and not written.startswith("tracking"):
        GRPOTrainer.from_pretrained("m", **eval(f"dict({written})"))  # noqa: S307


@pytest.mark.parametrize(
    "trainer", [GRPOTrainer, SFTTrainer, nemo_rl_core.DPOTrainer, nemo_rl_core.PPOTrainer]
)
def test_every_suggested_line_is_accepted(trainer: Any) -> None:
    hint = hint_of(trainer.settings_class, trainer.algorithm)
    written = {}
    for name in PEER_NAMES:
        path = PEER_NAMES[name]
        is_share = "clip_" in path or "utilization" in path
        is_of_cluster = "parallel_size" in path or "engines" in path
        value: Any = 0.5 if is_share else 1 if is_of_cluster else "checkpointing" in name or 2
        suggestion = hint(name, value) or ""
        line = suggestion.removeprefix("write ")
        if (
            suggestion.startswith("write ")
            and "first" not in suggestion
            and "tracking" not in suggestion
        ):
            trainer.from_pretrained("m", **eval(f"dict({line})"))  # noqa: S307
            written[name] = line
    assert len(written) > 10


@pytest.mark.parametrize(
    ("name", "algorithm", "preset"),
    [("GRPO", "grpo", None), ("rloo", "grpo", "rloo"), ("Dr-GRPO", "grpo", "dr_grpo")],
)
def test_algorithms_are_named_in_any_case_and_presets_by_name(
    name: str, algorithm: str, preset: str | None
) -> None:
    lookup = algorithm_named(name, {})
    assert lookup.trainer.algorithm == algorithm
    assert lookup.overrides.get("preset") == preset
    config = lookup.trainer.from_pretrained("m", **lookup.overrides).config
    if preset == "rloo":
        assert config.advantage.kind == "leave_one_out"


def test_another_name_of_an_algorithm_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(ConfigError, match=r"fix: write algorithm=\"dpo\", loss=.*kto"):
        nemo_rl_core.train("m", ROWS, algorithm="KTO")
    with pytest.raises(ConfigError, match="leave preset out"):
        nemo_rl_core.train("m", ROWS, algorithm="rloo", preset="gspo")


def test_classes_of_trl_exist_or_are_refused_with_a_hint() -> None:
    from nemo_rl_core import DPOConfig, SFTConfig

    assert nemo_rl_core.GRPOConfig is GRPOConfig
    assert SFTConfig(num_steps=3).num_steps == 3
    assert DPOConfig(loss={"kind": "kto"}).loss.kind == "kto"
    with pytest.raises(ImportError, match=r'here it is train.*algorithm="rloo"'):
        from nemo_rl_core import RLOOTrainer  # noqa: F401
