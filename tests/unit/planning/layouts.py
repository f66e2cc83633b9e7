"""Published sizes, and stages of them."""

import json
from pathlib import Path
from typing import Any

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.training import DTensorTraining, TrainingConfig
from nemo_rl_core.planning.load import SamplingLoad, StageLoad, TrainingLoad
from nemo_rl_core.planning.sizes import ModelSizes, sizes_of

CONFIGS = {path.stem: path for path in (Path(__file__).parent / "configs").glob("*.json")}
"""The config.json of each model, as it is published, without what sizes do not depend on."""


def sizes(name: str, **changes: Any) -> ModelSizes:
    return sizes_of({**json.loads(CONFIGS[name].read_text()), **changes})


def stage(
    name: str,
    num_ranks: int = 1,
    *,
    training: TrainingConfig | None = None,
    tokens: int = 8192,
    longest: int | None = None,
    microbatches: int = 1,
    has_reference: bool = False,
    generation: VllmGenerationConfig | None = None,
    dtype: str = "bfloat16",
    **changes: Any,
) -> StageLoad:
    """A stage that fills micro-batches of each rank, and samples if `generation` is given."""
    model = sizes(name, **changes)
    length = longest or tokens
    count = num_ranks * tokens // length * microbatches
    trained = TrainingLoad(
        training or DTensorTraining(),
        tokens,
        path="grpo.max_tokens_per_microbatch",
        num_sequences=count,
        reference=model if has_reference else None,
    )
    return StageLoad(
        "grpo_iteration",
        model,
        ClusterConfig(shape="cluster", num_workers=num_ranks),
        dtype,  # type: ignore[arg-type]
        prompt_tokens=length // 4,
        completion_tokens=length - length // 4,
        training=trained,
        sampling=SamplingLoad(generation, "generation", count) if generation else None,
    )
