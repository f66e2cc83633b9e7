"""Settings of supervised fine-tuning."""

from pydantic import PositiveInt

from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings


class SFTConfig(LoopConfig):
    """`num_steps` optimizer steps of `global_batch_size` sequences each.

    Attributes:
        num_steps: Optimizer steps.
        global_batch_size: Sequences of one optimizer step, over all ranks.
    """

    num_steps: PositiveInt = 250
    global_batch_size: PositiveInt = 128


class SFTSettings(TrainerSettings):
    """All settings of `SFTTrainer`."""

    sft: SFTConfig = SFTConfig()
