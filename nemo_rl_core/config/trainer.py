"""What every trainer reads besides the settings of its own algorithm."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.environment import (
    EnvironmentConfig,
    EnvironmentWorkers,
    answers_back,
    judges_of_the_run,
    model_scorers,
    own_bundles_of_scorers,
)
from nemo_rl_core.config.generation import (
    GenerationConfig,
    SamplingConfig,
    VllmGenerationConfig,
    refuse_misplaced,
)
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.config.training import DTensorTraining, TrainingConfig
from nemo_rl_core.errors import ConfigError


class KeepBest(FrozenConfig):
    """Which checkpoints to keep besides the newest: the `count` best by a metric of their step.

    Attributes:
        metric: A metric that is saved with a step, such as `validation_loss`.
        mode: Whether the highest or the lowest value is best.
        count: Checkpoints to keep by this metric.
        result: Which model the stage hands out, and so which one is evaluated and exported: that
            of the last step, or the best one with its optimizer state.
    """

    metric: str = Field(min_length=1, description="such as validation_loss")
    mode: Literal["max", "min"]
    count: PositiveInt = 1
    result: Literal["last", "best"] = "last"


class LoopConfig(OptimizerConfig):
    """The optimizer, and when a loop of steps saves and validates.

    `max_tokens_per_microbatch` bounds the memory of one forward and backward pass; it changes
    results only by rounding. Validation runs every `validate_every_num_steps` steps and after the
    last one; left out, the trainer does not validate. While a run is under way its `keep_latest`
    newest checkpoints are kept, and the best ones by `keep_best`. A finished run has the last model
    in `model/` and the best one in `best/`; with `keep_best.result: best` the best is in `model/`.

    Attributes:
        max_tokens_per_microbatch: The most tokens of one forward and backward pass.
        save_every_num_steps: Optimization steps between two saved checkpoints.
        validate_every_num_steps: Steps between two validations; None never validates.
        keep_latest: Newest checkpoints to keep while a run is under way.
        keep_best: Which checkpoints to keep besides the newest; None keeps no others.
    """

    max_tokens_per_microbatch: PositiveInt = 8192
    save_every_num_steps: PositiveInt = 50
    validate_every_num_steps: PositiveInt | None = None
    keep_latest: PositiveInt = 1
    keep_best: KeepBest | None = None

    @model_validator(mode="after")
    def _the_best_are_known_when_saved(self) -> "LoopConfig":
        every = self.validate_every_num_steps
        validated = self.keep_best is not None and self.keep_best.metric.startswith("validation_")
        if validated and (every is None or self.save_every_num_steps % every):
            raise ValueError(
                f"keep_best compares {self.keep_best.metric!r}, which checkpoints are saved with "  # type: ignore[union-attr]
                "only if they are validated: set validate_every_num_steps, and "
                "save_every_num_steps to a multiple of it"
            )
        return self


class GateConfig(FrozenConfig):
    """How far the engine's logprobs may be from the trainer's: `mean exp|gen - prev|`, 1 if equal.

    A sequence whose own mean is past `max_sequence_mult_prob_error` is left out of the loss. The
    run stops if the other tokens' mean is past `max_token_mult_prob_error`, or if more than
    `max_masked_fraction` of the step's sequences were left out.

    Attributes:
        max_token_mult_prob_error: The largest mean over the step's tokens; past it the run stops.
        max_sequence_mult_prob_error: The largest mean over one sequence; past it the sequence is
            left out of the loss.
        max_masked_fraction: The largest share of a step's sequences that may be left out; past it
            the run stops.
    """

    max_token_mult_prob_error: float = Field(default=1.05, gt=1, allow_inf_nan=True)
    max_sequence_mult_prob_error: float = Field(default=2.0, gt=1, allow_inf_nan=True)
    max_masked_fraction: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _a_sequence_may_be_off_further(self) -> "GateConfig":
        if self.max_sequence_mult_prob_error < self.max_token_mult_prob_error:
            raise ValueError(
                f"max_sequence_mult_prob_error ({self.max_sequence_mult_prob_error}) must not be "
                f"below max_token_mult_prob_error ({self.max_token_mult_prob_error}): the mean of "
                "one sequence spreads more than that of all"
            )
        return self


class TrainerSettings(FrozenConfig):
    """Where and how a trainer computes; a subclass adds the section of its algorithm."""

    training: TrainingConfig = DTensorTraining()
    cluster: ClusterConfig = ClusterConfig()
    dtype: DType = "float32"
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _workers_hold_whole_copies(self) -> Self:
        self.training.data_parallel_size(self.cluster.num_workers)
        return self


def refuse_without_scalar_head(training: TrainingConfig) -> None:
    """Refuses a backend that trains no reward model or critic.

    Raises:
        ConfigError: For such a backend.
    """
    if training.backend == "megatron":
        raise ConfigError(
            "the megatron backend has no scalar head, which a reward model or critic needs",
            expected="training.backend: dtensor",
            got="training.backend: megatron",
            fix="train this algorithm with the dtensor backend",
        )


class RolloutLimits(FrozenConfig):
    """Where a rollout is cut, and how many failures a run tolerates.

    `max_turns` of the policy are played with an environment that answers. `max_rollout_tokens` is
    the room behind the prompt for all turns together, the environment's too; left out, it is
    `generation.max_new_tokens`, which is the bound of one turn: a turn that is cut there is heard
    as it is, and the next one follows. A rollout that cannot be scored is set aside: it is counted,
    and not trained on. Where more than `max_failed_fraction` of those scored at once are, or all,
    the run stops.

    Attributes:
        max_turns: Turns of the policy in one episode.
        max_rollout_tokens: Tokens behind the prompt, of all turns and of the environment together;
            None takes `generation.max_new_tokens`.
        max_failed_fraction: The largest share of rollouts scored at once that may fail; past it the
            run stops.
    """

    max_turns: PositiveInt = 16
    max_rollout_tokens: PositiveInt | None = None
    max_failed_fraction: float = Field(default=0.1, ge=0, le=1)

    def room(self, generation: SamplingConfig) -> int:
        """The most tokens that can stand behind a prompt."""
        return self.max_rollout_tokens or generation.max_new_tokens


class RolloutSettings(TrainerSettings):
    """What an algorithm reads besides that samples completions and scores them."""

    environment: EnvironmentConfig = ExactMatch()
    rollouts: RolloutLimits = RolloutLimits()
    generation: GenerationConfig = VllmGenerationConfig()
    environment_workers: EnvironmentWorkers | None = None
    max_prompt_tokens: PositiveInt = 512

    @property
    def max_rollout_tokens(self) -> int:
        """The most tokens that can stand behind a prompt."""
        return self.rollouts.room(self.generation)

    @property
    def own_bundles(self) -> tuple[OwnBundles, ...]:
        """What engines and models that score have besides the trainer's bundles, in this order."""
        return (*self.generation.own_bundles, *own_bundles_of_scorers(self.environment))

    @model_validator(mode="after")
    def _engines_fit_the_cluster(self) -> Self:
        scorers = own_bundles_of_scorers(self.environment)
        refuse_misplaced(self.cluster, self.generation, scorers)
        refuse_scorers_in_actors(self.environment, self.environment_workers)
        refuse_judge_beside_others(self.cluster, self.generation, self.environment)
        return self


