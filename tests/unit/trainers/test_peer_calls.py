"""TRL's words in Python: taken where they mean the same, else the line to write is named."""

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
from nemo_rl_core.trainers.overrides import hint_of
from tests.training import AddConfig, AddTrainer

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """In TRL's form."""
    return [float(each) for each in completions]


def test_a_trainer_is_made_and_trained_as_trls(tiny_model: Path) -> None:
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


def test_what_fit_is_given_counts_before_what_the_trainer_was(tiny_model: Path) -> None:
    trainer = AddTrainer(str(tiny_model), train_dataset=ROWS[:3], num_steps=1)
    assert trainer.fit(ROWS, reward_funcs=digits).manifest.parents[1].stage == "prepare_data train"
    with pytest.raises(ConfigError, match="reward_funcs is reward_fn, which is given too"):
        trainer.fit(ROWS, reward_fn=digits, reward_funcs=[digits])
    with pytest.raises(ConfigError, match="there are no rows"):
        AddTrainer(str(tiny_model)).train()


def test_a_section_as_args_keeps_the_defaults_of_the_model(tiny_model: Path) -> None:
    """What was not given still follows from the model, as with settings by name."""
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
def test_a_section_answers_for_what_is_elsewhere(name: str, fix: str) -> None:
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


def test_what_lora_lacks_here_is_said() -> None:
    given = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=".*_proj")
    with pytest.raises(ConfigError, match="there is no lora_dropout or a pattern as target"):
        GRPOTrainer.from_pretrained("m", peft_config=given)


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
        ("warmup_ratio", 0.1, "counted and no ratio; in Python num_warmup_steps=…"),
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
def test_a_setting_of_trl_is_answered_with_the_line_to_write(
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
def test_every_line_is_accepted_where_it_is_written(trainer: Any) -> None:
    hint = hint_of(trainer.settings_class, trainer.algorithm)
    written = {}
    for name in PEER_NAMES:
        place = PEER_NAMES[name]
        is_share = "clip_" in place or "utilization" in place
        is_of_cluster = "parallel_size" in place or "engines" in place
        value: Any = 0.5 if is_share else 1 if is_of_cluster else "checkpointing" in name or 2
        said = hint(name, value) or ""
        line = said.removeprefix("write ")
        if said.startswith("write ") and "first" not in said and "tracking" not in said:
            trainer.from_pretrained("m", **eval(f"dict({line})"))  # noqa: S307
            written[name] = line
    assert len(written) > 10


@pytest.mark.parametrize(
    ("name", "algorithm", "preset"),
    [("GRPO", "grpo", None), ("rloo", "grpo", "rloo"), ("Dr-GRPO", "grpo", "dr_grpo")],
)
def test_algorithms_go_by_any_case_and_presets_by_their_names(
    name: str, algorithm: str, preset: str | None
) -> None:
    found = algorithm_named(name, {})
    assert found.trainer.algorithm == algorithm
    assert found.overrides.get("preset") == preset
    config = found.trainer.from_pretrained("m", **found.overrides).config
    if preset == "rloo":
        assert config.advantage.kind == "leave_one_out"


def test_an_algorithm_of_another_name_is_answered_with_the_line() -> None:
    with pytest.raises(ConfigError, match=r"fix: write algorithm=\"dpo\", loss=.*kto"):
        nemo_rl_core.train("m", ROWS, algorithm="KTO")
    with pytest.raises(ConfigError, match="leave preset out"):
        nemo_rl_core.train("m", ROWS, algorithm="rloo", preset="gspo")


def test_classes_of_trl_are_there_or_named() -> None:
    from nemo_rl_core import DPOConfig, SFTConfig

    assert nemo_rl_core.GRPOConfig is GRPOConfig
    assert SFTConfig(num_steps=3).num_steps == 3
    assert DPOConfig(loss={"kind": "kto"}).loss.kind == "kto"
    with pytest.raises(ImportError, match=r'here it is train.*algorithm="rloo"'):
        from nemo_rl_core import RLOOTrainer  # noqa: F401
