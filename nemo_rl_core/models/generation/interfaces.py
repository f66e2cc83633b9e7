"""What a generation engine takes and gives; yours may implement it, too."""

from nemo_rl_core.models.interfaces import (
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
)

__all__ = ["GenerationDatumSpec", "GenerationInterface", "GenerationOutputSpec"]
