"""Options of a policy that is named by its model: the optimizer's, and those of sampling."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl_core.config.model import DType
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.distributed.resources import count_gpus

UNBOUNDED_CONTEXT = 2**31


class PolicyOptions(OptimizerConfig):
    """The options of a pretrained policy besides the settings of its backend.

    Attributes:
        dtype: Type of the matrix products; `auto` is bfloat16 on a GPU, else float32.
        temperature: What logits are divided by.
        max_new_tokens: The longest completion of `generate`.
        top_p: `generate` draws from the likeliest tokens that together have this probability.
        top_k: `generate` draws from so many likeliest tokens; None draws from all.
        repetition_penalty: `generate` divides the logits of tokens that came before by it.
        do_sample: False takes the likeliest token at every step, also where `greedy` is not given.
        eos_token_id: One token or several that end a completion, besides the model's own.
        pad_token_id: Stands behind the shorter completions of `generate`.
    """

    @property
    def dtype_here(self) -> DType:
        """The type on this machine."""
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
        """Of `eos_token_id`."""
        ends = self.eos_token_id
        if ends is None:
            return ()
        return (ends,) if isinstance(ends, int) else tuple(ends)

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of a `SamplingConfig`."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature if self.do_sample else 0.0,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
        }
