"""Settings of a language model that judges completions."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.patterns import HTTP_URL, VARIABLE
from nemo_rl_core.config.placement import (
    DedicatedBundles,
    OwnPlacement,
    Placement,
    dedicated_bundles,
)
from nemo_rl_core.errors import ConfigError


class JudgeEndpoint(FrozenConfig):
    """A model with an API like OpenAI's (`POST {url}/chat/completions`).

    Attributes:
        url: Base URL, up to and including `/v1`.
        model: Name of the model on the server.
        api_key_variable: Environment variable with the key; None sends no key.
        reply_timeout_seconds: Time limit of one reply, including all attempts.
        num_retries: Number of further attempts if the server is busy or fails.
        max_concurrency: Maximum number of concurrent requests.
    """

    renamed: ClassVar[Mapping[str, str]] = {"timeout_seconds": "reply_timeout_seconds"}
    secrets_from: ClassVar[str] = "name the variable with the key in api_key_variable"

    kind: Literal["endpoint"] = "endpoint"
    url: str = Field(pattern=HTTP_URL)
    model: str = Field(min_length=1)
    api_key_variable: str | None = Field(default=None, pattern=VARIABLE)
    reply_timeout_seconds: PositiveFloat = 60.0
    num_retries: NonNegativeInt = 3
    max_concurrency: PositiveInt = 8


_SHARE = 0.5


class JudgeModel(FrozenConfig):
    """A model in a vLLM worker of this run, with greedy decoding.

    By default it runs on the trainer's first GPU, and is only awake while it scores, when the
    policy's engine and the trainer have released their memory. On dedicated GPUs it is always
    awake.

    Attributes:
        model: A transformers folder.
        max_model_len: Maximum length of question and reply in tokens.
        kv_cache_gib: Size of its KV cache on a CPU, in addition to that of the policy's engine.
        gpu_memory_utilization: Fraction of the GPU's memory for weights and KV cache while it is
            awake. A recipe that omits it gets 0.9 for a judge on dedicated GPUs.
        dtype: Dtype of weights and activations. A recipe that omits it gets bfloat16 if its cluster
            has GPUs.
        placement: Location of the judge. `colocated`: on the trainer's first GPU, taking turns with
            everything else there. `{own: 2}`: two copies on two dedicated GPUs in addition to those
            of `cluster.num_workers`; without GPUs, in separate processes.
        tensor_parallel_size: Number of dedicated GPUs that share each weight matrix of one copy.
    """

    kind: Literal["model"] = "model"
    model: str = Field(min_length=1)
    max_model_len: PositiveInt = 4096
    kv_cache_gib: PositiveInt = 1
    # The default is not dumped, so that cache keys from before the setting stay valid.
    gpu_memory_utilization: float = Field(
        default=_SHARE, gt=0, lt=1, exclude_if=lambda value: value == _SHARE
    )
    dtype: DType = "float32"
    placement: Placement = Field(default="colocated", exclude_if=lambda value: value == "colocated")
    tensor_parallel_size: PositiveInt = Field(default=1, exclude_if=lambda value: value == 1)

    def dedicated_bundles(self, name: str, path: str) -> tuple[DedicatedBundles, ...]:
        """Returns its dedicated bundles; empty if it shares the trainer's."""
        return dedicated_bundles(
            self.placement, name, path, ranks_per_engine=self.tensor_parallel_size
        )

    @model_validator(mode="after")
    def _copies_fill_their_bundles(self) -> "JudgeModel":
        number = self.placement.own if isinstance(self.placement, OwnPlacement) else 1
        size = self.tensor_parallel_size
        if number % size == 0:
            return self
        raise ConfigError(
            f"a judge over {size} workers does not fill its bundles",
            expected=f"placement: {{own: {size}}}, or a multiple of {size}",
            got="placement: colocated"
            if self.placement == "colocated"
            else f"placement: {{own: {number}}}",
            fix=f"set placement.own to {-(-number // size) * size}, or remove tensor_parallel_size",
        )


class LLMJudge(FrozenConfig):
    """A language model's grade of a completion, scaled to between 0 and 1.

    Attributes:
        judge: The judging model and its location.
        instruction: Grading instruction for the judge.
        highest: The best grade; the worst is 0.
        max_new_tokens: Maximum length of a reply.
        version: Version of the grader; see `MathVerify`.
    """

    kind: Literal["llm_judge"] = "llm_judge"
    judge: Annotated[JudgeEndpoint | JudgeModel, Field(discriminator="kind")]
    instruction: str = Field(default="Say how well the response answers the prompt.", min_length=1)
    highest: PositiveInt = 10
    max_new_tokens: PositiveInt = 512
    version: Literal[2] = 2

    @model_validator(mode="after")
    def _leaves_room_for_questions(self) -> "LLMJudge":
        judge = self.judge
        if isinstance(judge, JudgeModel) and judge.max_model_len <= self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} leaves a question no room within "
                f"judge.max_model_len {judge.max_model_len}"
            )
        return self
