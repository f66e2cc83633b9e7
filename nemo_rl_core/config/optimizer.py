"""Settings of the optimizer and its learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
)

from nemo_rl_core.config.base import Bound, FrozenConfig, kind_or


class ConstantSchedule(FrozenConfig):
    """The full learning rate after the warm-up."""

    kind: Literal["constant"] = "constant"


class _Decay(FrozenConfig):
    """Decay from the full learning rate to a fraction of it.

    Attributes:
        num_decay_steps: Optimizer steps from the end of the warm-up to the lowest learning rate.
        final_fraction: The lowest learning rate as a fraction of `learning_rate`.
    """

    num_decay_steps: PositiveInt
    final_fraction: float = Field(default=0.0, ge=0, le=1)


class LinearSchedule(_Decay):
    """Linear decay from the full rate to `final_fraction` of it, then constant."""

    kind: Literal["linear"] = "linear"


class CosineSchedule(_Decay):
    """Cosine decay from the full rate to `final_fraction` of it: Loshchilov and Hutter (2017)."""

    kind: Literal["cosine"] = "cosine"


ScheduleConfig = Annotated[
    Annotated[ConstantSchedule, Tag("constant")]
    | Annotated[LinearSchedule, Tag("linear")]
    | Annotated[CosineSchedule, Tag("cosine")],
    kind_or("constant"),
]


class OptimizerConfig(FrozenConfig):
    """AdamW with linear warm-up, a schedule after it, and clipping by global norm.

    `moments: 8bit` keeps AdamW's two moments in blocks of 8 bits (Dettmers et al., 2022), with
    bitsandbytes.

    Attributes:
        learning_rate: The highest learning rate, reached after the warm-up.
        num_warmup_steps: Optimizer steps over which the learning rate rises linearly from 0.
        weight_decay: Decoupled weight decay (AdamW).
        adam_beta1: Decay rate of the first moment.
        adam_beta2: Decay rate of the second moment.
        adam_epsilon: Added to the denominator of an update.
        max_grad_norm: Global norm to which gradients are clipped.
        schedule: Schedule of the learning rate after the warm-up.
        moments: Dtype of the optimizer's two moments.
    """

    learning_rate: PositiveFloat = 1e-3
    num_warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: Bound = 1.0
    schedule: ScheduleConfig = ConstantSchedule()
    moments: Literal["float32", "8bit"] = "float32"
