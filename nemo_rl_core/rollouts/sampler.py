"""One model, ready to be sampled from and scored: what training and evaluation share."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.generation import GenerationConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments import make_scorer
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.rollouts.engine import RolloutEngine
from nemo_rl_core.types import Rollout


@dataclass(frozen=True)
class RolloutSetup:
    """How completions are made and scored.

    Attributes:
        generation: Which engine, and how it samples.
        environment: What scores a completion.
        dtype: Type of the matrix products.
        max_prompt_tokens: No prompt is longer; with `max_new_tokens`, the engine's length limit.
        seed: Of every sample.
    """

    generation: GenerationConfig
    environment: EnvironmentConfig
    dtype: DType
    max_prompt_tokens: int
    seed: int


class Sampler(AbstractContextManager["Sampler"]):
    """An engine with a model's weights, its tokenizer, and a scorer; ends the scorer at exit.

    Args:
        session: Where the engine runs.
        setup: How completions are made and scored.
        model_folder: Weights, config and tokenizer.

    Attributes:
        tokenizer: The model's.
        generation: The engine, for weight updates.
        engine: Makes rollouts with it.
    """

    def __init__(self, session: ClusterSession, setup: RolloutSetup, model_folder: Path) -> None:
        self.tokenizer = load_tokenizer(model_folder)
        self.generation = VllmGeneration(
            session,
            GenerationSetup(
                model_folder=model_folder,
                config=setup.generation,
                max_model_len=setup.max_prompt_tokens + setup.generation.max_new_tokens,
                stop_token_ids=stop_token_ids(model_folder, self.tokenizer),
                dtype=setup.dtype,
            ),
        )
        self.engine = RolloutEngine(self.generation, self.tokenizer, seed=setup.seed)
        self._scorer = make_scorer(setup.environment)

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with their rewards.

        Raises:
            RewardError: If one cannot be scored.
        """
        scores = self._scorer.score(rollouts)
        return [r.scored(value) for r, value in zip(rollouts, scores, strict=True)]

    def __exit__(self, *_: object) -> None:
        self._scorer.close()
