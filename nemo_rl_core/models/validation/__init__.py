"""Whether trainer and rollout engine agree on the probability of the same tokens."""

from nemo_rl_core.models.validation.diagnostics import (
    test_generation_consistency,
    test_max_model_len_respected,
)
from nemo_rl_core.models.validation.gate import (
    agreement,
    agreement_metrics,
    check_consistency,
)
from nemo_rl_core.models.validation.logprobs import (
    log_probability_error,
    validate_log_probability_consistency,
)

__all__ = [
    "agreement",
    "agreement_metrics",
    "check_consistency",
    "log_probability_error",
    "test_generation_consistency",
    "test_max_model_len_respected",
    "validate_log_probability_consistency",
]
