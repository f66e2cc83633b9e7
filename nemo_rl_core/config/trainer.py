"""Settings that all trainers share."""

from typing import Any, ClassVar, Literal, Self, TypeGuard, get_args

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.environment import (
    EnvironmentConfig,
    EnvironmentWorkers,
    dedicated_bundles_of_scorers,
    is_multi_turn,
    judges_of_the_run,
    model_scorers,
)
from nemo_rl_core.config.generation import (
    GenerationConfig,
    SamplingConfig,
    VllmGenerationConfig,
    refuse_misplaced,
)
from nemo_rl_core.config.isolation import IsolationConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.config.training import DTensorTraining, TrainingConfig
from nemo_rl_core.errors import ConfigError


class KeepBest(FrozenConfig):
    """Checkpoints to keep in addition to the newest: the `count` best by a metric.

    Attributes:
        metric: A metric that is saved with a step, such as `validation_loss`.
        mode: Whether the highest or the lowest value is best.
        count: Number of checkpoints to keep by this metric.
        result: Model that the stage returns, and so the one that is evaluated and exported: that of
            the last step, or the best one with its optimizer state.
    """

    metric: str = Field(min_length=1, description="such as validation_loss")
    mode: Literal["max", "min"]
    count: PositiveInt = 1
    result: Literal["last", "best"] = "last"


class LoopConfig(OptimizerConfig):
    """Settings of the optimizer, and of saving and validation in a training loop.

    `max_tokens_per_microbatch` bounds the memory of one forward and backward pass; it affects
    results only by rounding. Validation runs every `validate_every_num_steps` steps and after the
    last one; by default the trainer does not validate. During a run its `keep_latest` newest
    checkpoints are kept, and the best ones by `keep_best`. A finished run has the last model in
    `model/` and the best one in `best/`; with `keep_best.result: best` the best is in `model/`.

    Attributes:
        max_tokens_per_microbatch: Maximum number of tokens in one forward and backward pass.
        save_every_num_steps: Steps between two saved checkpoints.
        validate_every_num_steps: Steps between two validations; None never validates.
        keep_latest: Number of newest checkpoints to keep during a run.
        keep_best: Checkpoints to keep in addition to the newest; None keeps no others.
    """

    algorithm: ClassVar[Algorithm | None] = None
    """Declaration of a built-in algorithm; None for one that you register."""

    max_tokens_per_microbatch: PositiveInt = 8192
    save_every_num_steps: PositiveInt = 50
    validate_every_num_steps: PositiveInt | None = None
    keep_latest: PositiveInt = 1
    keep_best: KeepBest | None = None

    @property
    def reads_reference(self) -> bool:
        """Whether a step computes logprobs of a model that it does not train."""
        return getattr(self, "kl", None) is not None

    @property
    def num_scorings(self) -> int:
        """Forward passes per step that only compute logprobs."""
        return 0

    @model_validator(mode="after")
    def _the_best_are_known_when_saved(self) -> "LoopConfig":
        interval = self.validate_every_num_steps
        validated = self.keep_best is not None and self.keep_best.metric.startswith("validation_")
        if validated and (interval is None or self.save_every_num_steps % interval):
            raise ValueError(
                f"keep_best compares {self.keep_best.metric!r}, which checkpoints are saved with "  # type: ignore[union-attr]
                "only if they are validated: set validate_every_num_steps, and "
                "save_every_num_steps to a multiple of it"
            )
        return self


def algorithm_of(settings: type[BaseModel], section: str) -> Algorithm | None:
    """Returns the built-in algorithm that a section of a recipe or trainer configures."""
    field = settings.model_fields.get(section)
    kinds = () if field is None else (field.annotation, *get_args(field.annotation))
    declared = (each.algorithm for each in kinds if _is_loop_config(each))
    return next((each for each in declared if each is not None and each.name == section), None)


def _is_loop_config(kind: Any) -> TypeGuard[type[LoopConfig]]:
    return isinstance(kind, type) and issubclass(kind, LoopConfig)


