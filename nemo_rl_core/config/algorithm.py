"""The declaration of an algorithm, which its config class holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """Facts about a built-in algorithm that planning, defaults and pipelines read.

    Attributes:
        name: Its section in recipes, and its name in Python.
        stage: The stage of the pipelines that trains with it.
        pipeline: The pipeline named after it: a module of `workflows`, and the workflow in it.
        trainer: Its trainer, a class in `trainer.py` of its folder.
        learning_rate: Default for a pretrained model: what TRL, NeMo RL and verl train models of
            1 to 8 B with.
        rows_per_step: The setting with the number of rows that a step takes.
        samples: Whether it samples completions.
        has_critic: Whether it trains a critic in addition to the policy.
        has_scalar_head: Whether the trained model has a scalar head instead of a language head.
        has_teacher: Whether the model whose logprobs it reads is another model, a teacher.
    """

    name: str
    stage: str
    pipeline: str
    trainer: str
    learning_rate: float
    rows_per_step: str
    samples: bool = False
    has_critic: bool = False
    has_scalar_head: bool = False
    has_teacher: bool = False
