"""Adapter of a custom engine or policy to the engine of a trainer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, DataError
from nemo_rl_core.models.columns import as_training_batch
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter, overrides

_COLUMNS = ("output_ids", "generation_lengths", "unpadded_sequence_lengths")


def refuse_stale_engine(engine: GenerationInterface) -> None:
    """Refuses an engine whose weights cannot be updated."""
    if not callable(getattr(engine, "update_weights", None)):
        name = type(engine).__name__
        raise ConfigError(
            f"the engine {name} would sample from the weights that training began with",
            expected=f"{name}.update_weights(policy), which takes policy.state_dict()",
            fix="add the method; it is called before every step's rollouts",
        )


class CustomEngineAdapter(GenerationInterface):
    """A custom `GenerationInterface` in a trainer, or a custom policy that generates.

    The engine gets the columns of `GenerationDatumSpec`, and `max_new_tokens` and `temperature` as
    numbers. A completion ends with its first stop token, or at the limit of its row. A policy gets
    prompts of equal length in each call, so that none is padded, and computes missing `logprobs`.
    """

    num_restarts = 0

    def __init__(
        self,
        source: GenerationInterface | CustomPolicyAdapter,
        config: SamplingConfig,
        *,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        _refuse_unread(source, config)
        self._source, self._config = source, config
        self._stops = torch.tensor(stop_token_ids, dtype=torch.long)
        if isinstance(source, CustomPolicyAdapter):
            if not overrides(source.policy, "generate"):
                raise ConfigError(
                    f"nothing completes prompts: {source.name} has no generate",
                    fix="add the method, or name an engine, generation=engine",
                )
        else:
            refuse_stale_engine(source)

    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Completes a `GenerationDatumSpec` batch; returns a `GenerationOutputSpec`, in order."""
        parts, order = [], []
        for rows in self._batches(data["input_lengths"]):
            parts.append(self._completed(data.select_indices(rows), greedy=greedy))
            order += rows
        return BatchedDataDict.from_batches(parts).reorder_data(order)

    def _batches(self, lengths: Tensor) -> Iterator[list[int]]:
        if not isinstance(self._source, CustomPolicyAdapter):
            yield list(range(len(lengths)))
            return
        for length in sorted(set(lengths.tolist())):
            yield (lengths == length).nonzero()[:, 0].tolist()

    def _completed(self, data: BatchedDataDict, *, greedy: bool) -> BatchedDataDict:
        limits = data.get("max_new_tokens", torch.full((data.size,), self._config.max_new_tokens))
        limits = limits.clamp(max=self._config.max_new_tokens)
        lengths = data["input_lengths"]
        ids = data["input_ids"][:, : int(lengths.max())]
        columns = {
            **data,
            "input_ids": ids,
            "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
            "max_new_tokens": int(limits.max()),
            "temperature": self._config.temperature,
        }
        if self._config.stop_strings:
            row_stop_strings = data.get("stop_strings") or [None] * data.size
            columns["stop_strings"] = [
                [*self._config.stop_strings, *(each or ())] for each in row_stop_strings
            ]
        source = self._source
        generator = source.policy if isinstance(source, CustomPolicyAdapter) else source
        # A sampler that draws from torch's generator gives the same tokens in a rerun.
        with torch.random.fork_rng():
            torch.manual_seed(int(data["seeds"].sum()))
            output = generator.generate(BatchedDataDict(columns), greedy)
        return self._checked(output, ids, lengths, limits)

    def _checked(
        self, output: BatchedDataDict, prompts: Tensor, lengths: Tensor, limits: Tensor
    ) -> BatchedDataDict:
        output = BatchedDataDict(output)
        output.require(_COLUMNS)
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
                fix="fix the engine's generate",
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
        checked["logprobs"] = self._logprobs(output, checked)
        return checked

    def _ends(self, ids: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Returns `[B]` ends of the completions, and `[B]` whether each ends with a stop token."""
        position = torch.arange(ids.shape[1])
        is_in_completion = (position >= starts[:, None]) & (position < ends[:, None])
        stops = torch.isin(ids, self._stops) & is_in_completion
        ended = stops.any(dim=1)
        return torch.where(ended, stops.int().argmax(dim=1) + 1, ends), ended

    def _logprobs(self, output: BatchedDataDict, checked: BatchedDataDict) -> Tensor:
        if "logprobs" in output:
            logprobs: Tensor = output["logprobs"].cpu()
            return logprobs
        if not isinstance(self._source, CustomPolicyAdapter):
            output.require(["logprobs"])
        assert isinstance(self._source, CustomPolicyAdapter)
        logprobs = self._source.get_logprobs(as_training_batch(checked))["logprobs"]
        return torch.nn.functional.pad(logprobs, (1, 0))

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Calls the same method of a custom engine."""
        if not isinstance(self._source, CustomPolicyAdapter):
            self._source.prepare_for_generation()

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Calls the same method of a custom engine."""
        if not isinstance(self._source, CustomPolicyAdapter):
            self._source.finish_generation()

    def update_weights(self, policy: Any) -> None:
        """Updates the weights of the engine; a policy that generates has them already."""
        if not isinstance(self._source, CustomPolicyAdapter):
            unwrapped = policy.policy if isinstance(policy, CustomPolicyAdapter) else policy
            self._source.update_weights(unwrapped)  # type: ignore[attr-defined]

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
