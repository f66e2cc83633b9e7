"""A policy from the name of a model and options, whose workers start on the first call.

The options are the keys of the settings and their names in transformers and Megatron:
`torch_dtype`, `load_in_8bit`, `tensor_model_parallel_size` and so on.
"""

import itertools
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.checkpoints.hub import hub_access, hub_folder
from nemo_rl_core.checkpoints.model_code import allow_or_refuse
from nemo_rl_core.config.cluster import ClusterConfig, ShapeName
from nemo_rl_core.config.generation import (
    HuggingFaceGenerationConfig,
    MegatronGenerationConfig,
    SamplingConfig,
)
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.config.model import PretrainedModel
from nemo_rl_core.config.names import unknown_names
from nemo_rl_core.config.training import DTensorTraining, LoRAConfig, MegatronTraining
from nemo_rl_core.data.pretrained import load_tokenizer, sampling_length, stop_token_ids
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.resources import count_gpus
from nemo_rl_core.distributed.session import ClusterSession, connect
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ConfigError, ModelError, ResourceError
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.columns import fill, training_columns
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy.lm_policy import Policy
from nemo_rl_core.models.policy.options import UNBOUNDED_CONTEXT, PolicyOptions
from nemo_rl_core.models.policy.reward_loss import RewardLossFn, as_rewards
from nemo_rl_core.telemetry.waiting import waiting_for_files

_LOG = logging.getLogger(__name__)
_numbers = itertools.count(1)
_OF_SOURCE = ("revision", "trust_remote_code")
_OF_GENERATE = frozenset(
    {"max_new_tokens", "top_p", "top_k", "repetition_penalty", "do_sample", "eos_token_id"}
    | {"pad_token_id"}
)


