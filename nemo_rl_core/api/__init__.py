"""Training in one call: `train`, and the registry of algorithms."""

from nemo_rl_core.api.functional import get_algorithm, register_algorithm
from nemo_rl_core.api.train import train

__all__ = ["get_algorithm", "register_algorithm", "train"]
