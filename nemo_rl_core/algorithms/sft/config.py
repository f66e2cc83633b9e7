"""Settings of supervised fine-tuning."""

from typing import ClassVar

from pydantic import Field, PositiveInt

from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.functions import CustomLoss
from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings


class SFTConfig(LoopConfig):
    """`num_steps` optimizer steps of `global_batch_size` sequences each.

    Attributes:
        num_steps: Optimizer steps.
        global_batch_size: Sequences of one optimizer step, over all ranks.
        loss: A custom loss; None takes the negative log-likelihood per token.
    """

    algorithm: ClassVar[Algorithm] = Algorithm(
        "sft",
        stage="train_sft",
        pipeline="sft",
        trainer="SFTTrainer",
        learning_rate=2e-5,
        rows_per_step="global_batch_size",
    )

    num_steps: PositiveInt = 250
    global_batch_size: PositiveInt = 128
    # Excluded by default, so that keys of stages do not change.
    loss: CustomLoss | None = Field(default=None, exclude_if=lambda value: value is None)


class SFTSettings(TrainerSettings):
    """All settings of `SFTTrainer`.

    Attributes:
        tools: Tools of the environment, which prompts show, by task, as JSON; see `shown_tools`.
    """

    sft: SFTConfig = SFTConfig()
    tools: dict[str, str] = Field(default_factory=dict, exclude_if=lambda value: not value)
