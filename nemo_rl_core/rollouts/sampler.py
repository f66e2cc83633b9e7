"""Sampling and scoring of one model, which training and evaluation share."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.environment import dedicated_bundles_of_scorers
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.trainer import GateConfig, RolloutSettings
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.conversations import answers_at_once
from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    RolloutScorer,
    Scorer,
)
from nemo_rl_core.environments.post_processing import HOOK, post_process
from nemo_rl_core.models.generation.custom import CustomEngineAdapter
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.streaming import TurnGeneration
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.registry import Registry
from nemo_rl_core.rollouts.batch import (
    refuse_too_many_failures,
    rewards_of,
    rollout_batch,
)
from nemo_rl_core.rollouts.engine import RolloutEngine, SingleTurnRollouts
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.rollouts.scorers import scorer_of, scores_on_a_gpu
from nemo_rl_core.types import Rollout

_ROLLOUTS: Registry[Any] = Registry(
    "rollouts", {"agent": "nemo_rl_core.agents.episode:AgentRollouts"}
)


def post_process_rollouts(
    environment: Any, rollouts: Sequence[Rollout]
) -> tuple[RemoteRollouts, dict[str, float]]:
    """Lets the environment adapt the rewards of rollouts and compute metrics.

    Args:
        environment: Gets the `rollout_batch` of the rollouts that could be scored, and the lists
            `tasks`, `prompts`, `completions`, `answers` and `messages`; only `rewards` and
            `messages` if its method declares `reads_only_rewards`.

    Returns:
        All rollouts in the same order, and the metrics, empty if no rollout could be scored.
    """
    columns = RemoteRollouts.of(rollouts)
    valid = columns.valid()
    counted = valid.episodes()
    if not counted or not hasattr(environment, HOOK):
        return columns, {}  # without a batch, which would cost more than scoring
    is_small = getattr(getattr(environment, HOOK), "reads_only_rewards", False)
    batch = {} if is_small else _full_batch(counted)
    batch |= {
        "rewards": rewards_of(counted),
        "messages": [each.messages for each in counted.turns] or [()] * len(counted),
    }
    rewards, metrics = post_process(environment, batch)
    assert columns.rewards is not None and counted.rewards is not None  # they are valid
    # An unchanged reward keeps its float64 value; the tensor is float32.
    is_same = (rewards == batch["rewards"]).numpy()
    adapted = columns.rewards.copy()
    of_episodes = np.where(is_same, counted.rewards, rewards.double().numpy())
    adapted[columns.is_valid] = of_episodes[valid.episode]
    return columns.with_rewards(adapted), metrics


def _full_batch(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        **rollout_batch(rollouts).fetched(),
        "tasks": [each.prompt.task for each in rollouts],
        "prompts": [each.prompt.text for each in rollouts],
        "completions": [each.text for each in rollouts],
        "answers": [each.prompt.answer for each in rollouts],
    }


def mean_metrics(draws: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Averages the metrics of a step's draws, weighted by their numbers of rollouts.

    A metric that only some draws have is averaged over these.
    """
    sums: dict[str, tuple[float, int]] = {}
    for size, metrics in draws:
        for name, value in metrics.items():
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + size * value, count + size
    return {name: total / count for name, (total, count) in sums.items()}


