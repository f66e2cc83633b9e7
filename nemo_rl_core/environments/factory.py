"""Makes the scorer or environment that a config describes.

Each implementation is imported only when it is made, so that a run does not load the libraries of
the other kinds.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.environment import (
    ByTask,
    EnvironmentConfig,
    EnvironmentWorkers,
    MultiTurnConfig,
    WeightedSum,
    is_multi_turn,
    reward_names,
)
from nemo_rl_core.config.isolation import IsolatedPackages
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.multi_turn import (
    GuessNumberGame,
    PythonEnvironment,
    SlidingPuzzleGame,
    ToolUse,
)
from nemo_rl_core.config.single_turn import (
    CodeTests,
    ExactMatch,
    JsonSchemaMatch,
    MathVerify,
    MultipleChoice,
    ReasoningGymScore,
    RegexMatch,
    RewardFunction,
    RewardModelScore,
)
from nemo_rl_core.environments.agent_programs import ReportedReward
from nemo_rl_core.environments.interfaces import EnvironmentInterface, Scorer
from nemo_rl_core.environments.rewards.llm_judge import ChatModel
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.games import Position

if TYPE_CHECKING:
    from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster

StartJudge = Callable[[JudgeModel, int], ChatModel]
"""Starts a judge model; the number is its maximum number of new tokens."""
StartRewardModel = Callable[[RewardModelScore], Scorer]
"""Starts a reward model on the devices that it computes on."""


def make_scorer(
    config: EnvironmentConfig,
    reward_model: Path | None = None,
    *,
    policy: Path | None = None,
    start_judge: StartJudge | None = None,
    start_reward_model: StartRewardModel | None = None,
) -> Scorer:
    """Returns a scorer that is ready to use; close it when done.

    Args:
        config: Config of the environment. A multi-turn environment becomes an `EnvironmentScorer`,
            whose `environment` answers conversations; an agent becomes the scorer of its last turn.
        reward_model: Folder for every `reward_model` in the config that names no model.
        policy: Folder of the model whose completions are scored. A reward model reads their token
            ids, so it must have the same vocabulary.
        start_judge: Starts judges that are models of this run.
        start_reward_model: Starts reward models; by default they compute in this process.

    Raises:
        ConfigError: If an object or model that the config names is missing or cannot be made here.
        ModelError: If a model is not a reward model, or its vocabulary differs from the policy's.
        ResourceError: If programs must run, and this machine has no sandbox.
    """
    make = partial(
        make_scorer,
        reward_model=reward_model,
        policy=policy,
        start_judge=start_judge,
        start_reward_model=start_reward_model,
    )
    config = _scored_by(config)
    match config:
        case WeightedSum(parts=parts):
            from nemo_rl_core.environments.rewards.weighted_sum import WeightedSumScorer

            scorers = [make(each.environment) for each in parts]
            return WeightedSumScorer(scorers, [each.weight for each in parts], reward_names(config))
        case ByTask(tasks=tasks):
            by_task = {each.task: make(each.environment) for each in tasks}
            return _by_task(by_task, has_turns=is_multi_turn(config))
        case (
            SlidingPuzzleGame()
            | GuessNumberGame()
            | ToolUse()
            | PythonEnvironment()
            | AgentEnvironment()
        ):
            from nemo_rl_core.environments.adapt import as_scorer

            return as_scorer(_multi_turn_environment(config))
        case LLMJudge():
            return _judge(config, start_judge)
        case RewardModelScore():
            start = start_reward_model or partial(
                _reward_model_scorer, reward_model=reward_model, policy=policy
            )
            return start(config)
    return _single_scorer(config)


def make_remote_scorer(
    config: EnvironmentConfig,
    workers: EnvironmentWorkers,
    reward_model: Path | None = None,
    *,
    policy: Path | None = None,
    bundles: "RayVirtualCluster | None" = None,
    is_dedicated: bool = False,
    isolation: IsolatedPackages | None = None,
) -> Scorer:
    """Makes a scorer in Ray actors.

    Args:
        config: Config of the environment.
        workers: Number of actors, and their deadline.
        reward_model: Same as in `make_scorer`.
        policy: Same as in `make_scorer`.
        bundles: Cluster on whose bundles the scorers run, with a share of a GPU if the bundles
            have any; None for scorers without GPUs.
        is_dedicated: Whether nothing else computes on these bundles.
        isolation: Packages of the actors that are not the project's.
    """
    from nemo_rl_core.environments.adapt import EnvironmentScorer
    from nemo_rl_core.environments.remote import RemoteEnvironment, RemoteScorer

    config = _scored_by(config)
    make = partial(make_scorer, config, reward_model, policy=policy)
    if not is_multi_turn(config):
        names = reward_names(config)
        return RemoteScorer(
            make,
            workers,
            names=names,
            bundles=bundles,
            is_dedicated=is_dedicated,
            isolation=isolation,
        )
    make_environment = partial(_environment_of, make)
    return EnvironmentScorer(RemoteEnvironment(make_environment, workers, isolation=isolation))


def _scored_by(config: EnvironmentConfig) -> EnvironmentConfig:
    """Returns the environment that scores an agent's last turn; other environments unchanged."""
    if isinstance(config, AgentEnvironment) and config.reward is not None:
        return config.reward
    return config


