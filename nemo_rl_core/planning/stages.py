"""Computes the `StageLoad` of a training stage from the section of its algorithm."""

from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.trainer import LoopConfig
from nemo_rl_core.config.training import TrainingConfig
from nemo_rl_core.planning.load import SamplingLoad, StageLoad, TrainingLoad
from nemo_rl_core.planning.sizes import ModelSizes

_MANY = 2**31
"""Sequences per step if a section has no number: more than fit a micro-batch."""


@dataclass(frozen=True)
class Rollouts:
    """Sampling settings of a stage."""

    generation: GenerationConfig
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class StageSetup:
    """Backend, cluster and dtype of a stage."""

    training: TrainingConfig
    cluster: ClusterConfig
    dtype: DType


def training_stage(
    name: str,
    section: str,
    config: LoopConfig,
    setup: StageSetup,
    *,
    sizes: ModelSizes,
    reference: ModelSizes | None,
    rollouts: Rollouts | None,
    max_sequence_tokens: int | None = None,
) -> StageLoad:
    """Returns the load of a stage; `reference` is the model whose logprobs it reads, if any."""
    budget, algorithm = config.max_tokens_per_microbatch, config.algorithm
    has_critic = algorithm is not None and algorithm.has_critic
    training = TrainingLoad(
        setup.training,
        budget,
        path=f"{section}.max_tokens_per_microbatch",
        num_sequences=_sequences_of(config),
        moments=config.moments,
        has_head=algorithm is None or not algorithm.has_scalar_head,
        has_critic=has_critic,
        reference=reference,
        reference_is_base=algorithm is None or not algorithm.has_teacher,
        num_scorings=config.num_scorings,
        num_epochs=getattr(config, "num_epochs_per_rollout", 1) * (1 + has_critic),
    )
    longest = min(max_sequence_tokens or budget, budget)
    prompt, completion, sampling = 0, longest, None
    if rollouts is not None:
        completion = rollouts.completion_tokens
        prompt = rollouts.prompt_tokens
        sampling = SamplingLoad(
            rollouts.generation,
            "generation",
            getattr(config, "num_sequences_per_step", 0),
            is_asynchronous=getattr(config, "asynchronous", None) is not None,
        )
    return StageLoad(
        name=name,
        sizes=sizes,
        cluster=setup.cluster,
        dtype=setup.dtype,
        prompt_tokens=prompt,
        completion_tokens=completion,
        training=training,
        sampling=sampling,
    )


def _sequences_of(config: Any) -> int:
    if pairs := getattr(config, "num_pairs_per_step", None):
        return int(2 * pairs)
    batch = getattr(config, "train_global_batch_size", None)
    per_step = getattr(config, "num_sequences_per_step", 0)
    return int(batch or per_step or getattr(config, "global_batch_size", _MANY))
