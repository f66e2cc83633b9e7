"""The name that is suggested for a misspelt one."""

import pytest

from nemo_rl_core.config.names import closest_name, unknown_names
from nemo_rl_core.errors import DataError


@pytest.mark.parametrize(
    ("name", "choices", "meant"),
    [
        ("lerning_rate", ["learning_rate", "num_steps"], "learning_rate"),  # one letter too few
        ("sead", ["seed", "step"], "seed"),  # another letter
        ("clip_hihg", ["clip_low", "clip_high"], "clip_high"),  # neighbors swapped
        ("nmu_steps", ["num_steps"], "num_steps"),  # also in a short word
        ("learningRate", ["learning_rate"], "learning_rate"),
        ("dr-grpo", ["grpo", "dr_grpo"], "dr_grpo"),
        ("generashion", ["generation"], "generation"),  # two letters of a long word
        ("num_step_per_iterations", ["num_steps_per_iteration"], "num_steps_per_iteration"),
    ],
)
def test_typing_slip_has_a_suggestion(name: str, choices: list[str], meant: str) -> None:
    assert closest_name(name, choices) == meant


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("top_l", ["top_p", "top_k"]),  # two are equally close
        ("top_p", ["top_k"]),
        ("min_tokens", ["max_tokens"]),
        ("adam_beta1", ["adam_beta2"]),
        ("cpu_hour", ["gpu_hour"]),
        ("clip_low", ["clip_high"]),
        ("num_prompt", ["num_prompts_per_step"]),  # a part of a name is another name
        ("max_steps", ["num_steps"]),
        ("lr", ["learning_rate"]),
        ("lernign_raet_x", ["learning_rate_x"]),  # three slips
        ("anything", []),
    ],
)
def test_another_name_has_no_suggestion(name: str, choices: list[str]) -> None:
    assert closest_name(name, choices) is None


def test_the_fewest_slips_win() -> None:
    assert closest_name("num_tasks", ["num_task", "num_taks"]) is None
    assert closest_name("validatoins", ["validation", "validations"]) == "validations"


def test_several_names_share_one_error() -> None:
    error = unknown_names(
        "there is no part",
        ["hed", "xyz"],
        ["head", "tail"],
        otherwise="leave it out",
        error=DataError,
    )
    assert type(error) is DataError
    assert error.problem == "there is no part 'hed', 'xyz'"
    assert (error.expected, error.got) == ("one of head, tail", "hed, xyz")
    assert error.fix == "'hed': did you mean 'head'?; 'xyz': leave it out"