def _single_scorer(
    config: ExactMatch
    | MathVerify
    | ReasoningGymScore
    | RewardFunction
    | RegexMatch
    | JsonSchemaMatch
    | MultipleChoice
    | CodeTests,
) -> Scorer:
    match config:
        case MathVerify():
            from nemo_rl_core.environments.rewards.math import MathScorer

            return MathScorer(config)
        case ReasoningGymScore():
            from nemo_rl_core.environments.rewards.reasoning_gym import ReasoningGymScorer

            return ReasoningGymScorer()
        case RewardFunction():
            from nemo_rl_core.environments.rewards.functional_reward import FunctionalRewardWrapper

            return FunctionalRewardWrapper.from_target(config.target)
        case CodeTests():
            from nemo_rl_core.environments.rewards.code import CodeScorer

            return CodeScorer(config)
    return _text_scorer(config)


def _text_scorer(config: ExactMatch | RegexMatch | JsonSchemaMatch | MultipleChoice) -> Scorer:
    from nemo_rl_core.environments.rewards.exact import ExactScorer
    from nemo_rl_core.environments.rewards.formats import JsonSchemaScorer, RegexScorer
    from nemo_rl_core.environments.rewards.multiple_choice import MultipleChoiceScorer

    match config:
        case ExactMatch():
            return ExactScorer(config)
        case RegexMatch():
            return RegexScorer(config)
        case JsonSchemaMatch():
            return JsonSchemaScorer(config)
        case MultipleChoice():
            return MultipleChoiceScorer(num_choices=config.num_choices)


def _multi_turn_environment(config: MultiTurnConfig) -> EnvironmentInterface | Scorer:
    if isinstance(config, AgentEnvironment):
        return ReportedReward()
    if isinstance(config, PythonEnvironment):
        from nemo_rl_core.environments.targets import make_environment

        return make_environment(config)
    if isinstance(config, ToolUse):
        from nemo_rl_core.environments.tools.environment import ToolEnvironment
        from nemo_rl_core.environments.tools.sources import make_source

        sources = [make_source(each) for each in config.tools]
        made = ToolEnvironment(config, sources, make_scorer(config.answer))
        return cast("EnvironmentInterface", made)  # its `step` is a coroutine
    from nemo_rl_core.environments.multi_turn.games import GameEnvironment
    from nemo_rl_core.games.guess_number import NumberGuess
    from nemo_rl_core.games.sliding_puzzle import SlidingPuzzle

    rules: type[Position] = SlidingPuzzle
    if isinstance(config, GuessNumberGame):
        rules = NumberGuess
    return GameEnvironment(rules, illegal_penalty=config.illegal_penalty)


def _by_task(scorers: Mapping[str, Scorer], *, has_turns: bool) -> Scorer:
    from nemo_rl_core.environments.adapt import EnvironmentScorer, as_environment
    from nemo_rl_core.environments.by_task import ByTaskEnvironment, ByTaskScorer

    if not has_turns:
        return ByTaskScorer(scorers)
    environments = {task: as_environment(scorer) for task, scorer in scorers.items()}
    return EnvironmentScorer(ByTaskEnvironment(environments))


def _judge(config: LLMJudge, start_judge: StartJudge | None) -> Scorer:
    from nemo_rl_core.environments.rewards.llm_judge import EndpointChat, LLMJudgeScorer

    if not isinstance(config.judge, JudgeModel):
        endpoint = EndpointChat(config.judge, max_new_tokens=config.max_new_tokens)
        return LLMJudgeScorer(config, endpoint)
    if start_judge is None:
        raise ConfigError(
            "a judge that is a model of this run cannot be started here",
            expected="an environment in the same process as the engine",
            got="judge.kind model, inside an actor or outside of a run",
            fix="leave environment_workers out, or use judge.kind endpoint",
        )
    return LLMJudgeScorer(config, start_judge(config.judge, config.max_new_tokens))


def _environment_of(make: Callable[[], Scorer]) -> EnvironmentInterface:
    from nemo_rl_core.environments.adapt import as_environment

    return as_environment(make())


def _reward_model_scorer(
    config: RewardModelScore, reward_model: Path | None, policy: Path | None
) -> Scorer:
    name = config.model or reward_model
    if name is None:
        raise ConfigError(
            "the environment 'reward_model' has no model",
            expected="the name or folder of a reward model",
            got="no environment.model, and no reward model from an earlier stage",
            fix="set environment.model, or run a workflow that trains a reward model first",
        )
    if policy is None:
        raise ConfigError(
            "the environment 'reward_model' does not know which model produced the token ids",
            expected="the folder of the model that makes the completions",
            got="no policy",
            fix="pass make_scorer(..., policy=FOLDER)",
        )
    from nemo_rl_core.environments.rewards.reward_model import RewardModelScorer

    limit = config.max_tokens_per_batch
    return RewardModelScorer(str(name), policy=policy, max_tokens_per_batch=limit)
