"""Settings of supervised fine-tuning."""

from pydantic import PositiveInt

from nemo_rl_core.config.training import OptimizerConfig


class SFTConfig(OptimizerConfig):
    """`num_steps` optimizer steps of `global_batch_size` sequences each."""

    num_steps: PositiveInt = 250
    global_batch_size: PositiveInt = 128
    max_tokens_per_microbatch: PositiveInt = 8192
    save_every_num_steps: PositiveInt = 50
