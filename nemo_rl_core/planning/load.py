"""The load of a stage: what it computes, and the GPUs that it computes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import GenerationConfig, SplitEngine, VllmGenerationConfig
from nemo_rl_core.config.megatron_types import (
    BRIDGE,
    BRIDGE_VERSION,
    MEGATRON_TYPES,
    bridge_version,
)
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining, TrainingConfig
from nemo_rl_core.distributed.weight_sync.routes import (
    Location,
    Route,
    TransportName,
    choose_routes,
)
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.sizes import ModelSizes


@dataclass(frozen=True)
class TrainingLoad:
    """Training work of a stage.

    Attributes:
        has_critic: Whether a second model of the same size is trained with it.
        reference_is_base: Whether the reference is the base model of the LoRA adapters.
        num_scorings: Number of forward passes over the samples of a step in addition to training:
            for logprobs of the policy, the reference or a teacher, and for values.
        num_epochs: Number of training passes, including those of a critic.
    """

    config: TrainingConfig
    max_tokens_per_microbatch: int
    path: str
    num_sequences: int
    moments: Literal["float32", "8bit"] = "float32"
    has_head: bool = True
    has_critic: bool = False
    reference: ModelSizes | None = None
    reference_is_base: bool = True
    num_scorings: int = 0
    num_epochs: int = 1


@dataclass(frozen=True)
class SamplingLoad:
    """Sampling work of a stage; completions have the maximum length unless the mean is known."""

    config: GenerationConfig
    path: str
    num_sequences: int
    is_asynchronous: bool = False
    mean_completion_tokens: float | None = None


@dataclass(frozen=True)
class ScorerLoad:
    """A model that scores samples: a judge's engine, or a reward model.

    Attributes:
        share: Fraction of a GPU's memory that a judge's engine uses; None for a reward model.
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
        dtype: Dtype of the matrix products.
        own_scorers: Bundles dedicated to the scorers.
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
    own_scorers: tuple[DedicatedBundles, ...] = ()

    @property
    def dedicated_bundles(self) -> tuple[DedicatedBundles, ...]:
        """Dedicated bundles of engines, then of scorers."""
        return (
            *(self.sampling.config.dedicated_bundles if self.sampling else ()),
            *self.own_scorers,
        )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of trainer, engines and scorers."""
        return self.cluster.num_gpus_with(self.dedicated_bundles)

    @property
    def machines(self) -> list[int]:
        """Number of GPUs on each machine."""
        return self.cluster.bundles_with(self.dedicated_bundles)

    @property
    def has_own_engines(self) -> bool:
        """Whether the engines have dedicated GPUs."""
        return self.sampling is not None and self.sampling.config.num_dedicated_bundles > 0

    @property
    def longest(self) -> int:
        """Maximum length of a sequence in tokens."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def mean_completion(self) -> float:
        """Mean length of a completion in tokens; the maximum length if the mean is unknown."""
        mean = self.sampling.mean_completion_tokens if self.sampling else None
        return min(mean or self.completion_tokens, self.completion_tokens)

    @property
    def mean_length(self) -> float:
        """Mean length of a sequence in tokens."""
        return self.prompt_tokens + self.mean_completion


@dataclass(frozen=True)
class Layout:
    """Layout of a model over ranks.

    Attributes:
        expert: Number of expert-parallel ranks, which are also data-parallel ranks.
        shards: Number of ranks that shard the weights, gradients and moments of a tensor rank.
        is_wrapped: Whether FSDP2 is used: there are several ranks, or weights on the host.
    """

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    shards: int
    is_wrapped: bool


def layout_of(training: TrainingConfig, num_workers: int) -> Layout:
    """Returns the layout of a section `training` over the workers of a cluster."""
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
    """Returns the bytes per value of the full weights that the trainer gathers for engines.

    The dtype is the engines', except with adapters, which are first merged in float32.
    """
    config = load.training.config if load.training else None
    has_lora = isinstance(config, DTensorTraining) and config.lora is not None
    return 2 if load.dtype == "bfloat16" and not has_lora else 4


def ranks_of_engine(config: GenerationConfig) -> int:
    """Returns the number of GPUs of one engine."""
    return config.ranks_per_engine if isinstance(config, SplitEngine) else 1


