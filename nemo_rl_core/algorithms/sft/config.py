"""Settings of supervised fine-tuning."""

from typing import ClassVar

from pydantic import PositiveInt

from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings


class SFTConfig(LoopConfig):
    """`num_steps` optimizer steps of `global_batch_size` sequences each.

    Attributes:
        num_steps: Optimizer steps.
        global_batch_size: Sequences of one optimizer step, over all ranks.
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


class SFTSettings(TrainerSettings):
    """All settings of `SFTTrainer`."""

    sft: SFTConfig = SFTConfig()
