"""The consistency functions with a real trainer and a real engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.models import validation
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.validation import (
    log_probability_error,
    validate_log_probability_consistency,
)
from nemo_rl_core.models.validation.diagnostics import random_prompts
from nemo_rl_core.types import Prompt
from workflows.cli import group


def test_trainer_and_engine_agree_until_one_of_them_learns(
    engine: VllmGeneration, make_policy: Callable, prompts: list[Prompt]
) -> None:
    policy = make_policy()
    rows = [prompt.token_ids for prompt in prompts]
    batch = collate(rows, [[True] * len(row) for row in rows])
    width = torch.arange(batch["input_ids"].shape[1])
    test_data = BatchedDataDict(
        {
            "input_ids": batch["input_ids"],
            "attention_mask": (width < batch["input_lengths"][:, None]).long(),
        }
    )
    assert log_probability_error(policy, engine, test_data) == pytest.approx(1, abs=1e-4)
    assert validate_log_probability_consistency(policy, engine, test_data)
    policy.train(batch, NLLLoss())
    assert not validate_log_probability_consistency(policy, engine, test_data)
    engine.update_weights(policy)
    assert validate_log_probability_consistency(policy, engine, test_data, threshold=1.001)


@pytest.mark.thorough
def test_the_command_accepts_a_model_and_reports_its_measurements(tiny_model: Path) -> None:
    for check, measured in {
        "decode-against-prefill": "token_mult_prob_error 1.0000",
        "max-model-len": "longest sequence 64 tokens",
    }.items():
        result = CliRunner().invoke(group, ["check-model", str(tiny_model), "--only", check])
        assert result.exit_code == 0, result.output
        assert measured in result.stdout


def test_the_command_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(group, ["check-model", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not a model" in result.stderr


def test_pytest_collects_none_of_the_functions() -> None:
    assert not validation.test_generation_consistency.__test__
    assert not validation.test_max_model_len_respected.__test__


def test_random_prompts_are_always_the_same(tiny_model: Path) -> None:
    first, second = (random_prompts(tiny_model, lengths=[1, 5]) for _ in range(2))
    assert torch.equal(first["input_ids"], second["input_ids"])
    assert first["input_ids"].shape == (2, 5)