def share_of_engine(config: GenerationConfig) -> float | None:
    """Returns the fraction of a GPU that the engine reserves; None if it reserves nothing."""
    return config.gpu_memory_utilization if isinstance(config, VllmGenerationConfig) else None


def routes_of(load: StageLoad) -> list[Route]:
    """Returns the routes that a weight transfer chooses for workers placed as planned."""
    assert load.sampling is not None
    trainer = _locations(load.cluster.bundles_per_node)
    if load.has_own_engines:
        trainer_set = set(trainer)
        machines = load.cluster.bundles_with(load.sampling.config.dedicated_bundles)
        engine = [each for each in _locations(machines) if each not in trainer_set]
    else:
        config = load.sampling.config
        engine = trainer[: config.num_engines * ranks_of_engine(config)]
    return choose_routes(trainer, engine)


def _locations(gpus_per_machine: Sequence[int]) -> list[Location]:
    return [
        Location(f"machine {machine}", f"GPU {machine}.{gpu}")
        for machine, count in enumerate(gpus_per_machine)
        for gpu in range(count)
    ]


def transport_of(load: StageLoad) -> TransportName:
    """Returns the transport of all weights: engines share the trainer's GPUs or have their own."""
    (transport,) = {route.transport for route in routes_of(load)}
    return transport


def layout_problem(load: StageLoad) -> str | None:
    """Returns the reason why a stage's layout cannot run at all, else None."""
    sizes = load.sizes
    if load.training is not None:
        training = load.training.config
        size = training.tensor_parallel_size
        if size > 1 and sizes.num_experts and isinstance(training, DTensorTraining):
            return (
                "training.tensor_parallel_size: dtensor has no tensor parallelism for experts; "
                "set it to 1 (FSDP2 shards experts like other weights), or backend: megatron with "
                "expert_parallel_size"
            )
        if sizes.num_heads % size or sizes.num_kv_heads % size or sizes.mlp_width % size:
            return _indivisible("training.tensor_parallel_size", size, sizes)
        if needs_bridge(load) and bridge_version() is None:
            return (
                f"training.backend: megatron does not support the model type {sizes.model_type}; "
                f"{BRIDGE} {BRIDGE_VERSION}, which does, is not installed here"
            )
    if load.sampling is not None and isinstance(load.sampling.config, SplitEngine):
        size = load.sampling.config.tensor_parallel_size
        if sizes.num_heads % size:
            return _indivisible(f"{load.sampling.path}.tensor_parallel_size", size, sizes)
    return None


def needs_bridge(load: StageLoad) -> bool:
    """Whether the megatron backend needs Megatron-Bridge to build the stage's model."""
    is_megatron = load.training is not None and isinstance(load.training.config, MegatronTraining)
    return is_megatron and load.sizes.model_type not in MEGATRON_TYPES


def untried(load: StageLoad) -> list[str]:
    """Returns the features of a stage that have never run on GPUs (see the README's table)."""
    features = []
    if load.training is not None and load.cluster.num_gpus > 1:
        features.append("several ranks over NCCL")
    if load.training is not None and load.has_own_engines:
        features.append("engines on dedicated GPUs, with weights over NCCL")
    if load.own_scorers:
        features.append("models that score on dedicated GPUs")
    if len(load.machines) > 1:
        features.append("several machines")
    ranks = [ranks_of_engine(load.sampling.config)] if load.sampling else []
    if max([*ranks, *(each.ranks for each in load.scorers)], default=1) > 1:
        features.append("an engine over several GPUs")
    if getattr(load.training and load.training.config, "offload_for_generation", "none") != "none":
        features.append("training.offload_for_generation")
    if load.training is not None and getattr(load.training.config, "weights", "full") != "full":
        features.append("8 and 4 bit weights")
    if load.training is not None and getattr(load.training.config, "float8", "none") != "none":
        features.append("training.float8")
    if needs_bridge(load):
        features.append(f"models that {BRIDGE} builds")
    return features


def _indivisible(path: str, size: int, sizes: ModelSizes) -> str:
    return (
        f"{path}: {size} does not divide all of {sizes.num_heads} heads, {sizes.num_kv_heads} "
        f"key heads and the MLP's width {sizes.mlp_width}"
    )
