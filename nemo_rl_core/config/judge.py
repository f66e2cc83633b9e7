"""Settings of a language model that judges completions."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.patterns import HTTP_URL, VARIABLE
from nemo_rl_core.config.placement import OwnBundles, OwnPlacement, Placement, own_bundles
from nemo_rl_core.errors import ConfigError


class JudgeEndpoint(FrozenConfig):
    """A model behind an API like OpenAI's (`POST {url}/chat/completions`).

    Attributes:
        url: Up to and with `/v1`.
        model: As the server calls it.
        api_key_variable: The environment variable that holds the key; None sends none.
        reply_timeout_seconds: For one reply, all its attempts together.
        num_retries: Attempts after the first, where the server is busy or fails.
        max_concurrency: The most requests at a time.
    """

    renamed: ClassVar[Mapping[str, str]] = {"timeout_seconds": "reply_timeout_seconds"}
    secrets_from: ClassVar[str] = "name the variable that holds the key in api_key_variable"

    kind: Literal["endpoint"] = "endpoint"
    url: str = Field(pattern=HTTP_URL)
    model: str = Field(min_length=1)
    api_key_variable: str | None = Field(default=None, pattern=VARIABLE)
    reply_timeout_seconds: PositiveFloat = 60.0
    num_retries: NonNegativeInt = 3
    max_concurrency: PositiveInt = 8


_SHARE = 0.5


class JudgeModel(FrozenConfig):
    """A model in a vLLM worker of this run; greedy.

    On GPUs it lies on the first one of the trainer, and is awake only while it is asked: the
    policy's engine and the trainer have given their share back then. On GPUs of its own it is
    always awake.

    Attributes:
        model: A transformers folder.
        max_model_len: Question and reply, in tokens.
        kv_cache_gib: Of its own, beside that of the policy's engine, on a CPU.
        gpu_memory_utilization: The share of the GPU's memory for weights, keys and values while it
            is asked. A recipe that does not say it has 0.9 for a judge on GPUs of its own.
        dtype: Type of weights and activations. A recipe that does not say which computes in
            bfloat16 where its cluster has GPUs.
        placement: Where it runs. `colocated`: on the trainer's first GPU, in turns with all else
            there. `{own: 2}`: two copies on two GPUs besides those of `cluster.num_workers`, beside
            engines and trainer; without GPUs, in processes of their own.
        tensor_parallel_size: GPUs of its own that share each weight matrix of one copy.
    """

    kind: Literal["model"] = "model"
    model: str = Field(min_length=1)
    max_model_len: PositiveInt = 4096
    kv_cache_gib: PositiveInt = 1
    # Left out by default, so that keys of stages are what they were without it.
    gpu_memory_utilization: float = Field(
        default=_SHARE, gt=0, lt=1, exclude_if=lambda said: said == _SHARE
    )
    dtype: DType = "float32"
    placement: Placement = Field(default="colocated", exclude_if=lambda said: said == "colocated")
    tensor_parallel_size: PositiveInt = Field(default=1, exclude_if=lambda said: said == 1)

    def own_bundles(self, name: str, path: str) -> tuple[OwnBundles, ...]:
        """Its bundles besides the trainer's; none for one that shares those.

        Args:
            name: Of its workers.
            path: Of this section in a recipe.
        """
        return own_bundles(self.placement, name, path, ranks_per_engine=self.tensor_parallel_size)

    @model_validator(mode="after")
    def _copies_fill_their_bundles(self) -> "JudgeModel":
        own = self.placement.own if isinstance(self.placement, OwnPlacement) else 1
        size = self.tensor_parallel_size
        if own % size == 0:
            return self
        raise ConfigError(
            f"a judge over {size} workers does not fill its bundles",
            expected=f"placement: {{own: {size}}}, or a multiple of {size}",
            got="placement: colocated"
            if self.placement == "colocated"
            else f"placement: {{own: {own}}}",
            fix=f"set placement.own to {-(-own // size) * size}, or leave tensor_parallel_size out",
        )


class LLMJudge(FrozenConfig):
    """What a language model thinks of a completion: its mark, brought to between 0 and 1.

    Attributes:
        judge: Which model, and where it runs.
        instruction: What the judge is told to give marks for.
        highest: The best mark; the worst is 0.
        max_new_tokens: Of a reply.
    """

    kind: Literal["llm_judge"] = "llm_judge"
    judge: Annotated[JudgeEndpoint | JudgeModel, Field(discriminator="kind")]
    instruction: str = Field(default="Say how well the response answers the prompt.", min_length=1)
    highest: PositiveInt = 10
    max_new_tokens: PositiveInt = 512

    @model_validator(mode="after")
    def _leaves_room_for_questions(self) -> "LLMJudge":
        judge = self.judge
        if isinstance(judge, JudgeModel) and judge.max_model_len <= self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} leaves a question no room within "
                f"judge.max_model_len {judge.max_model_len}"
            )
        return self
