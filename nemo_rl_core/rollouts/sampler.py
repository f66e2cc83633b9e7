"""One model, ready to be sampled from and scored: what training and evaluation share."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.environment import own_bundles_of_scorers
from nemo_rl_core.config.trainer import GateConfig, RolloutSettings
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    RolloutScorer,
    Scorer,
    score_rollouts,
)
from nemo_rl_core.environments.post_processing import HOOK, post_process
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.own import OwnGeneration
from nemo_rl_core.rollouts.batch import (
    refuse_too_many_failures,
    rewards_of,
    rollout_batch,
    valid_rollouts,
)
from nemo_rl_core.rollouts.engine import RolloutEngine, SingleTurnRollouts
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.held import HeldRollouts
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.scorers import scorer_of, scores_on_a_gpu
from nemo_rl_core.types import Rollout


def post_processed(
    environment: Any, rollouts: Sequence[Rollout]
) -> tuple[Sequence[Rollout], dict[str, float]]:
    """The rollouts with the rewards that the environment adapts, and its metrics.

    Args:
        environment: Gets what `rollout_batch` returns of those rollouts that could be scored, and
            as lists `tasks`, `prompts`, `completions` and `answers`; `rewards` alone, where its
            method says that it reads nothing else (`reads_rewards_alone`).
        rollouts: Scored; those that could not be scored stay as they are.

    Returns:
        All rollouts in their places, and the metrics; none where not one rollout could be scored.

    Raises:
        RewardError: As `post_process`.
    """
    counted = valid_rollouts(rollouts)
    if not counted or not hasattr(environment, HOOK):  # a batch costs more than all of scoring
        return rollouts, {}
    is_small = getattr(getattr(environment, HOOK), "reads_rewards_alone", False)
    batch = {"rewards": rewards_of(counted)} if is_small else _whole_batch(counted)
    rewards, metrics = post_process(environment, batch)
    if isinstance(rollouts, HeldRollouts) and isinstance(counted, HeldRollouts):
        assert rollouts.rewards is not None and counted.rewards is not None  # they are valid
        same = (rewards == batch["rewards"]).numpy()
        rewarded = rollouts.rewards.copy()
        rewarded[rollouts.is_valid] = np.where(same, counted.rewards, rewards.double().numpy())
        return rollouts.with_rewards(rewarded), metrics
    # A reward that is not adapted keeps its digits, of which a tensor holds fewer.
    adapted = iter(
        each if same else each.scored(reward)
        for each, same, reward in zip(
            counted, (rewards == batch["rewards"]).tolist(), rewards.tolist(), strict=True
        )
    )
    return [next(adapted) if each.error is None else each for each in rollouts], metrics


def _whole_batch(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        **rollout_batch(rollouts).fetched(),
        "tasks": [each.prompt.task for each in rollouts],
        "prompts": [each.prompt.text for each in rollouts],
        "completions": [each.text for each in rollouts],
        "answers": [each.prompt.answer for each in rollouts],
    }


def mean_metrics(draws: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """The metrics of a step's draws, each counted by its number of rollouts.

    A metric that only some draws have is a mean over these.
    """
    sums: dict[str, tuple[float, int]] = {}
    for size, metrics in draws:
        for name, value in metrics.items():
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + size * value, count + size
    return {name: total / count for name, (total, count) in sums.items()}


class Sampler(AbstractContextManager["Sampler"]):
    """An engine with a model's weights, its tokenizer, and a scorer.

    At exit the scorer ends, and the engine gives a GPU's memory away.

    Args:
        session: Where the engine runs.
        settings: How completions are made and scored.
        model_folder: Weights, config and tokenizer.
        scorer: Takes the place of the environment that the settings name.
        reward_model: For an environment `reward_model` that names no model.
        gate: The bounds of the engine's proofs.
        generation: An engine that runs already; by default one is started.

    Attributes:
        tokenizer: The model's.
        generation: The engine, for weight updates.
        engine: Makes rollouts with it: of several turns, where the scorer is an environment.
        scores_on_a_gpu: Whether a model scores on a GPU of the trainer's.
    """

    _engine_class: ClassVar[type[Generation]] = Generation

    def __init__(
        self,
        session: ClusterSession,
        settings: RolloutSettings,
        model_folder: Path,
        *,
        scorer: Scorer | None = None,
        reward_model: Path | None = None,
        gate: GateConfig | None = None,
        generation: Generation | OwnGeneration | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(model_folder)
        own_engines = () if generation else settings.generation.own_bundles
        own_scorers = () if scorer else own_bundles_of_scorers(settings.environment)
        if own_engines or own_scorers:
            session.reserve_beside((*own_engines, *own_scorers))
        # Before the engine, which takes longer to start than a reward takes to be refused.
        self._scorer = scorer or scorer_of(session, settings, model_folder, reward_model)
        self.scores_on_a_gpu = scorer is None and scores_on_a_gpu(session, settings)
        self.generation = generation or self._engine_class(
            session,
            GenerationSetup(
                model_folder=model_folder,
                config=settings.generation,
                max_model_len=settings.max_prompt_tokens + settings.max_rollout_tokens,
                stop_token_ids=stop_token_ids(model_folder, self.tokenizer),
                dtype=settings.dtype,
            ),
            gate=gate,
        )
        self._max_failed_fraction = settings.rollouts.max_failed_fraction
        self.engine = self._rollout_engine(settings)

    def _rollout_engine(self, settings: RolloutSettings) -> RolloutEngine[Any]:
        if self.environment is None:
            return SingleTurnRollouts(self.generation, self.tokenizer, seed=settings.seed)
        return MultiTurnRollouts(
            self.generation,
            self.tokenizer,
            self.environment,
            seed=settings.seed,
            bounds=Bounds.of(settings),
        )

    @property
    def environment(self) -> EnvironmentInterface | None:
        """What answers to the policy's turns, if anything does."""
        scorer = self._scorer
        return scorer.environment if isinstance(scorer, EnvironmentScorer) else None

    @property
    def num_restarts(self) -> tuple[int, int]:
        """How often the engine was started again, and how many actors of the environment were."""
        return self.generation.num_restarts, getattr(self._scorer, "num_restarts", 0)

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """The same rollouts, each with its reward or with the error for which it has none.

        Where a model scores on a GPU, the engine gives its memory away first.

        Raises:
            RewardError: If more of them failed than the settings accept, or all.
        """
        # The turns of an episode are rewarded while it goes on.
        has_turns = self.environment is not None
        if self.scores_on_a_gpu and not has_turns:
            self.generation.finish_generation()
        scored = rollouts if has_turns else self._scored(rollouts)
        refuse_too_many_failures(scored, max_failed_fraction=self._max_failed_fraction)
        return scored

    def post_process(
        self, rollouts: Sequence[Rollout]
    ) -> tuple[Sequence[Rollout], dict[str, float]]:
        """What the environment, or a scorer with its method, makes of scored rollouts.

        Raises:
            RewardError: As `post_processed`.
        """
        environment = self._scorer if self.environment is None else self.environment
        return post_processed(environment, rollouts)

    def _scored(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """The rollouts in their places; those that have not failed before are scored."""
        if isinstance(rollouts, HeldRollouts):
            held = rollouts.valid()
            if isinstance(self._scorer, RolloutScorer):
                return rollouts.with_scored(held.with_scores(self._scorer.score_rollouts(held)))
            return rollouts.with_scored(held.with_outcomes(self._scorer.score(held)))
        valid = [each for each in rollouts if each.error is None]
        scored = iter(score_rollouts(self._scorer, valid))
        return [next(scored) if each.error is None else each for each in rollouts]

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._scorer.close()
        if kind is None:  # the workers live on, and the next user may need a GPU's memory
            self.generation.finish_generation()
