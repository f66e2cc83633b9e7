"""Options of the optimizer and of sampling, for a policy that is named by its model."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_core.config.model import DType
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.distributed.resources import count_gpus

UNBOUNDED_CONTEXT = 2**31


class PolicyOptions(OptimizerConfig):
    """Options of a pretrained policy, in addition to the settings of its backend.

    Attributes:
        dtype: Type of matrix products; `auto` means bfloat16 on GPUs, else float32.
        temperature: Divisor of the logits.
        max_new_tokens: Maximum length of a completion of `generate`.
        top_p: Total probability of the likeliest tokens that `generate` samples from.
        top_k: Number of likeliest tokens that `generate` samples from; None samples from all.
        repetition_penalty: Divisor of the logits of tokens that occurred before, in `generate`.
        do_sample: False always takes the likeliest token, also without `greedy`.
        eos_token_id: One token or several that end a completion, in addition to the model's.
        pad_token_id: Padding after the shorter completions of `generate`.
    """

    @property
    def resolved_dtype(self) -> DType:
        """`dtype`, or what `auto` means on this machine."""
        if self.dtype == "auto":
            return "bfloat16" if count_gpus() else "float32"
        return self.dtype

    learning_rate: PositiveFloat = 1e-6
    dtype: DType | Literal["auto"] = "auto"
    seed: NonNegativeInt = 0
    temperature: PositiveFloat = 1.0
    max_tokens_per_microbatch: PositiveInt = 8192
    max_new_tokens: PositiveInt = 100
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: PositiveInt | None = None
    repetition_penalty: PositiveFloat = 1.0
    do_sample: bool = True
    eos_token_id: NonNegativeInt | list[NonNegativeInt] | None = None
    pad_token_id: NonNegativeInt = 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens of `eos_token_id`."""
        ends = self.eos_token_id
        if ends is None:
            return ()
        return (ends,) if isinstance(ends, int) else tuple(ends)

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a `SamplingConfig`."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature if self.do_sample else 0.0,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
        }
