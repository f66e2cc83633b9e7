"""What one stage of a recipe asks of its GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import (
    GenerationConfig,
    SplitEngine,
    VllmGenerationConfig,
)
from nemo_rl_core.config.megatron_types import (
    BRIDGE,
    BRIDGE_VERSION,
    MEGATRON_TYPES,
    bridge_version,
)
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.placement import OwnBundles
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining, TrainingConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.routes import Location, Route, TransportName, choose_routes
from nemo_rl_core.planning.sizes import ModelSizes


@dataclass(frozen=True)
class TrainingLoad:
    """What a stage trains.

    Attributes:
        config: The section `training`.
        max_tokens_per_microbatch: The budget of a forward and backward pass.
        path: Of that budget in the recipe, such as `grpo.max_tokens_per_microbatch`.
        moments: Type of the optimizer's moments.
        num_sequences: Of one optimizer step.
        has_head: Whether it has the head of a language model; else a scalar one.
        has_critic: Whether a second model of the same size is trained beside it.
        reference: The model whose logprobs are computed besides; None without one.
        is_trained_base: Whether the reference is what LoRA's adapters are trained over.
        num_scorings: Forward passes over what a step samples besides those of training: for
            logprobs of the policy, of the reference, or of a teacher, and for values.
        num_epochs: Passes that train, a critic's among them.
    """

    config: TrainingConfig
    max_tokens_per_microbatch: int
    path: str
    num_sequences: int
    moments: Literal["float32", "8bit"] = "float32"
    has_head: bool = True
    has_critic: bool = False
    reference: ModelSizes | None = None
    is_trained_base: bool = True
    num_scorings: int = 0
    num_epochs: int = 1


@dataclass(frozen=True)
class SamplingLoad:
    """What a stage samples.

    Attributes:
        config: The section `generation`.
        path: Of that section in the recipe.
        num_sequences: Completions of a step.
        is_asynchronous: Whether the engine goes on while the model is trained.
        mean_completion_tokens: Of a completion on average; None takes every one at its longest.
    """

    config: GenerationConfig
    path: str
    num_sequences: int
    is_asynchronous: bool = False
    mean_completion_tokens: float | None = None


@dataclass(frozen=True)
class ScorerLoad:
    """A model that scores what a stage samples, on the trainer's first GPU or on its own.

    Attributes:
        name: For messages.
        sizes: Of the model.
        dtype: Type of its weights.
        path: Of its section in the recipe.
        num_tokens: Of a question and its reply; of a reward model those of a forward pass.
        share: Of the GPU, that a judge's engine reserves; None of a reward model.
        has_own_gpus: Whether it shares no GPU with engines and trainer.
        ranks: GPUs over which one copy of a judge is spread.
    """

    name: str
    sizes: ModelSizes
    dtype: DType
    path: str
    num_tokens: int
    share: float | None = None
    has_own_gpus: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class StageLoad:
    """A stage that computes on the GPUs of a recipe.

    Attributes:
        name: Of the stage.
        sizes: Of its model.
        cluster: The section `cluster`.
        dtype: Type of the matrix products.
        prompt_tokens: Of the longest prompt.
        completion_tokens: The most that stand behind it.
        training: What it trains; None if it only samples.
        sampling: What it samples; None if it only trains.
        scorers: Reward models and judges that score it.
        own_scorers: What they have besides the GPUs of trainer and engines.
    """

    name: str
    sizes: ModelSizes
    cluster: ClusterConfig
    dtype: DType
    prompt_tokens: int
    completion_tokens: int
    training: TrainingLoad | None = None
    sampling: SamplingLoad | None = None
    scorers: tuple[ScorerLoad, ...] = ()
    own_scorers: tuple[OwnBundles, ...] = ()

    @property
    def own_bundles(self) -> tuple[OwnBundles, ...]:
        """GPUs besides the trainer's: of engines, then of models that score."""
        return (*(self.sampling.config.own_bundles if self.sampling else ()), *self.own_scorers)

    @property
    def num_gpus(self) -> int:
        """GPUs of trainer, engines and models that score."""
        return self.cluster.num_gpus_with(self.own_bundles)

    @property
    def machines(self) -> list[int]:
        """Its GPUs on each machine."""
        return self.cluster.bundles_with(self.own_bundles)

    @property
    def has_own_engines(self) -> bool:
        """Whether the engines run on GPUs that the trainer does not use."""
        return self.sampling is not None and self.sampling.config.num_own_bundles > 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def mean_completion(self) -> float:
        """Tokens of a completion on average, as far as that is known; else of the longest."""
        known = self.sampling.mean_completion_tokens if self.sampling else None
        return min(known or self.completion_tokens, self.completion_tokens)

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence on average."""
        return self.prompt_tokens + self.mean_completion


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks.

    Attributes:
        tensor: Ranks of tensor parallelism.
        pipeline: Ranks that share the layers.
        context: Ranks that share the tokens of a row.
        expert: Ranks that share the experts, out of those with other rows.
        data: Copies of the model, each with its own rows.
        shards: Ranks over which weights, gradients and moments of a tensor rank are divided.
        is_wrapped: Whether there are several ranks, or weights on the host: FSDP2 then.
    """

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    shards: int
    is_wrapped: bool


