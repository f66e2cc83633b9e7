"""One model, ready to be sampled from and scored: what training and evaluation share."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.rollouts.engine import RolloutEngine
from nemo_rl_core.rollouts.scorers import scorer_of
from nemo_rl_core.types import Rollout


class Sampler(AbstractContextManager["Sampler"]):
    """An engine with a model's weights, its tokenizer, and a scorer; ends the scorer at exit.

    Args:
        session: Where the engine runs.
        settings: How completions are made and scored.
        model_folder: Weights, config and tokenizer.
        scorer: Takes the place of the environment that the settings name.
        reward_model: For an environment `reward_model` that names no model.

    Attributes:
        tokenizer: The model's.
        generation: The engine, for weight updates.
        engine: Makes rollouts with it.
    """

    def __init__(
        self,
        session: ClusterSession,
        settings: RolloutSettings,
        model_folder: Path,
        *,
        scorer: Scorer | None = None,
        reward_model: Path | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(model_folder)
        # Before the engine, which takes longer to start than a reward takes to be refused.
        self._scorer = scorer or scorer_of(session, settings, model_folder, reward_model)
        self.generation = VllmGeneration(
            session,
            GenerationSetup(
                model_folder=model_folder,
                config=settings.generation,
                max_model_len=settings.max_prompt_tokens + settings.generation.max_new_tokens,
                stop_token_ids=stop_token_ids(model_folder, self.tokenizer),
                dtype=settings.dtype,
            ),
        )
        self.engine = RolloutEngine(self.generation, self.tokenizer, seed=settings.seed)

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with their rewards.

        Raises:
            RewardError: If one cannot be scored.
        """
        return self._scorer.scored(rollouts)

    def __exit__(self, *_: object) -> None:
        self._scorer.close()
