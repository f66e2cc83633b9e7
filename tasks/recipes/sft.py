"""The recipe of a supervised fine-tuning."""

from nemo_rl_core.algorithms.sft.config import SFTConfig
from tasks.recipes.common import PipelineRecipe


class SFTRecipe(PipelineRecipe):
    """Recipe of a supervised fine-tuning.

    Attributes:
        sft: Supervised fine-tuning.
    """

    sft: SFTConfig = SFTConfig()

    @property
    def trains_on(self) -> tuple[str, ...]:
        """Rows with a completion to imitate."""
        return ("prompts", "conversations", "text")

    @property
    def samples_rows(self) -> bool:
        """False: supervised fine-tuning samples nothing."""
        return False
