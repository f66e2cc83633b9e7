"""The load of a stage that trains, from the section of its algorithm.

`tasks/recipes/loads.py` has the sections of a recipe, a trainer those of its settings.
"""

from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.trainer import LoopConfig
from nemo_rl_core.config.training import TrainingConfig
from nemo_rl_core.planning.load import SamplingLoad, StageLoad, TrainingLoad
from nemo_rl_core.planning.sizes import ModelSizes

_CRITICS = frozenset({"ppo"})
_SCALAR_HEADS = frozenset({"reward_model"})
_SAMPLING = frozenset({"grpo", "ppo", "distillation"})
_MANY = 2**31
"""Sequences of a step where a section does not say how many: they are more than a micro-batch."""


@dataclass(frozen=True)
class Rollouts:
    """What a stage that samples is given.

    Attributes:
        generation: The section `generation`.
        prompt_tokens: Of the longest prompt.
        completion_tokens: The most that stand behind it.
    """

    generation: GenerationConfig
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class TrainingPlace:
    """Where a stage computes.

    Attributes:
        training: The section `training`.
        cluster: The section `cluster`.
        dtype: Type of the matrix products.
    """

    training: TrainingConfig
    cluster: ClusterConfig
    dtype: DType


def training_stage(
    name: str,
    section: str,
    config: LoopConfig,
    place: TrainingPlace,
    *,
    sizes: ModelSizes,
    reference: ModelSizes | None,
    rollouts: Rollouts | None,
    max_sequence_tokens: int | None = None,
) -> StageLoad:
    """The load of a stage.

    Args:
        name: Of the stage.
        section: Of its algorithm; one that this module does not know has a head of a language
            model, and samples where there are `rollouts`.
        config: That section.
        place: Where it computes.
        sizes: Of its model.
        reference: As `reads_reference` asks for.
        rollouts: Of an algorithm that samples.
        max_sequence_tokens: Of a row of data; None where the data does not say.
    """
    budget = config.max_tokens_per_microbatch
    training = TrainingLoad(
        place.training,
        budget,
        path=f"{section}.max_tokens_per_microbatch",
        num_sequences=_sequences_of(config),
        moments=config.moments,
        has_head=section not in _SCALAR_HEADS,
        has_critic=section in _CRITICS,
        reference=reference,
        is_trained_base=section != "distillation",
        num_scorings=_num_scorings(section, config),
        num_epochs=getattr(config, "num_epochs_per_rollout", 1) * (1 + (section in _CRITICS)),
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
        cluster=place.cluster,
        dtype=place.dtype,
        prompt_tokens=prompt,
        completion_tokens=completion,
        training=training,
        sampling=sampling,
    )


def samples(section: str) -> bool:
    """Whether the built-in algorithm of a section samples completions."""
    return section in _SAMPLING


def reads_reference(section: str, config: Any) -> bool:
    """Whether a training stage computes logprobs of a model that it does not train.

    Those of DPO are cached by a stage before it.
    """
    if section == "distillation":
        return True
    penalty = config.loss.kl if section == "grpo" else getattr(config, "kl", None)
    is_kto = section == "dpo" and config.loss.kind == "kto"
    return penalty is not None or is_kto


def _sequences_of(config: Any) -> int:
    """Sequences of one optimizer step, of whatever algorithm."""
    if pairs := getattr(config, "num_pairs_per_step", None):
        return int(2 * pairs)
    batch = getattr(config, "train_global_batch_size", None)
    per_step = getattr(config, "num_sequences_per_step", 0)
    return int(batch or per_step or getattr(config, "global_batch_size", _MANY))


def _num_scorings(section: str, config: Any) -> int:
    """Forward passes of a step for logprobs; one optimizer step of GRPO reads its own."""
    match section:
        case "grpo":
            batch, all_sequences = config.train_global_batch_size, config.num_sequences_per_step
            updates_once = batch in (None, all_sequences) and not config.has_kl_in_reward
            return (not updates_once) + (config.loss.kl is not None)
        case "ppo":
            return 2 + (config.kl is not None)
        case "distillation":
            return 1
    return 0