def refuse_judge_beside_others(
    cluster: ClusterConfig,
    generation: SamplingConfig,
    environment: EnvironmentConfig,
    *,
    samples_ahead: bool = False,
) -> None:
    """Refuses a judge of the run that would be asked while others hold the memory of its GPU.

    On GPUs it lies on one of the trainer's. Engines there are awake between turns and while they
    sample ahead; where they sample ahead of a conversation, its turns are scored beside training.

    Args:
        cluster: The section; without GPUs nothing is refused.
        generation: The section of the policy's engines.
        environment: What scores.
        samples_ahead: Whether engines generate while a model is trained.

    Raises:
        ConfigError: Names another place for the judge or the engines.
    """
    colocated = [each for each in judges_of_the_run(environment) if each.placement == "colocated"]
    if not cluster.num_gpus or not colocated:
        return
    has_turns, has_own_engines = answers_back(environment), generation.num_own_bundles > 0
    beside_engine = not has_own_engines and (samples_ahead or has_turns)
    beside_trainer = has_own_engines and samples_ahead and has_turns
    if not beside_engine and not beside_trainer:
        return
    when = "while an engine samples on the same GPU" if beside_engine else "during training steps"
    endpoint = "serve the judge elsewhere, and name it with judge: {kind: endpoint}"
    of_judge = "give the judge a GPU of its own, judge.placement: {own: 1}, or "
    of_engines = "give the engines GPUs of their own, generation.placement: {own: 1}, or "
    raise ConfigError(
        f"a judge with kind: model on the trainer's GPU is asked {when}",
        expected="a judge that is asked while nothing else holds the GPU's memory",
        got="an environment with several turns" if has_turns else "grpo.asynchronous",
        fix=of_judge
        + (of_engines if beside_engine and not (samples_ahead and has_turns) else "")
        + endpoint,
    )


def refuse_scorers_in_actors(
    environment: EnvironmentConfig, workers: EnvironmentWorkers | None
) -> None:
    """Refuses scorers that start workers of their own in an environment that runs in actors.

    Raises:
        ConfigError: Names the setting.
    """
    if workers is None:
        return
    if judges_of_the_run(environment):
        raise ConfigError(
            "a judge that is a model of this run cannot be started by an actor of the environment",
            expected="environment_workers, or a judge with kind: model, and not both",
            got="environment_workers, and a judge with kind: model",
            fix="leave environment_workers out, or serve the judge elsewhere, and name it with "
            "judge: {kind: endpoint}",
        )
    own = [each for each in model_scorers(environment) if each.own_bundles]
    if own:
        raise ConfigError(
            "a reward model with a placement of its own has actors of its own",
            expected="environment_workers, or a reward model's placement, and not both",
            got=f"environment_workers, and {own[0].own_bundles[0].path}",
            fix="leave environment_workers out: there are as many actors as placement.own says",
        )
