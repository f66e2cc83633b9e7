"""Adapter of a custom engine or policy to the engine of a trainer."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.generation import GenerationConfig, SamplingConfig
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, DataError
from nemo_rl_core.models.columns import (
    as_training_batch,
    joined_outputs,
    with_documented_columns,
)
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter, overrides, takes_state_dict
from nemo_rl_core.models.validation.proof import check_proof, proof_bounds, proof_prompts

_COLUMNS = ("output_ids", "generation_lengths", "unpadded_sequence_lengths")


class CustomEngineAdapter(GenerationInterface):
    """A custom `GenerationInterface` in a trainer, or a custom policy that generates.

    It gets the columns of `GenerationDatumSpec`, and `max_new_tokens` and `temperature` as numbers.
    An engine gets all rows in one call, with prompts padded on the right. A policy gets prompts of
    equal length in each call, so that none is padded. A completion ends with its first stop token,
    or at the limit of its row.

    Args:
        setup: Model whose weights the engine has, and sampling settings.
        gate: Bounds of a step, from which the bounds of `prove` are derived.
    """

    num_restarts, may_restart = 0, True

    def __init__(
        self,
        source: GenerationInterface | CustomPolicyAdapter,
        setup: GenerationSetup,
        *,
        gate: GateConfig | None = None,
    ) -> None:
        _refuse_unread(source, setup.config)
        self._source, self._setup = source, setup
        self._bounds = proof_bounds(gate or GateConfig(), dtype=setup.dtype, is_quantized=False)
        is_policy = isinstance(source, CustomPolicyAdapter)
        generator: Any = source.policy if isinstance(source, CustomPolicyAdapter) else source
        self._generator = generator
        self._name = type(self._generator).__name__
        self._is_updated = is_policy or callable(getattr(source, "update_weights", None))
        self._stops = torch.tensor(setup.stop_token_ids, dtype=torch.long)
        if is_policy and not overrides(generator, "generate"):
            raise ConfigError(
                f"nothing completes prompts: {self._name} has no generate",
                fix="add the method, or name an engine, generation=engine",
            )

    @property
    def config(self) -> GenerationConfig:
        """Sampling settings."""
        return self._setup.config

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Completes a `GenerationDatumSpec` batch; returns a `GenerationOutputSpec`, in order."""
        parts, order = [], []
        for rows in self._rows_of_calls(data["input_lengths"]):
            parts.append(self._completed(data.select_indices(rows), greedy=greedy))
            order += rows
        return joined_outputs(parts).reorder_data(order)

    def _rows_of_calls(self, lengths: Tensor) -> Iterator[list[int]]:
        if not isinstance(self._source, CustomPolicyAdapter):
            yield list(range(len(lengths)))
            return
        for length in sorted(set(lengths.tolist())):
            yield (lengths == length).nonzero()[:, 0].tolist()

    def _completed(self, data: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        limit = self.config.max_new_tokens
        limits = data.get("max_new_tokens", torch.full((data.size,), limit)).clamp(max=limit)
        lengths = data["input_lengths"]
        ids = data["input_ids"][:, : int(lengths.max())]
        columns = {
            **with_documented_columns(BatchedDataDict({**data, "input_ids": ids})),
            "max_new_tokens": int(limits.max()),
            "temperature": self.config.temperature,
        }
        if self.config.stop_strings:
            row_stop_strings = data.get("stop_strings") or [None] * data.size
            columns["stop_strings"] = [
                [*self.config.stop_strings, *(each or ())] for each in row_stop_strings
            ]
        # A sampler that draws from torch's generator gives the same tokens in a rerun.
        with torch.random.fork_rng():
            torch.manual_seed(int(data["seeds"].sum()))
            output = self._generator.generate(BatchedDataDict(columns), greedy)
        return self._checked(output, ids, lengths, limits)

    def _checked(
        self, output: BatchedDataDict, prompts: Tensor, lengths: Tensor, limits: Tensor
    ) -> BatchedDataDict:
        if not isinstance(output, Mapping):
            raise DataError(
                f"{self._name}.generate returned no batch of completions",
                expected=f"a BatchedDataDict with {', '.join(_COLUMNS)}",
                got=type(output).__name__,
                fix="return the columns of GenerationOutputSpec",
            )
        output = BatchedDataDict(output)
        output.require(_COLUMNS)
        if not self._is_updated and "logprobs" not in output:
            raise ConfigError(
                f"the engine {self._name} takes no weights and returns no logprobs, so nothing "
                "shows whether it samples with the policy's weights",
                expected=f"{self._name}.update_weights(state_dict) or update_weights(policy), or "
                "the column logprobs, which is compared with the policy's in every step",
                fix="add the method; it is called before every step's rollouts",
            )
        ids, ends = output["output_ids"].cpu(), output["unpadded_sequence_lengths"].cpu()
        starts = ends - output["generation_lengths"].cpu()
        width = prompts.shape[1]
        is_prompt = torch.arange(width) < lengths[:, None]
        if not (torch.equal(starts, lengths) and (ids[:, :width] == prompts)[is_prompt].all()):
            raise DataError(
                "an engine's output does not begin with the prompts that it was given",
                expected="output_ids [B, T'] prompt and completion, with "
                "unpadded_sequence_lengths - generation_lengths = input_lengths",
                got=f"prompts of {starts.tolist()[:4]} tokens for {lengths.tolist()[:4]}",
                fix="read each prompt up to input_lengths (padding is on the right), and write its "
                "completion right after it",
            )
        cut = ends > starts + limits
        ends, ended = self._ends(ids, starts, torch.minimum(ends, starts + limits))
        truncated = (output["truncated"].cpu().bool() | cut) if "truncated" in output else ~ended
        checked = BatchedDataDict(
            {
                "output_ids": ids,
                "generation_lengths": ends - starts,
                "unpadded_sequence_lengths": ends,
                "truncated": truncated & ~ended,
            }
        )
        if "logprobs" in output:
            checked["logprobs"] = output["logprobs"].cpu()
        return checked

    def _ends(self, ids: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `[B]` ends of the completions, and `[B]` whether each ends with a stop token."""
        position = torch.arange(ids.shape[1])
        is_in_completion = (position >= starts[:, None]) & (position < ends[:, None])
        stops = torch.isin(ids, self._stops) & is_in_completion
        ended = stops.any(dim=1)
        return torch.where(ended, stops.int().argmax(dim=1) + 1, ends), ended

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Calls the same method of a custom engine."""
        if not isinstance(self._source, CustomPolicyAdapter):
            self._source.prepare_for_generation()

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Calls the same method of a custom engine."""
        if not isinstance(self._source, CustomPolicyAdapter):
            self._source.finish_generation()

    def update_weights(self, policy: Any) -> None:
        """Calls the engine's method, if it has one; a policy that generates has its weights."""
        if not self._is_updated or isinstance(self._source, CustomPolicyAdapter):
            return
        unwrapped: Any = policy.policy if isinstance(policy, CustomPolicyAdapter) else policy
        weights = unwrapped.state_dict() if takes_state_dict(self._source) else unwrapped
        self._generator.update_weights(weights)

    @cached_property
    def _proof_prompts(self) -> BatchedDataDict:
        setup = self._setup
        return proof_prompts(setup.model_folder, max_model_len=setup.max_model_len)

    def prove(self, policy: PolicyInterface) -> float:
        """Completes a few fixed prompts, and compares their logprobs with the policy's.

        Returns:
            `token_mult_prob_error`; 1 is perfect agreement, NaN without logprobs to compare.
        """
        prompts = self._proof_prompts
        self.prepare_for_generation()
        # One by one: the prompts of a run may all have one length, which an engine may rely on.
        parts = [self.generate(prompts.slice(row, row + 1)) for row in range(prompts.size)]
        self.finish_generation()
        output = joined_outputs(parts)
        if "logprobs" not in output:
            return math.nan
        batch = as_training_batch(output)
        batch["generation_logprobs"] = output["logprobs"][:, 1:]
        batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
        return check_proof(batch, self._bounds, reference="the trainer")

    def peak_memory_gib(self) -> float:
        """Returns 0, as a custom engine is not measured."""
        return 0.0


def _refuse_unread(
    source: GenerationInterface | CustomPolicyAdapter, config: SamplingConfig
) -> None:
    names = ("top_p", "top_k", "repetition_penalty", "num_engines", "placement")
    defaults = SamplingConfig()
    unread = [name for name in names if getattr(config, name) != getattr(defaults, name)]
    if unread:
        name = source.name if isinstance(source, CustomPolicyAdapter) else type(source).__name__
        raise ConfigError(
            f"a custom engine draws tokens itself: nothing reads {', '.join(unread)}",
            expected="max_new_tokens, temperature and stop_strings, which it gets with each batch",
            fix=f"give {name} these values itself",
        )