class GateConfig(FrozenConfig):
    """Limits of the error between the engine's and the trainer's logprobs.

    The error is `mean exp|gen - prev|`, which is 1 if the logprobs are equal. A sequence with an
    error above `max_sequence_mult_prob_error` is masked. The run stops if the error over the other
    tokens is above `max_token_mult_prob_error`, or if more than `max_masked_fraction` of the step's
    sequences are masked.

    Attributes:
        max_token_mult_prob_error: Maximum error over the step's tokens; above it the run stops.
        max_sequence_mult_prob_error: Maximum error over one sequence; above it the sequence is
            masked.
        max_masked_fraction: Maximum fraction of masked sequences in a step; above it the run stops.
    """

    max_token_mult_prob_error: float = Field(default=1.05, gt=1, allow_inf_nan=True)
    max_sequence_mult_prob_error: float = Field(default=2.0, gt=1, allow_inf_nan=True)
    max_masked_fraction: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _sequence_limit_is_wider(self) -> "GateConfig":
        if self.max_sequence_mult_prob_error < self.max_token_mult_prob_error:
            raise ValueError(
                f"max_sequence_mult_prob_error ({self.max_sequence_mult_prob_error}) must not be "
                f"below max_token_mult_prob_error ({self.max_token_mult_prob_error}): the mean of "
                "one sequence spreads more than that of all"
            )
        return self


class TrainerSettings(FrozenConfig):
    """Backend, cluster, dtype and seed of a trainer; a subclass adds its algorithm's section."""

    training: TrainingConfig = DTensorTraining()
    cluster: ClusterConfig = ClusterConfig()
    dtype: DType = "float32"
    seed: NonNegativeInt = 0
    isolation: IsolationConfig = IsolationConfig()

    @model_validator(mode="after")
    def _workers_hold_full_copies(self) -> Self:
        self.training.data_parallel_size(self.cluster.num_workers)
        return self


def refuse_without_scalar_head(training: TrainingConfig) -> None:
    """Refuses a backend that cannot train reward models or critics."""
    if training.backend == "megatron":
        raise ConfigError(
            "the megatron backend has no scalar head, which a reward model or critic needs",
            expected="training.backend: dtensor",
            got="training.backend: megatron",
            fix="train this algorithm with the dtensor backend",
        )


class RolloutLimits(FrozenConfig):
    """Limits on the length of a rollout and on the failures of a run.

    In a multi-turn environment, the policy has at most `max_turns`. `max_rollout_tokens` limits all
    tokens after the prompt, including the environment's; `generation.max_new_tokens` limits one
    turn: a turn that is cut there goes to the environment unchanged, and the next one follows. A
    rollout that cannot be scored is counted but not trained on. The run stops if all rollouts that
    are scored at once fail, or more than `max_failed_fraction` of them.

    Attributes:
        max_turns: Maximum number of the policy's turns in one episode.
        max_rollout_tokens: Maximum number of tokens after the prompt, including all turns and the
            environment's; None takes `generation.max_new_tokens`.
        max_failed_fraction: Maximum fraction of failures among rollouts that are scored at once;
            above it the run stops.
        history: Past turns that the policy reads if the chat template rewrites them, for example
            without their reasoning: `as_sampled`, in one training sample, or as the template writes
            them (`split`), which begins another sample of the episode at each turn.
    """

    max_turns: PositiveInt = 16
    max_rollout_tokens: PositiveInt | None = None
    max_failed_fraction: float = Field(default=0.1, ge=0, le=1)
    history: Literal["as_sampled", "split"] = Field(
        default="as_sampled", exclude_if=lambda value: value == "as_sampled"
    )

    def room(self, generation: SamplingConfig) -> int:
        """Returns the maximum number of tokens after a prompt."""
        return self.max_rollout_tokens or generation.max_new_tokens