class PretrainedPolicy(PolicyInterface):
    """A policy that is named by its model; the untrained model is its reference.

    Args:
        model_name: A hub name, or a folder in the transformers layout.
        cluster: Cluster of the workers; by default this machine, with one copy of the model.
        **options: Settings of the backend (`tensor_parallel_size`, `lora`, ...), of the optimizer
            (`learning_rate`, ...), and those of `PolicyOptions`.

    Attributes:
        model_name: The argument.
        cluster: The argument.

    Raises:
        ConfigError: For an unknown option (suggests the nearest one) or an invalid value.
        ModelError: On the first call, if the model does not exist.
    """

    training_class: ClassVar[type[DTensorTraining] | type[MegatronTraining]]
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names of other libraries for settings of this one."""
    without_effect: ClassVar[Mapping[str, str]] = {}
    """Options that are accepted, with the reason why they change nothing."""

    def __init__(
        self,
        model_name: str | Path,
        cluster: ClusterSession | RayVirtualCluster | None = None,
        **options: Any,
    ) -> None:
        self.model_name = str(model_name)
        self.cluster = cluster
        renamed = self._renamed(options)
        self._device = _device_of(renamed.pop("device_map", "auto"))
        if self._device == "cpu":
            renamed.setdefault("dtype", "float32")
        source = {key: renamed.pop(key) for key in _OF_SOURCE if key in renamed}
        backend = self.training_class.model_fields
        _refuse_unknown(renamed, {*backend, *PolicyOptions.model_fields} - {"backend"})
        try:
            self._source = PretrainedModel(name=self.model_name, **source)
            self._training = self.training_class.model_validate(
                {key: value for key, value in renamed.items() if key in backend}
            )
            self._options = PolicyOptions.model_validate(
                {key: value for key, value in renamed.items() if key not in backend}
            )
        except ValidationError as error:
            raise describe(error, {**renamed, **source}) from error
        self._options_given = {
            key: getattr(self._options, key) for key in renamed if key not in backend
        }
        self._name = f"{type(self).__name__} {next(_numbers)}"
        self._trained_folder: Path | None = None
        self._running: Policy | None = None
        self._engine: Any = None
        self._num_updates, self._num_updates_of_engine = 0, -1

    def _renamed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        renamed = {}
        for name, value in options.items():
            if name in self.without_effect:
                _LOG.warning("%s has no effect: %s", name, self.without_effect[name])
            else:
                renamed[self.aliases.get(name, name)] = value
        if "dtype" in renamed:  # a name, or the type itself
            renamed["dtype"] = str(renamed["dtype"]).removeprefix("torch.")
        return renamed

    @property
    def policy(self) -> Policy:
        """The running policy; the first access starts or reuses its workers."""
        if self._running is None:
            self._check_placement(self.cluster)
            cluster = self.cluster or connect(self._one_copy())
            self._running = Policy(cluster, self._setup(), name=self._name)
        return self._running

    @property
    def temperature(self) -> float:
        """Temperature of the logprobs and of `generate`."""
        return self._options.temperature

    @property
    def model(self) -> str | PretrainedModel:
        """The model, as `fit` of a trainer takes it."""
        has_options = self._source.revision or self._source.trust_remote_code
        return self._source if has_options else self.model_name

    def _base_folder(self) -> Path:
        return local_folder(self._source)

    def _one_copy(self) -> ClusterConfig:
        has_gpu = self._device != "cpu" and bool(count_gpus())
        if self._device == "cuda" and not has_gpu:
            raise ResourceError(
                "device_map names a GPU",
                expected="a CUDA device",
                got="no GPU on this machine",
                fix="leave device_map out, or pass device_map='cpu'",
            )
        shape: ShapeName = "cluster" if has_gpu else "laptop"
        return ClusterConfig(shape=shape, num_workers=self._training.ranks_per_replica)

    def _check_placement(self, cluster: ClusterSession | RayVirtualCluster | None) -> None:
        placed = cluster.cluster if isinstance(cluster, ClusterSession) else cluster
        if placed is not None and self._device == ("cpu" if placed.use_gpus else "cuda"):
            raise ConfigError(
                "device_map contradicts the cluster of the policy",
                expected="device_map='auto', or a cluster of that device",
                got=f"device_map for {self._device}, and a cluster "
                f"{'with' if placed.use_gpus else 'without'} GPUs",
                fix="leave device_map out, or pass RayVirtualCluster(..., "
                f"use_gpus={not placed.use_gpus})",
            )

    def options(
        self, cluster: RayVirtualCluster | None = None, *, of_generate: bool = True
    ) -> dict[str, Any]:
        """Returns the options for `from_pretrained` of a trainer.

        Args:
            cluster: Cluster of the trainer; None trains one copy of the model on this machine.
            of_generate: Whether to include options of `generate`, for a trainer that samples.
        """
        self._check_placement(cluster)
        if cluster is None:
            config = self._one_copy()
        else:
            shape: ShapeName = "cluster" if cluster.use_gpus else "laptop"
            config = ClusterConfig(shape=shape, num_workers=cluster.world_size)
        options = {
            name: value
            for name, value in self._options_given.items()
            if of_generate or name not in _OF_GENERATE
        }
        if not options.pop("do_sample", True):
            options["temperature"] = 0.0  # refused by an algorithm that samples
        options.pop("pad_token_id", None)  # trainers mask padding
        return {"training": self._training, "cluster": config, **options}

    def _setup(self) -> TrainingSetup:
        base = self._base_folder()
        options = self._options
        return TrainingSetup(
            model_folder=self._trained_folder or base,
            reference_folder=base,
            optimizer=options,
            training=self._training,
            max_tokens_per_microbatch=options.max_tokens_per_microbatch,
            temperature=options.temperature,
            dtype=options.resolved_dtype,
            seed=options.seed,
        )

    def resume_from(self, model_folder: Path) -> None:
        """Continues with trained weights and a new optimizer from the next call on."""
        self.shutdown()
        self._trained_folder = model_folder

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `logprobs [B, T-1]` under the weights being trained."""
        return self.policy.get_logprobs(data)

    def get_reference_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Returns `logprobs [B, T-1]` under the untrained model."""
        return self.policy.get_reference_logprobs(data)

    def get_reference_topk_logprobs(self, data: BatchedDataDict, k: int) -> BatchedDataDict:
        """Returns `topk_ids` and `topk_logprobs [B, T-1, k]` under the untrained model."""
        return self.policy.get_reference_topk_logprobs(data, k)

    def train(self, data: BatchedDataDict, loss_fn: LossFunction | Any) -> dict[str, Any]:
        """Makes one optimizer step on the complete batch.

        Args:
            data: Argument of `training_columns`, with the columns that the loss reads;
                `prev_logprobs` and `reference_logprobs` are computed if they are missing.
            loss_fn: The loss, whose `columns` name the columns that it reads. Rewards `[B]`, or
                the result of an environment's `step`, select `RewardLossFn` and its `advantages`.

        Raises:
            MissingColumnError: If a column is missing that cannot be computed.
        """
        batch = training_columns(data)
        rewards = as_rewards(loss_fn, num_rows=batch.size)
        if rewards is not None:
            advantages = rewards - rewards.mean()
            batch = training_columns(BatchedDataDict({**batch, "advantages": advantages}))
            loss_fn = RewardLossFn()
        sources: dict[str, Callable[[], Tensor]] = {
            "prev_logprobs": lambda: self.policy.get_logprobs(batch)["logprobs"],
            "reference_logprobs": lambda: self.policy.get_reference_logprobs(batch)["logprobs"],
        }
        names = getattr(loss_fn, "columns", ())
        batch.require(name for name in names if name not in sources)
        fill(batch, names, sources)
        self._num_updates += 1
        return self.policy.train(batch, loss_fn)

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Completes prompts under the weights being trained.

        A worker with the complete model generates itself; otherwise a separate engine does, which
        gets the weights after each training step.

        Args:
            data: `input_ids [B, T]` with `input_lengths [B]` or `attention_mask [B, T]`.
            greedy: Always take the most likely token, the same as with `do_sample: false`.
        """
        if self.policy.generates:
            return self._generated_by_the_worker(data, greedy=greedy)
        if self._engine is None:
            self._engine = self._start_engine()
        if self._num_updates_of_engine != self._num_updates:
            self._engine.update_weights(self.policy)
            self._num_updates_of_engine = self._num_updates
        output: BatchedDataDict = self._engine.generate(data, greedy)
        return output

    def _generated_by_the_worker(self, data: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        options = self._options
        output = self.policy.generate(
            data, greedy, stop_token_ids=options.stop_token_ids, **options.sampling
        )
        position = torch.arange(output["output_ids"].shape[1])
        is_padding = position >= output["unpadded_sequence_lengths"][:, None]
        output["output_ids"][is_padding] = options.pad_token_id
        return output

    def _start_engine(self) -> Any:
        from nemo_rl_core.models.generation.engine import Generation  # which imports Policy

        options, base = self._options, self._base_folder()
        config: Any = self._engine_config(options.sampling)
        model_stops = stop_token_ids(base, load_tokenizer(base))
        setup = GenerationSetup(
            model_folder=base,
            config=config,
            max_model_len=sampling_length(base) or UNBOUNDED_CONTEXT,
            stop_token_ids=tuple(sorted({*model_stops, *options.stop_token_ids})),
            dtype=options.resolved_dtype,
            seed=options.seed,
            pad_token_id=options.pad_token_id,
        )
        return Generation(self.policy.session, setup, name=f"engine of {self._name}")

    @abstractmethod
    def _engine_config(self, sampling: Mapping[str, Any]) -> SamplingConfig:
        """Returns the config of the engine for a model that is split over workers."""

    def shutdown(self) -> None:
        """Ends the workers and drops their weights; may be called again."""
        if self._engine is not None:
            self._engine.shutdown()
        if self._running is not None:
            self._running.shutdown()
        self._running, self._engine = None, None


class HuggingFacePolicy(PretrainedPolicy):
    """Any transformers model, on the `dtensor` backend, with the options of `PretrainedPolicy`.

    `device_map` ("auto", "cuda", "cpu", None or {"": 0}) says whether workers compute on GPUs.
    `trust_remote_code` lets them run Python code that comes with the model, of a folder or of a
    `revision` on the hub. `load_in_8bit` and `load_in_4bit` load frozen quantized weights and train
    adapters on them.

    Example:
        >>> policy = HuggingFacePolicy("org/model", torch_dtype="bfloat16", tensor_parallel_size=2)
        >>> options = policy.options(RayVirtualCluster([4]))
        >>> options["training"].tensor_parallel_size, options["cluster"].num_workers
        (2, 4)
        >>> options["dtype"]
        'bfloat16'
    """

    training_class = DTensorTraining

    def _engine_config(self, sampling: Mapping[str, Any]) -> SamplingConfig:
        return HuggingFaceGenerationConfig(**sampling)

    aliases: ClassVar[Mapping[str, str]] = {
        "torch_dtype": "dtype",
        "tensor_model_parallel_size": "tensor_parallel_size",
    }

    def _renamed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        renamed = super()._renamed(options)
        chosen = [bits for bits in ("8bit", "4bit") if renamed.pop(f"load_in_{bits}", False)]
        if len(chosen) > 1:
            raise ConfigError(
                "weights are loaded in one type",
                expected="load_in_8bit or load_in_4bit",
                got="both",
                fix="leave one of them out",
            )
        if chosen:
            renamed = {"lora": LoRAConfig(), **renamed, "weights": chosen[0]}
        return renamed


class MegatronPolicy(PretrainedPolicy):
    """A model that Megatron-core supports, on the `megatron` backend, with its option names.

    Example:
        >>> policy = MegatronPolicy("org/model", pipeline_model_parallel_size=4)
        >>> policy.options()["training"].pipeline_parallel_size
        4
    """

    training_class = MegatronTraining

    def _engine_config(self, sampling: Mapping[str, Any]) -> SamplingConfig:
        assert isinstance(self._training, MegatronTraining)
        return MegatronGenerationConfig(
            tensor_parallel_size=self._training.tensor_parallel_size,
            pipeline_parallel_size=self._training.pipeline_parallel_size,
            **sampling,
        )

    aliases: ClassVar[Mapping[str, str]] = {
        "torch_dtype": "dtype",
        "tensor_model_parallel_size": "tensor_parallel_size",
        "pipeline_model_parallel_size": "pipeline_parallel_size",
        "virtual_pipeline_model_parallel_size": "virtual_pipeline_size",
        "expert_model_parallel_size": "expert_parallel_size",
    }
    without_effect: ClassVar[Mapping[str, str]] = {
        "use_flash_attention": "the fastest attention that is installed is taken anyway",
    }


def _device_of(device_map: Any) -> Literal["auto", "cuda", "cpu"]:
    """Returns where the workers compute, for values of `device_map` that name one device."""
    if device_map in (None, "auto"):
        return "auto"
    if device_map in ("cpu", {"": "cpu"}):
        return "cpu"
    if device_map in ("cuda", {"": "cuda"}, {"": "cuda:0"}, {"": 0}):
        return "cuda"
    raise ConfigError(
        "device_map does not say where the workers compute",
        expected="'auto', 'cuda', 'cpu', None or {'': 0}, since each rank has one device",
        got=repr(device_map)[:80],
        fix="leave device_map out; to divide a model over GPUs, pass tensor_parallel_size, or a "
        "cluster with several workers",
    )


def _refuse_unknown(options: Mapping[str, Any], choices: set[str]) -> None:
    unknown = [name for name in options if name not in choices]
    if unknown:
        raise unknown_names(
            "a policy has no option", unknown, sorted(choices), otherwise="leave it out"
        )


def local_folder(source: PretrainedModel) -> Path:
    """Returns the model's folder, after download if it is on the hub and not in the cache.

    The path is absolute, as workers have another working directory.
    """
    name, revision = source.name, source.revision
    folder = Path(name).expanduser()
    folder = folder.absolute() if folder.is_dir() else _downloaded(name, revision)
    allow_or_refuse(folder, trust=source.trust_remote_code, name=name, revision=revision)
    return folder


def _downloaded(model_name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with hub_access(model_name) as problem:
        try:
            with waiting_for_files(f"downloading {model_name}", hub_folder("model", model_name)):
                path = snapshot_download(
                    model_name, revision=revision, ignore_patterns=["*.bin", "*.pth", "*.gguf"]
                )
            return Path(path)
        except (OSError, HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            got = problem or str(error).splitlines()[0][:200]
            raise ModelError(
                f"the model {model_name!r} cannot be loaded",
                expected="a hub name, or a folder with config.json and *.safetensors",
                got=got,
                fix="correct model_name; without a network, name a folder on this machine",
            ) from error
