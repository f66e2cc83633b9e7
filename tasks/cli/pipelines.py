"""The pipelines that commands know by name."""

PIPELINES = {
    "convert": "convert_model",
    "distill": "distill",
    "dpo": "dpo",
    "evaluate": "evaluate_model",
    "grpo": "grpo",
    "post_train": "post_train",
    "ppo": "ppo",
    "regression": "check_regression",
    "reward_model": "reward_model",
    "sft": "sft",
    "sweep": "sweep",
}
"""Files of `workflows/`, and the workflow in each."""