class RolloutSettings(TrainerSettings):
    """Extra settings of algorithms that sample and score completions."""

    environment: EnvironmentConfig = ExactMatch()
    rollouts: RolloutLimits = RolloutLimits()
    generation: GenerationConfig = VllmGenerationConfig()
    environment_workers: EnvironmentWorkers | None = None
    max_prompt_tokens: PositiveInt = 512

    @property
    def max_rollout_tokens(self) -> int:
        """Maximum number of tokens after a prompt."""
        return self.rollouts.room(self.generation)

    @property
    def local_environment(self) -> EnvironmentConfig | None:
        """The environment; None if it is isolated, so that this process cannot import its code."""
        return None if self.isolation.environment else self.environment

    @property
    def dedicated_bundles(self) -> tuple[DedicatedBundles, ...]:
        """Dedicated bundles of engines, then of scorers."""
        return (*self.generation.dedicated_bundles, *dedicated_bundles_of_scorers(self.environment))

    @model_validator(mode="after")
    def _engines_fit_the_cluster(self) -> Self:
        scorers = dedicated_bundles_of_scorers(self.environment)
        refuse_misplaced(self.cluster, self.generation, scorers)
        refuse_scorers_in_actors(self.environment, self.environment_workers)
        refuse_isolation_without_actors(self.isolation, self.environment_workers)
        refuse_busy_judge_gpu(self.cluster, self.generation, self.environment)
        return self


def refuse_busy_judge_gpu(
    cluster: ClusterConfig,
    generation: SamplingConfig,
    environment: EnvironmentConfig,
    *,
    samples_ahead: bool = False,
) -> None:
    """Refuses a judge of the run that would score while others use the memory of its GPU.

    A colocated judge is on one of the trainer's GPUs. Engines there are awake between turns and
    while they sample ahead; if they sample conversations ahead, turns are scored during training.

    Args:
        samples_ahead: Whether engines generate while a model is trained.
    """
    colocated = [each for each in judges_of_the_run(environment) if each.placement == "colocated"]
    if not cluster.num_gpus or not colocated:
        return
    has_turns, has_own_engines = is_multi_turn(environment), generation.num_dedicated_bundles > 0
    with_engine = not has_own_engines and (samples_ahead or has_turns)
    with_trainer = has_own_engines and samples_ahead and has_turns
    if not with_engine and not with_trainer:
        return
    when = "while an engine samples on the same GPU" if with_engine else "during training steps"
    endpoint = "serve the judge elsewhere, and name it with judge: {kind: endpoint}"
    move_judge = "give the judge a dedicated GPU, judge.placement: {own: 1}, or "
    move_engines = "give the engines dedicated GPUs, generation.placement: {own: 1}, or "
    raise ConfigError(
        f"a judge with kind: model on the trainer's GPU would score {when}",
        expected="a judge that scores while nothing else uses the GPU's memory",
        got="an environment with several turns" if has_turns else "grpo.asynchronous",
        fix=move_judge
        + (move_engines if with_engine and not (samples_ahead and has_turns) else "")
        + endpoint,
    )


def refuse_scorers_in_actors(
    environment: EnvironmentConfig, workers: EnvironmentWorkers | None
) -> None:
    """Refuses scorers that start workers in an environment that runs in actors."""
    if workers is None:
        return
    if isinstance(environment, AgentEnvironment) and environment.reward is None:
        raise ConfigError(
            "environment_workers score texts, but the agent computes its reward",
            expected="environment.reward next to environment_workers",
            got="environment.kind agent without reward",
            fix="remove environment_workers: agents run in separate processes without them",
        )
    if judges_of_the_run(environment):
        raise ConfigError(
            "an actor of the environment cannot start a judge that is a model of this run",
            expected="either environment_workers or a judge with kind: model",
            got="environment_workers and a judge with kind: model",
            fix="remove environment_workers, or serve the judge elsewhere, and name it with "
            "judge: {kind: endpoint}",
        )
    dedicated = [each for each in model_scorers(environment) if each.dedicated_bundles]
    if dedicated:
        raise ConfigError(
            "a reward model with dedicated GPUs starts its own actors",
            expected="either environment_workers or a reward model's placement",
            got=f"environment_workers and {dedicated[0].dedicated_bundles[0].path}",
            fix="remove environment_workers: placement.own sets the number of actors",
        )


def refuse_isolation_without_actors(
    isolation: IsolationConfig, workers: EnvironmentWorkers | None
) -> None:
    """Refuses packages for an environment that runs in the trainer's process."""
    if isolation.environment is not None and workers is None:
        raise ConfigError(
            "an environment with isolated packages needs separate processes",
            expected="environment_workers next to isolation.environment",
            got="no environment_workers",
            fix="set environment_workers: {num_workers: 1}",
        )
