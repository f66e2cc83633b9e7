"""Generation engines in Ray workers, with the backend of the config."""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from nemo_rl_core.backends.decoding.requests import row_seeds
from nemo_rl_core.backends.generation.base import (
    GenerationSetup,
    get_generation_backend,
    takes_state_dicts,
)
from nemo_rl_core.backends.generation.gpu_memory import engine_gpu_use
from nemo_rl_core.backends.generation.state_dict import state_dict_worker
from nemo_rl_core.backends.transformers_logprobs import transformers_logprobs
from nemo_rl_core.config.generation import (
    GenerationConfig,
    VllmGenerationConfig,
    refuse_more_than,
)
from nemo_rl_core.config.registered import user_search_path
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.isolation import isolated_path
from nemo_rl_core.distributed.named_sharding import DATA
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.weight_sync.link import WeightLink
from nemo_rl_core.errors import (
    ConsistencyError,
    TransferError,
    WorkerLostError,
)
from nemo_rl_core.models.columns import as_training_batch, joined_outputs, with_lengths
from nemo_rl_core.models.generation import remote_completions
from nemo_rl_core.models.generation.engine_environment import engine_environment
from nemo_rl_core.models.generation.layout import WITHIN_AN_ENGINE, engine_key, engine_sharding
from nemo_rl_core.models.generation.remote_completions import RemoteCompletions, Requests
from nemo_rl_core.models.interfaces import GenerationDatumSpec, GenerationInterface
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation.proof import check_proof, proof_bounds, proof_prompts
from nemo_rl_core.store.machine import process_numerics
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.model_flops import model_shape
from nemo_rl_core.telemetry.waiting import waiting

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_READ = frozenset({*GenerationDatumSpec.__annotations__}) - {"__extra__"}
"""The columns that engines read."""