def layout_of(training: TrainingConfig, num_workers: int) -> Layout:
    """The layout of a section `training` over the workers of a cluster.

    Raises:
        ConfigError: If the axes do not divide the ranks.
    """
    data = training.data_parallel_size(num_workers)
    tensor, context = training.tensor_parallel_size, training.context_parallel_size
    pipeline = expert = replicas = 1
    is_offloaded = False
    if isinstance(training, MegatronTraining):
        pipeline, expert = training.pipeline_parallel_size, training.expert_parallel_size
    if isinstance(training, DTensorTraining):
        replicas, is_offloaded = training.num_copies, training.cpu_offload
    if data % replicas:
        raise ConfigError(
            "the copies of HSDP do not divide the data ranks",
            expected=f"training.data_parallel_replicas that divides {data}",
            got=str(replicas),
            fix="lower training.data_parallel_replicas, or change cluster.num_workers",
        )
    return Layout(
        tensor,
        pipeline,
        context,
        expert,
        data,
        shards=data * context // replicas,
        is_wrapped=num_workers > 1 or is_offloaded,
    )


def gathered_width(load: StageLoad) -> int:
    """Bytes of a number in which a trainer's ranks gather whole weights for the engines.

    That is the type of the engines, but for adapters, which are merged in float32 first.
    """
    config = load.training.config if load.training else None
    has_lora = isinstance(config, DTensorTraining) and config.lora is not None
    return 2 if load.dtype == "bfloat16" and not has_lora else 4


def ranks_of_engine(config: GenerationConfig) -> int:
    """GPUs over which one copy of the engine's weights is spread."""
    return config.ranks_per_engine if isinstance(config, SplitEngine) else 1


def share_of_engine(config: GenerationConfig) -> float | None:
    """The share of a GPU that the engine reserves; None for one that reserves nothing."""
    return config.gpu_memory_utilization if isinstance(config, VllmGenerationConfig) else None


def routes_of(load: StageLoad) -> list[Route]:
    """Who sends weights to whom: what a transfer chooses for workers that lie as planned."""
    assert load.sampling is not None
    trainer = _places(load.cluster.bundles_per_node)
    if load.has_own_engines:
        taken = set(trainer)
        machines = load.cluster.bundles_with(load.sampling.config.own_bundles)
        engine = [place for place in _places(machines) if place not in taken]
    else:
        config = load.sampling.config
        engine = trainer[: config.num_engines * ranks_of_engine(config)]
    return choose_routes(trainer, engine)


def _places(gpus_per_machine: Sequence[int]) -> list[Location]:
    return [
        Location(f"machine {machine}", f"GPU {machine}.{gpu}")
        for machine, count in enumerate(gpus_per_machine)
        for gpu in range(count)
    ]


def transport_of(load: StageLoad) -> TransportName:
    """By which all weights travel: GPUs are either shared with the trainer or engines' own."""
    (transport,) = {route.transport for route in routes_of(load)}
    return transport


def layout_problem(load: StageLoad) -> str | None:
    """What keeps the code from running a stage's layout at all; None if nothing does."""
    sizes = load.sizes
    if load.training is not None:
        training = load.training.config
        size = training.tensor_parallel_size
        if size > 1 and sizes.num_experts and isinstance(training, DTensorTraining):
            return (
                "training.tensor_parallel_size: dtensor has no tensor parallelism for experts; "
                "set it to 1 (FSDP2 shards experts as other weights), or backend: megatron with "
                "expert_parallel_size"
            )
        if sizes.num_heads % size or sizes.num_kv_heads % size or sizes.mlp_width % size:
            return _indivisible("training.tensor_parallel_size", size, sizes)
        if needs_bridge(load) and bridge_version() is None:
            return (
                f"training.backend: megatron does not know the model type {sizes.model_type}; "
                f"{BRIDGE} {BRIDGE_VERSION}, which builds others, is not installed here"
            )
    if load.sampling is not None and isinstance(load.sampling.config, SplitEngine):
        size = load.sampling.config.tensor_parallel_size
        if sizes.num_heads % size:
            return _indivisible(f"{load.sampling.path}.tensor_parallel_size", size, sizes)
    return None


def needs_bridge(load: StageLoad) -> bool:
    """Whether `megatron` trains a model of a type that it does not build itself."""
    is_megatron = load.training is not None and isinstance(load.training.config, MegatronTraining)
    return is_megatron and load.sizes.model_type not in MEGATRON_TYPES


def untried(load: StageLoad) -> list[str]:
    """What of a stage's layout has never run on GPUs, as the README's table has it."""
    found = []
    if load.training is not None and load.cluster.num_gpus > 1:
        found.append("several ranks over NCCL")
    if load.training is not None and load.has_own_engines:
        found.append("engines on GPUs of their own, with weights over NCCL")
    if load.own_scorers:
        found.append("models that score on GPUs of their own")
    if len(load.machines) > 1:
        found.append("several machines")
    ranks = [ranks_of_engine(load.sampling.config)] if load.sampling else []
    if max([*ranks, *(each.ranks for each in load.scorers)], default=1) > 1:
        found.append("an engine over several GPUs")
    if getattr(load.training and load.training.config, "offload_for_generation", "none") != "none":
        found.append("training.offload_for_generation")
    if load.training is not None and getattr(load.training.config, "weights", "full") != "full":
        found.append("8 and 4 bit weights")
    if load.training is not None and getattr(load.training.config, "float8", "none") != "none":
        found.append("training.float8")
    if needs_bridge(load):
        found.append(f"models that {BRIDGE} builds")
    return found


def _indivisible(path: str, size: int, sizes: ModelSizes) -> str:
    return (
        f"{path}: {size} does not divide all of {sizes.num_heads} heads, {sizes.num_kv_heads} of "
        f"keys and the MLP's width {sizes.mlp_width}"
    )