class Sampler(AbstractContextManager["Sampler"]):
    """An engine with a model's weights, its tokenizer, and a scorer.

    On exit the scorer is closed, and the engine frees its GPU memory.

    Args:
        scorer: Scorer to use instead of the environment in the settings.
        reward_model: Model for an environment `reward_model` that names none.
        gate: Bounds of the engine's proofs.
        generation: A running or custom engine; by default one is started.

    Attributes:
        environment: Environment that answers the policy's turns; None for single-turn rollouts.
        scores_on_a_gpu: Whether a model scores on one of the trainer's GPUs.
        plays_episodes: Whether rollouts may have several turns, and are scored while they are
            sampled.
    """

    def __init__(
        self,
        session: ClusterSession,
        settings: RolloutSettings,
        model_folder: Path,
        *,
        scorer: Scorer | None = None,
        reward_model: Path | None = None,
        gate: GateConfig | None = None,
        generation: GenerationInterface | CustomPolicyAdapter | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(model_folder)
        own_engines = () if generation else settings.generation.dedicated_bundles
        own_scorers = () if scorer else dedicated_bundles_of_scorers(settings.environment)
        if own_engines or own_scorers:
            session.reserve_dedicated((*own_engines, *own_scorers))
        # Before the engine, whose start is slow, so that a wrong reward is refused early.
        self._scorer = scorer or scorer_of(session, settings, model_folder, reward_model)
        self.environment: EnvironmentInterface | None = None
        if isinstance(self._scorer, EnvironmentScorer):
            self.environment = self._scorer.environment
        self.scores_on_a_gpu = scorer is None and scores_on_a_gpu(session, settings)
        self._config = settings.generation
        has_agent = isinstance(settings.environment, AgentEnvironment)
        self._plays_agents = has_agent and scorer is None
        setup = GenerationSetup(
            model_folder=model_folder,
            config=settings.generation,
            max_model_len=settings.max_prompt_tokens + settings.max_rollout_tokens,
            stop_token_ids=stop_token_ids(model_folder, self.tokenizer),
            dtype=settings.dtype,
            isolation=settings.isolation.generation,
        )
        self.generation: Generation | CustomEngineAdapter
        if generation is None:
            self.generation = self._engine_class(session, setup, gate=gate)
        elif isinstance(generation, Generation):
            self.generation = generation
        else:
            self.generation = CustomEngineAdapter(generation, setup, gate=gate)
        self._max_failed_fraction = settings.rollouts.max_failed_fraction
        self.engine = self._rollout_engine(settings)
        self.plays_episodes = not isinstance(self.engine, SingleTurnRollouts)

    @property
    def _engine_class(self) -> Callable[..., Generation]:
        at_once = self.environment is None or answers_at_once(self.environment)
        streams = isinstance(self._config, VllmGenerationConfig)
        return TurnGeneration if streams and (self._plays_agents or not at_once) else Generation

    def _rollout_engine(self, settings: RolloutSettings) -> RolloutEngine:
        if self._plays_agents:
            agents: Any = _ROLLOUTS.get("agent")
            engine: RolloutEngine = agents(self.generation, self.tokenizer, settings, self._scorer)
            return engine
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
    def num_restarts(self) -> tuple[int, int]:
        """Numbers of restarts of the engine and of the environment's actors."""
        return self.generation.num_restarts, getattr(self._scorer, "num_restarts", 0)

    def score(self, rollouts: Sequence[Rollout]) -> RemoteRollouts:
        """Returns the same rollouts, each with a reward or an error.

        If a model scores on a GPU, the engine frees its memory first.
        """
        scored = RemoteRollouts.of(rollouts)
        if not self.plays_episodes:
            if self.scores_on_a_gpu:
                self.generation.finish_generation()
            valid, scorer = scored.valid(), self._scorer
            scored = scored.with_scored(
                valid.with_scores(scorer.score_rollouts(valid))
                if isinstance(scorer, RolloutScorer)
                else valid.with_outcomes(scorer.score(valid))
            )
        refuse_too_many_failures(scored, max_failed_fraction=self._max_failed_fraction)
        return scored

    def post_process(self, rollouts: RemoteRollouts) -> tuple[RemoteRollouts, dict[str, float]]:
        """Calls `post_process_rollouts` with the environment, else with the scorer."""
        environment = self._scorer if self.environment is None else self.environment
        return post_process_rollouts(environment, rollouts)

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.engine.close()
        self._scorer.close()
        if kind is None:  # the workers keep running, and the next user may need GPU memory
            self.generation.finish_generation()