class Generation(GenerationInterface):
    """Engines that share the rows of a batch; running ones of the same model and size are reused.

    If a worker dies during generation, or does not answer within
    `setup.config.generate_timeout_seconds`, all workers are replaced, the weights are loaded again,
    and the call is repeated once. Seeds belong to rows, so that the repeated call draws the same
    tokens.

    Before an engine completes anything, a proof checks that it computes with the right weights:
    weights of a folder are compared with transformers, weights of a policy with that policy.

    Args:
        cluster: A session with its running workers, or a custom cluster.
        setup: Model, sampling and size. The weights of `setup.model_folder` are loaded.
        name: Name of the worker group. A later engine of the same name reuses the workers.
        gate: Bounds of a step, from which the bounds of proofs are derived (`proof_bounds`).

    Attributes:
        num_engines: Number of copies of the model.
        num_restarts: Number of times that the workers were restarted.
        may_restart: Whether lost workers are restarted; not while the policy is trained, since its
            weights would be newer than those of the engine.

    Raises:
        ConfigError: If the cluster has too few bundles for the engines.
    """

    def __init__(
        self,
        cluster: ClusterSession | RayVirtualCluster,
        setup: GenerationSetup,
        *,
        name: str = "generation",
        gate: GateConfig | None = None,
    ) -> None:
        session = ClusterSession(cluster) if isinstance(cluster, RayVirtualCluster) else cluster
        self._session, self._setup, self._name = session, setup, name
        self._bounds = proof_bounds(
            gate or GateConfig(),
            dtype=setup.dtype,
            is_quantized=getattr(setup.config, "quantization", "none") != "none",
            has_gpu=session.cluster.use_gpus,
        )
        self._is_dedicated = setup.config.num_dedicated_bundles > 0
        if not self._is_dedicated:
            refuse_more_than(session.cluster.world_size, setup.config)
        self._sharding = engine_sharding(setup.config)
        self.num_engines = self._sharding.axis_size(DATA)
        self.num_restarts = 0
        self.may_restart = True
        self._num_unseeded_calls = 0
        self._start()
        # Also in a new engine, so that weights always take the same path and are bitwise identical.
        self.load_weights(setup.model_folder)

    @property
    def config(self) -> GenerationConfig:
        """Sampling settings and size."""
        return self._setup.config

    @property
    def session(self) -> ClusterSession:
        """Session in which the workers run."""
        return self._session

    @property
    def _backend(self) -> str:
        return self._setup.config.backend

    def _start(self) -> None:
        config, backend = self._setup.config, get_generation_backend(self._backend)
        worker = state_dict_worker(backend) if takes_state_dicts(backend) else backend
        bundles = [replace(each, name=self._name) for each in config.dedicated_bundles]
        self._workers, is_new = self._session.workers(
            worker,
            name=self._name,
            key=f"{self._backend} {id(backend)} {engine_key(self._setup)}",
            sharding=self._sharding,
            env_vars={
                **engine_environment(config),
                **user_search_path(config),
                **isolated_path(self._setup.isolation),
            },
            cluster=self._session.dedicated_cluster(bundles[0]) if bundles else None,
        )
        if is_new:
            with waiting(f"starting the engine ({self._backend})"):
                self._workers.run_all_workers_single_data("setup", self._setup)
        numerics = self._workers.run_single_worker("__ray_call__", process_numerics)
        usage.saw_process("generation", numerics)
        self._count_gpus(reset_peak=True)
        self._proven: Path | Policy | None = None

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Completes a batch with the columns of `GenerationDatumSpec`, in order.

        Without `seeds`, seeds are derived from the engine's seed and the number of earlier calls
        without seeds. Columns that no engine reads are returned unchanged, and with them
        `completions`, the texts.
        """
        read = {name: value for name, value in data.items() if name in _READ}
        others = {name: value for name, value in data.items() if name not in _READ}
        batch = self._completed_columns(BatchedDataDict(read))
        output = self._with_restart(partial(self._generate, batch, greedy=greedy))
        if others:
            output.update({**others, "completions": self._texts(output)})
        return output

    def _with_restart(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except WorkerLostError as lost:
            self._restart(lost)
            return call()

    def complete(
        self,
        requests: Requests,
        *,
        greedy: bool = False,
        releases_memory: bool = False,
        discards_weights: bool = False,
        weight_version: int | None = None,
    ) -> RemoteCompletions:
        """Completes requests; the completions stay in the object store.

        Args:
            releases_memory: Whether engines wake up before and release GPU memory afterwards, in
                the same call, as in `prepare_for_generation` and `finish_generation`.
            discards_weights: Same as in `finish_generation`.
            weight_version: Version of the weights to record for the tokens, if any.
        """
        sleep = self._sleep_options(discards_weights=discards_weights) if releases_memory else None
        options = {
            "model_folder": self._setup.model_folder,
            "greedy": greedy,
            "sleep": sleep,
            "weight_version": weight_version,
        }

        def call() -> RemoteCompletions:
            self._prove_folder()
            answers = self._workers.run_all_workers_on_parts(
                remote_completions.complete,
                remote_completions.parts_of_engines(requests, self.num_engines),
                axis=DATA,
                common_kwargs=options,
                timeout_seconds=self._setup.config.generate_timeout_seconds,
                num_remote=2,
            )
            return remote_completions.joined(answers)

        completions = self._with_restart(call)
        usage.count(
            "generation",
            model_shape(self._setup.model_folder),
            completions.input_lengths,
            num_generated=int(completions.completion_lengths.sum()),
        )
        return completions

    def _texts(self, output: BatchedDataDict) -> list[str]:
        tokenizer = load_tokenizer(self._setup.model_folder)
        ends = output["unpadded_sequence_lengths"].tolist()
        starts = (output["unpadded_sequence_lengths"] - output["generation_lengths"]).tolist()
        return [
            tokenizer.decode(ids[start:end], skip_special_tokens=True)
            for ids, start, end in zip(output["output_ids"], starts, ends, strict=True)
        ]

    def _generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        self._prove_folder()
        output = self._completed(batch, greedy=greedy)
        usage.count(
            "generation",
            model_shape(self._setup.model_folder),
            output["unpadded_sequence_lengths"].tolist(),
            num_generated=int(output["generation_lengths"].sum()),
        )
        return output

    def _completed(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        answers = self._workers.run_all_workers_sharded_data(
            "generate",
            in_sharded_axes=[DATA],
            replicate_on_axes=WITHIN_AN_ENGINE,
            output_is_replicated=WITHIN_AN_ENGINE,
            common_kwargs={"greedy": greedy},
            timeout_seconds=self._setup.config.generate_timeout_seconds,
            batch=[batch.chunk(engine, self.num_engines) for engine in range(self.num_engines)],
        )
        output = joined_outputs(answers)
        width = torch.arange(output["output_ids"].shape[1])
        is_padding = width >= output["unpadded_sequence_lengths"][:, None]
        output["output_ids"][is_padding] = self._setup.pad_token_id
        return output

    def _completed_columns(self, data: BatchedDataDict) -> BatchedDataDict:
        batch = with_lengths(data)
        if "seeds" not in batch:
            batch["seeds"] = row_seeds(self._setup.seed + self._num_unseeded_calls, batch.size)
            self._num_unseeded_calls += 1
        return batch

    def _restart(self, lost: WorkerLostError) -> None:
        if not self.may_restart:
            raise lost
        _LOG.warning("%s; the engine is started again", lost.problem)
        self.num_restarts += 1
        self._session.discard(self._name)
        self._start()
        if isinstance(self._source, Path):
            self.load_weights(self._source)
            return
        digest = self._digest
        self.update_weights(self._source)
        if self._digest != digest:
            raise ConsistencyError(
                "a restarted engine cannot get back the weights that it had: the policy has been "
                "trained since",
                expected=f"checksum {digest}",
                got=f"checksum {self._digest}",
                fix="run the same command again: it resumes from the last save",
            ) from lost

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Allocates GPU memory again; on a CPU, engines never free it.

        If workers are lost, all are restarted with the weights that they had.
        """
        if self._is_dedicated:
            return  # never asleep
        try:
            self._workers.run_all_workers_single_data("wake")
        except WorkerLostError as lost:
            self._restart(lost)

    def finish_generation(self, *args: Any, discards_weights: bool = False, **kwargs: Any) -> None:
        """Frees GPU memory for training; the next call allocates it again.

        Engines on dedicated GPUs keep it. Lost workers have freed it already; the next call that
        needs them restarts them.

        Args:
            discards_weights: Whether `update_weights` comes before the engine generates again, so
                that vLLM needs no copy of the weights on the host.
        """
        options = self._sleep_options(discards_weights=discards_weights)
        if options is None:
            return
        with suppress(WorkerLostError):
            self._workers.run_all_workers_single_data("sleep", **options)

    def _sleep_options(self, *, discards_weights: bool) -> dict[str, int] | None:
        """Returns arguments of the workers' `sleep`; None if they never sleep."""
        if self._is_dedicated:
            return None
        discards = discards_weights and isinstance(self._setup.config, VllmGenerationConfig)
        return {"level": 2} if discards else {}

    def update_weights(self, policy: Policy) -> None:
        """Loads the policy's weights and compares the checksums of sender and receiver.

        If workers of the engine are lost, all are restarted first. After the first transfer,
        `prove` checks the engine.
        """
        try:
            self._transfer_weights(policy)
        except (WorkerLostError, TransferError) as lost:
            policy.check_alive()
            _LOG.warning("%s; the engine is started again", lost.problem)
            self.num_restarts += 1
            self._start()
            self._transfer_weights(policy)

    def _transfer_weights(self, policy: Policy) -> None:
        limit = self._setup.config.generate_timeout_seconds
        try:
            link = WeightLink.between(policy.workers, self._workers, timeout_seconds=limit)
            self._transfer_and_prove(link, policy)
        except BaseException:
            self._session.discard(self._name)  # it may have only some of the new weights
            raise
        self._source: Path | Policy = policy
        self._proven = policy

    def _transfer_and_prove(self, link: WeightLink, policy: Policy) -> None:
        """Proves the first update only; the gate of each step finds later errors."""
        self._digest = link.transfer()
        if self._proven is not policy:
            self.prove(policy)

    def load_weights(self, model_folder: Path) -> None:
        """Loads the weights of a transformers folder of the same architecture."""
        with waiting("loading weights into the engine"):
            self._workers.run_all_workers_single_data("load_weights", model_folder)
        self._source, self._proven = model_folder, None

    @cached_property
    def _proof_prompts(self) -> BatchedDataDict:
        setup = self._setup
        return proof_prompts(setup.model_folder, max_model_len=setup.max_model_len)

    def _proof_of_each_engine(self, *, greedy: bool) -> BatchedDataDict:
        prompts = BatchedDataDict.from_batches([self._proof_prompts] * self.num_engines)
        return self._completed(prompts, greedy=greedy)

    def prove(self, policy: Policy) -> float:
        """Completes a few fixed prompts, and compares their logprobs with the policy's.

        Returns:
            `token_mult_prob_error`; 1 is perfect agreement, NaN without logprobs to compare.
        """
        with waiting("checking the engine against the trainer"):
            output = self._proof_of_each_engine(greedy=False)
            if getattr(policy, "offloads_weights", False):
                # `_checked` loads the policy's weights next, perhaps on the same GPU.
                self.finish_generation()
            return self._checked(output, policy)

    def _prove_folder(self) -> None:
        if self._proven is not None or not isinstance(self._source, Path):
            return
        with waiting("checking the engine against transformers"):
            output = self._proof_of_each_engine(greedy=True)
            self._checked(output, self._source)
        self._proven = self._source

    def _checked(self, output: BatchedDataDict, reference: Policy | Path) -> float:
        if "logprobs" not in output:
            if self._proven is not reference:  # not in every step
                _LOG.warning("%s returns no logprobs: nothing checks its weights", self._backend)
            return math.nan
        batch = as_training_batch(output)
        if isinstance(reference, Path):
            name, logprobs = "transformers", self._by_transformers(reference, batch)
        else:
            name, logprobs = "the trainer", reference.get_logprobs(batch)["logprobs"]
        batch["generation_logprobs"], batch["prev_logprobs"] = output["logprobs"][:, 1:], logprobs
        # Engines separately: one wrong engine of many must not count as a few wrong sequences.
        return max(
            check_proof(batch.chunk(engine, self.num_engines), self._bounds, reference=name)
            for engine in range(self.num_engines)
        )

    def _by_transformers(self, model_folder: Path, batch: BatchedDataDict) -> torch.Tensor:
        config = self._setup.config
        # Only vLLM, and only at a temperature other than 1, reports logprobs after the penalty.
        is_penalized = isinstance(config, VllmGenerationConfig) and config.temperature != 1
        call = partial(
            transformers_logprobs,
            model_folder,
            batch,
            dtype=getattr(torch, self._setup.dtype),
            repetition_penalty=config.repetition_penalty if is_penalized else 1.0,
        )
        started = self._workers.start_single_worker("__ray_call__", lambda _: call())
        logprobs: torch.Tensor
        (logprobs,) = self._workers.finish([started], config.generate_timeout_seconds)
        return logprobs

    def _count_gpus(self, *, reset_peak: bool = False) -> None:
        """Records the GPU memory of the workers in the usage of the stage; no-op on CPUs."""
        if not self._session.cluster.use_gpus:
            return
        call = partial(engine_gpu_use, reset_peak=reset_peak)
        for each in self._workers.run_all_workers_single_data("__ray_call__", call):
            if each is not None:
                usage.saw_engine_gpu(each)

    def peak_memory_gib(self) -> float:
        """Returns the peak host memory of all processes of the engines together."""
        self._count_gpus()
        return float(sum(self._workers.run_all_workers_single_data("peak_memory_gib")))

    def shutdown(self) -> None:
        """Ends the workers, if no other engine will reuse them; may be called again."""
        link = WeightLink.by_engine.get(self._workers)
        if link is not None:
            link.close()
        self._session.discard(self._name)
