"""An engine that goes on generating between calls."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.backends.generation.base import GenerationSetup, WeightsProof
from nemo_rl_core.config.generation import SamplingConfig, VllmGenerationConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl_core.errors import ConfigError, WorkerLostError
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.options import VllmConfig, read_vllm_setup
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation.proof import check_unchanged
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.cost import model_shape
from nemo_rl_core.types import Completion

_LOG = logging.getLogger(__name__)


class StreamingGeneration(Generation):
    """One vLLM engine that takes requests at any time, and new weights in the middle of them.

    Samples may all be of older weights than the policy's, so that no step can compare them with it.
    So every transfer of weights ends with a proof, and begins with another: that the engine still
    computes as it did at the end of the one before.

    Args:
        cluster: A session with its running workers, or a cluster of your own.
        config: Model, sampling and size, of a vLLM engine that one worker runs; as
            `VllmGeneration` takes it.
        name: Of the worker group.
        gate: The bounds of its proofs.

    Attributes:
        agreement: `token_mult_prob_error` of the last proof; 1 is agreement.

    Raises:
        ConfigError: For another engine, or one of several workers.
    """

    agreement: float

    def __init__(
        self,
        cluster: ClusterSession | RayVirtualCluster,
        config: GenerationSetup | VllmConfig | Mapping[str, Any],
        *,
        name: str = "generation",
        gate: GateConfig | None = None,
    ) -> None:
        setup = read_vllm_setup(cluster, config)
        self._refuse_several_workers(setup.config)
        self._weight_version = 0
        self._prompt_lengths: dict[int, int] = {}
        super().__init__(cluster, setup, name=name, gate=gate)

    @staticmethod
    def _refuse_several_workers(config: SamplingConfig) -> None:
        if (
            not isinstance(config, VllmGenerationConfig)
            or config.num_engines * config.ranks_per_engine > 1
        ):
            raise ConfigError(
                "this engine cannot sample while a model trains",
                expected="generation.backend: vllm, num_engines 1 and no parallel sizes",
                got=f"{getattr(config, 'backend', 'another')}, "
                f"{config.num_engines * config.ranks_per_engine} workers",
                fix="change the section generation, or leave out asynchronous (async_engine)",
            )

    @property
    def _backend(self) -> str:
        return "vllm_streaming"

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """It is always ready."""

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """It goes on with what it was asked; there is no memory that it could give away."""

    def submit(self, names: Sequence[int], requests: BatchedDataDict) -> None:
        """Hands requests over and returns at once.

        Args:
            names: `B` of them, by which `poll` calls the completions.
            requests: As for `generate`, drawn under the temperature.

        Raises:
            ConsistencyError: If the engine, with the weights of a folder, computes otherwise than
                transformers does.
            WorkerLostError: If the worker is lost; see `restart`.
        """
        self._prove_folder()
        self._ask("submit", names=list(names), batch=requests)
        lengths = requests["input_lengths"].tolist()
        self._prompt_lengths |= dict(zip(names, lengths, strict=True))

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Completion]]:
        """Completions that are done and were not returned before, by name.

        Args:
            wait_seconds: For the first of them.

        Raises:
            WorkerLostError: If the worker is lost; see `restart`.
        """
        found: list[tuple[int, Completion]] = self._ask("poll", wait_seconds=wait_seconds)
        for name, completion in found:
            drawn = len(completion.token_ids)
            lengths = [self._prompt_lengths.pop(name, 0) + drawn]
            shape = model_shape(self._setup.model_folder)
            usage.count("generation", shape, lengths, num_generated=drawn)
        return found

    def cancel(self, names: Sequence[int]) -> None:
        """Gives requests up; their completions may still come from the next `poll`."""
        self._ask("cancel", names=list(names))

    def _ask(self, method: str, **kwargs: Any) -> Any:
        """What the worker says; one that is stuck is lost, as one that does not `generate` is."""
        (answer,) = self._workers.run_all_workers_sharded_data(
            method,
            replicate_on_axes=self._sharding.names,
            common_kwargs=kwargs,
            timeout_seconds=self._setup.config.generate_timeout_seconds,
        )
        return answer

    def update_weights(self, policy: Policy, *, weight_version: int | None = None) -> None:
        """Takes over the policy's weights in the middle of what is being generated.

        A worker that is lost is started again first; what it was asked is forgotten.

        Args:
            policy: Whose weights.
            weight_version: What tokens drawn from now on are marked with; None leaves that as it
                is.

        Raises:
            ConsistencyError: If other weights arrived than were sent, the engine computes
                otherwise than the policy, or has changed since the last transfer.
            WorkerError: If the trainer is lost, or the engine once more.
        """
        if weight_version is not None:
            self._weight_version = weight_version
        super().update_weights(policy)

    def _transfer_options(self) -> dict[str, Any]:
        return {"weight_version": self._weight_version, "proof": self._proof_prompts}

    def _prove_update(self, policy: Policy) -> None:
        """Of what the engine computed between two steps of its own, before anything else ran."""
        proof: WeightsProof = self._ask("last_proof")
        if proof.first is not None:
            check_unchanged(self._proof_prompts, proof.first, proof.last, self._gate)
        self.agreement = self._checked(proof.output, policy)

    def restart(self, lost: WorkerLostError) -> None:
        """Starts the worker again with the weights that it had; it was asked nothing then.

        Raises:
            ConsistencyError: If the policy has trained on since it was given them.
        """
        _LOG.warning("%s; the engine is started again", lost.problem)
        self._restart(lost)
