"""Generation engines in Ray workers, of whatever kind the config names."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from nemo_rl_core.backends.decoding.requests import row_seeds
from nemo_rl_core.backends.generation.base import GenerationSetup, get_generation_backend
from nemo_rl_core.backends.generation.gpu_memory import engine_gpu_use
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
from nemo_rl_core.distributed.named_sharding import DATA
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.distributed.weight_sync import WeightLink
from nemo_rl_core.errors import (
    ConsistencyError,
    TransferError,
    WorkerLostError,
)
from nemo_rl_core.models.columns import as_training_batch, with_lengths
from nemo_rl_core.models.generation import where_made
from nemo_rl_core.models.generation.engine_environment import engine_environment
from nemo_rl_core.models.generation.layout import WITHIN_AN_ENGINE, engine_key, engine_sharding
from nemo_rl_core.models.generation.where_made import HeldCompletions
from nemo_rl_core.models.interfaces import GenerationDatumSpec, GenerationInterface
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation.proof import check_proof, proof_bounds, proof_prompts
from nemo_rl_core.store.machine import process_numerics
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.model_flops import model_shape
from nemo_rl_core.telemetry.waiting import waiting

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_READ = frozenset({*GenerationDatumSpec.__annotations__})
"""The columns that engines read."""


class Generation(GenerationInterface):
    """Engines that share the rows of a batch; running ones of the same model and size are reused.

    A worker that dies while it generates, or does not answer within
    `setup.config.generate_timeout_seconds`, is replaced with all others, the weights are loaded
    again, and the call is repeated once. Seeds belong to rows, so that the tokens are those that
    the lost worker would have drawn.

    Before it completes anything, an engine proves that it computes with the weights that it was
    given: those of a folder against transformers, those of a policy against that policy.

    Args:
        cluster: A session with its running workers, or a cluster of your own.
        setup: Model, sampling and size. The weights of `setup.model_folder` are loaded.
        name: Of the worker group. Engines of one name share workers, so that the later one takes
            them over.
        gate: The bounds of a step, from which those of its proofs follow (`proof_bounds`).

    Attributes:
        num_restarts: How many times the workers were started again.

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
        if not setup.config.num_own_bundles:
            refuse_more_than(session.cluster.world_size, setup.config)
        self._sharding = engine_sharding(setup.config)
        self.num_restarts = 0
        self._num_unseeded_calls = 0
        self._start()
        # Also in a new engine: weights then always take the same way, and give the same bits.
        self.load_weights(setup.model_folder)

    @property
    def config(self) -> GenerationConfig:
        """How completions are sampled."""
        return self._setup.config

    @property
    def session(self) -> ClusterSession:
        """Where the workers run."""
        return self._session

    @property
    def _backend(self) -> str:
        """The registered name of what the workers run."""
        return self._setup.config.backend

    def _start(self) -> None:
        config, backend = self._setup.config, get_generation_backend(self._backend)
        own = [replace(each, name=self._name) for each in config.own_bundles]
        self._workers, is_new = self._session.workers(
            backend,
            name=self._name,
            key=f"{self._backend} {id(backend)} {engine_key(self._setup)}",
            sharding=self._sharding,
            env_vars={**engine_environment(config), **user_search_path(config)},
            cluster=self._session.beside(own[0]) if own else None,
        )
        if is_new:
            with waiting(f"starting the engine ({self._backend})"):
                self._workers.run_all_workers_single_data("setup", self._setup)
        numerics = self._workers.run_single_worker("__ray_call__", process_numerics)
        usage.saw_process("generation", numerics)
        self._count_gpus(anew=True)
        self._proven: Path | Policy | None = None

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Completes a batch as `GenerationDatumSpec` has it, in its order.

        Lengths may be said by `attention_mask [B, T]` instead; without `seeds`, rows get such as
        depend on the engine's seed and the number of such calls before. Columns that no engine
        reads come back as they are, and with them `completions`, the texts.

        Raises:
            DataError: If prompts are not padded on the right, or leave no room for a completion.
            ConsistencyError: If the engine, with the weights of a folder, computes otherwise than
                transformers does.
            WorkerLostError: If a worker is lost, and once more after all were started again.
        """
        batch = self._completed_columns(data)
        others = {name: batch.pop(name) for name in list(batch) if name not in _READ}
        output = self._repeated(partial(self._generate, batch, greedy=greedy))
        if others:
            output.update({**others, "completions": self._texts(output)})
        return output

    def _repeated(self, call: Callable[[], T]) -> T:
        """The call's result, once more where a worker is lost, after all were started again."""
        try:
            return call()
        except WorkerLostError as lost:
            _LOG.warning("%s; the engine is started again", lost.problem)
            self._restart(lost)
            return call()

    @property
    def holds_completions(self) -> bool:
        """Whether `generate_held` and `continue_held` are there."""
        return True

    def generate_held(
        self,
        prompts: Sequence[Sequence[int]],
        prompt: "np.ndarray[Any, np.dtype[np.int64]]",
        seeds: "np.ndarray[Any, np.dtype[np.int64]]",
        *,
        discards_weights: bool = False,
    ) -> HeldCompletions:
        """As `generate`, of completions that stay in the object store where they are made.

        Engines wake before, and give a GPU's memory away after it, as by `prepare_for_generation`
        and `finish_generation`, in the same call.

        Args:
            prompts: Token ids of `P` prompts.
            prompt: `[B]`, rising: which of the prompts each request has.
            seeds: `[B]`.
            discards_weights: As `finish_generation` takes it.

        Raises:
            NemoRLError: As `generate`.
        """
        sleep = self._sleep_options(discards_weights=discards_weights)
        parts = where_made.requests_of_engines(prompts, prompt, seeds, self.num_engines)
        return self._held(where_made.generate, parts, sleep=sleep)

    def continue_held(self, requests: BatchedDataDict) -> HeldCompletions:
        """As `generate_held`, of engines that are awake and stay so.

        Args:
            requests: `B` of them, as `where_made.whole_requests` takes them.

        Raises:
            NemoRLError: As `generate`.
        """
        parts = where_made.parts_of_engines(requests, self.num_engines)
        return self._held(where_made.go_on, parts)

    def _held(
        self, function: Callable[..., Any], parts: Sequence[Sequence[Any]], **options: Any
    ) -> HeldCompletions:
        def call() -> HeldCompletions:
            self._prove_folder()
            answers = self._workers.run_all_workers_on_parts(
                function,
                parts,
                axis=DATA,
                common_kwargs={"model_folder": self._setup.model_folder, **options},
                timeout_seconds=self._setup.config.generate_timeout_seconds,
                num_held=2,
            )
            return where_made.joined(answers)

        held = self._repeated(call)
        shape, num_generated = model_shape(self._setup.model_folder), held.completion_lengths.sum()
        usage.count("generation", shape, held.input_lengths, num_generated=int(num_generated))
        return held

    def _texts(self, output: BatchedDataDict) -> list[str]:
        """The completions without special tokens."""
        tokenizer = load_tokenizer(self._setup.model_folder)
        ends = output["unpadded_sequence_lengths"].tolist()
        starts = (output["unpadded_sequence_lengths"] - output["generation_lengths"]).tolist()
        return [
            tokenizer.decode(ids[start:end], skip_special_tokens=True)
            for ids, start, end in zip(output["output_ids"], starts, ends, strict=True)
        ]

    def _generate(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        self._prove_folder()
        whole = self._completed(batch, greedy=greedy)
        usage.count(
            "generation",
            model_shape(self._setup.model_folder),
            whole["unpadded_sequence_lengths"].tolist(),
            num_generated=int(whole["generation_lengths"].sum()),
        )
        return whole

    def _completed(self, batch: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        num_engines = self.num_engines
        answers = self._workers.run_all_workers_sharded_data(
            "generate",
            in_sharded_axes=[DATA],
            replicate_on_axes=WITHIN_AN_ENGINE,
            output_is_replicated=WITHIN_AN_ENGINE,
            common_kwargs={"greedy": greedy},
            timeout_seconds=self._setup.config.generate_timeout_seconds,
            batch=[batch.chunk(engine, num_engines) for engine in range(num_engines)],
        )
        whole = BatchedDataDict.from_batches(answers)
        width = torch.arange(whole["output_ids"].shape[1])
        is_padding = width >= whole["unpadded_sequence_lengths"][:, None]
        whole["output_ids"][is_padding] = self._setup.pad_token_id
        return whole

    def _completed_columns(self, data: BatchedDataDict) -> BatchedDataDict:
        batch = with_lengths(data)
        if "seeds" not in batch:
            batch["seeds"] = row_seeds(self._setup.seed + self._num_unseeded_calls, batch.size)
            self._num_unseeded_calls += 1
        return batch

    def _restart(self, lost: WorkerLostError) -> None:
        """Starts all workers again, with the weights that they had."""
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
                "an engine that was started again cannot get back the weights that it had: the "
                "policy has trained on",
                expected=f"checksum {digest}",
                got=f"checksum {self._digest}",
                fix="run the same command again: it resumes from the last save",
            ) from lost

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Takes the GPU's memory back; on a CPU, engines keep theirs.

        Workers that are lost are started again, with the weights that they had.

        Args:
            *args: Not read: weights and cache wake together.
            **kwargs: Not read either; NeMo RL's callers pass `tags`.
        """
        if self._setup.config.num_own_bundles:
            return  # never asleep
        try:
            self._workers.run_all_workers_single_data("wake")
        except WorkerLostError as lost:
            self._restart(lost)

    def finish_generation(self, *args: Any, discards_weights: bool = False, **kwargs: Any) -> None:
        """Gives the GPU's memory away, for training to use; the next call takes it back.

        Engines on GPUs of their own keep it. Workers that are lost hold none of it: the next call
        that needs them starts them again.

        Args:
            *args: Not read.
            discards_weights: Whether `update_weights` comes before the engine generates again, so
                that vLLM needs no copy of the weights on the host.
            **kwargs: Not read either.
        """
        options = self._sleep_options(discards_weights=discards_weights)
        if options is None:
            return
        with suppress(WorkerLostError):
            self._workers.run_all_workers_single_data("sleep", **options)

    def _sleep_options(self, *, discards_weights: bool) -> dict[str, int] | None:
        """Arguments of the workers' `sleep`; None where they never do."""
        if self._setup.config.num_own_bundles:
            return None
        discards = discards_weights and isinstance(self._setup.config, VllmGenerationConfig)
        return {"level": 2} if discards else {}

    def update_weights(self, policy: Policy) -> None:
        """Takes over the policy's weights and compares checksums of what was sent and arrived.

        Workers that are lost meanwhile are started again first.

        The first time, the engine then proves that it computes with them (`prove`).

        Raises:
            ConsistencyError: If other weights arrived than were sent, or the engine computes
                otherwise than the policy.
            WorkerError: If the trainer is lost, or the engine once more.
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
            self._digest = link.transfer(**self._transfer_options())
            self._prove_update(policy)
        except BaseException:
            self._session.discard(self._name)  # it may hold a part of the new weights
            raise
        self._source: Path | Policy = policy
        self._proven = policy

    def _transfer_options(self) -> dict[str, Any]:
        """Further arguments of the workers' `receive_weights`."""
        return {}

    def load_weights(self, model_folder: Path) -> None:
        """Takes over the weights of a transformers folder of the same architecture."""
        with waiting("loading weights into the engine"):
            self._workers.run_all_workers_single_data("load_weights", model_folder)
        self._source, self._proven = model_folder, None

    @property
    def num_engines(self) -> int:
        """Copies of the model."""
        return self._sharding.axis_size(DATA)

    @cached_property
    def _proof_prompts(self) -> BatchedDataDict:
        """The same for each engine."""
        setup = self._setup
        return proof_prompts(setup.model_folder, max_model_len=setup.max_model_len)

    def _proof_of_each_engine(self, *, greedy: bool) -> BatchedDataDict:
        prompts = BatchedDataDict.from_batches([self._proof_prompts] * self.num_engines)
        return self._completed(prompts, greedy=greedy)

    def prove(self, policy: Policy) -> float:
        """Completes a few fixed prompts, and compares their logprobs with the policy's.

        Args:
            policy: With the weights that this engine was given last.

        Returns:
            `token_mult_prob_error`; 1 is agreement.

        Raises:
            ConsistencyError: If it is past the bounds of the gate.
        """
        with waiting("checking the engine against the trainer"):
            output = self._proof_of_each_engine(greedy=False)
            if getattr(policy, "offloads_weights", False):
                self.finish_generation()  # they come back now, perhaps to the same GPU
            return self._checked(output, policy)

    def _prove_update(self, policy: Policy) -> None:
        """Later errors show in what a step has sampled, which its gate compares."""
        if self._proven is not policy:
            self.prove(policy)

    def _prove_folder(self) -> None:
        """Where nobody trains, transformers computes the logprobs, in a worker that has memory."""
        if self._proven is not None or not isinstance(self._source, Path):
            return
        with waiting("checking the engine against transformers"):
            output = self._proof_of_each_engine(greedy=True)
            self._checked(output, self._source)
        self._proven = self._source

    def _checked(self, output: BatchedDataDict, reference: Policy | Path) -> float:
        batch = as_training_batch(output)
        if isinstance(reference, Path):
            name, logprobs = "transformers", self._by_transformers(reference, batch)
        else:
            name, logprobs = "the trainer", reference.get_logprobs(batch)["logprobs"]
        batch["generation_logprobs"], batch["prev_logprobs"] = output["logprobs"][:, 1:], logprobs
        # Each engine alone: one of many that is wrong must not pass for a few sequences that are.
        return max(
            check_proof(batch.chunk(engine, self.num_engines), self._bounds, reference=name)
            for engine in range(self.num_engines)
        )

    def _by_transformers(self, model_folder: Path, batch: BatchedDataDict) -> torch.Tensor:
        config = self._setup.config
        # Only at another temperature than 1, and only vLLM, reports what the penalty has left.
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

    def _count_gpus(self, *, anew: bool = False) -> None:
        """Has the stage count what the workers hold of their GPUs; no-op on CPUs."""
        if not self._session.cluster.use_gpus:
            return
        call = partial(engine_gpu_use, anew=anew)
        for each in self._workers.run_all_workers_single_data("__ray_call__", call):
            if each is not None:
                usage.saw_engine_gpu(each)

    def peak_memory_gib(self) -> float:
        """The most memory of machines that all processes of the engines together have held."""
        self._count_gpus()
        return float(sum(self._workers.run_all_workers_single_data("peak_memory_gib")))

    def shutdown(self) -> None:
        """Ends the workers, where no other engine is to take them over; may be called again."""
        link = WeightLink.by_engine.get(self._workers)
        if link is not None:
            link.close()
        self._session.discard(self._name)
