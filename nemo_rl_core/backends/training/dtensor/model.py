"""Outputs of packed sequences: logprobs of next tokens, or one value per prefix.

The head of a language model may be split over the vocabulary.
"""

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from nemo_rl_core.backends.training.dtensor.microbatches import PackedTokens
from nemo_rl_core.backends.training.dtensor.packed import PackedModel
from nemo_rl_core.backends.training.dtensor.parallelize import release, run_within
from nemo_rl_core.backends.training.padded import (
    loss_inputs,
    next_tokens,
    scatter,
    target_positions,
    valid_tokens,
)
from nemo_rl_core.backends.training.rounding import exact_bound, rounding_bound, size_of
from nemo_rl_core.backends.training.vocab_parallel import (
    vocab_parallel_logprobs_from_hidden,
    vocab_parallel_topk_logprobs_from_hidden,
)
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.logprobs import (
    logprobs_from_logits,
    rows_at_once,
    token_logprobs_within_budget,
    topk_logprobs_from_hidden,
)
from nemo_rl_core.model_files.loading import SCALAR_HEAD
from nemo_rl_core.model_files.weights import fill_parameter
from nemo_rl_core.planning.model_parts import caps_logits, layers_of

_LOG = logging.getLogger(__name__)


class LogprobModel(PackedModel):
    """Next-token logprobs of packed sequences, without materializing `[N, V]` logits."""

    _selected = staticmethod(target_positions)

    def __init__(self, model: Any, *, temperature: float, dtype: DType, **options: Any) -> None:
        super().__init__(model, dtype=dtype, **options)
        self._temperature = temperature
        self._head = model.get_output_embeddings()
        self._has_plain_head = isinstance(self._head, torch.nn.Linear)

    @property
    def num_logits(self) -> int:
        """Number of rows of the head, at least the number of the tokenizer's tokens."""
        if self._head is None:
            return int(self.model.config.get_text_config().vocab_size)
        return int(self._head.weight.shape[0])

    def loss_inputs(
        self, batch: BatchedDataDict, packed: PackedTokens
    ) -> tuple[torch.Tensor, BatchedDataDict]:
        """Returns the logprobs and the batch of `padded.loss_inputs`."""
        return loss_inputs(batch, partial(self._token_logprobs, batch, packed))

    def logprobs(self, batch: BatchedDataDict, packed: PackedTokens) -> torch.Tensor:
        """Returns `[B, T-1]` float32 logprobs in nats; 0 where `token_mask` is not set."""
        return self._token_logprobs(batch, packed, next_tokens(batch))[..., 0]

    def topk_logprobs(
        self, batch: BatchedDataDict, packed: PackedTokens, *, k: int, num_ids: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `[B, T-1, k]` int64 ids of the most likely next tokens, and their logprobs.

        Ids are below `num_ids`. Logprobs are in nats, float32, normalized over the full head. Both
        are 0 where `token_mask [B, T-1]` is not set.
        """
        selected, shape = packed.selected, batch["token_mask"].shape

        def most_likely(hidden: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with self._autocast():
                if not self._has_plain_head:
                    return self._topk_of_model(hidden, k=k, num_ids=num_ids)
                return topk_logprobs(
                    hidden, self._head, k=k, num_ids=num_ids, temperature=self._temperature
                )

        ids, logprobs = self._read(batch, packed, most_likely)
        return scatter(ids, selected, shape), scatter(logprobs, selected, shape)

    def _token_logprobs(
        self, batch: BatchedDataDict, packed: PackedTokens, token_ids: torch.Tensor
    ) -> torch.Tensor:
        selected_ids = token_ids[packed.selected]

        def chosen(hidden: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self._logprobs_after(hidden, selected_ids[indices]),)

        logprobs = self._read(batch, packed, chosen)[0]
        return scatter(logprobs, packed.selected, batch["token_mask"].shape)

    @torch.no_grad()
    def _compare(self) -> None:
        """Compares logprobs with the logits of the model's forward pass on three short sequences.

        If the model scales or caps its logits, its forward pass computes them (`_logits`, which is
        slower); if packed sequences affect each other, each gets a separate row. The head is
        compared separately, on the same hidden states: there, bfloat16 only rounds the logits, so
        the bound is tight.
        """
        batch = self._probe(self.num_logits)
        lengths = batch["input_lengths"].tolist()
        plain, hidden, largest = [], [], 0.0
        for row, length in enumerate(lengths):
            sequence = batch["input_ids"][row : row + 1, :length]
            states, logits = (each[:, : length - 1] for each in self._plain_outputs(sequence))
            plain.append(self._next_logprobs(logits, sequence))
            hidden.append((states[0], sequence[0, 1:, None]))
            largest = max(largest, float(logits.abs().max()))
        beginning = batch["input_ids"][:1, : lengths[-1]]

        def beginning_logprobs() -> torch.Tensor:
            return self._next_logprobs(
                self._plain_outputs(beginning)[1][:, : lengths[-1] - 1], beginning
            )

        self._refuse_above(
            rounding_bound(beginning_logprobs, layers_of(self.model), self._dtype),
            beginning_logprobs() - plain[0][: lengths[-1] - 1],
            "outputs for the beginning of a sequence",
            fix="choose a model whose tokens only attend to earlier ones",
        )
        self._choose_head(hidden, torch.cat(plain), self._rounding(largest))
        self._pack_if_faithful(
            self.logprobs,
            batch,
            lambda packed: torch.cat(
                [packed[row, : length - 1] - plain[row] for row, length in enumerate(lengths)]
            ),
        )

    def _next_logprobs(self, logits: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
        """Returns `[T-1]` logprobs of a sequence `[1, T]` from `[1, T-1, V]` logits."""
        return logprobs_from_logits(logits.float(), sequence[:, 1:], temperature=self._temperature)[
            0
        ]

    def _choose_head(
        self, hidden: list[tuple[torch.Tensor, torch.Tensor]], plain: torch.Tensor, bound: float
    ) -> None:
        def differences() -> torch.Tensor:
            values = [
                run_within(self.model, partial(self._logprobs_after, *each)) for each in hidden
            ]
            return torch.cat(values)[:, 0] - plain

        # A cap does not change the small logits of an untrained model.
        if self._has_plain_head and (
            caps_logits(self.model.config)
            or self._head.in_features != hidden[0][0].shape[-1]
            or not size_of(differences(), self._dtype) < bound
        ):
            self._has_plain_head = False
            _LOG.warning(
                "%s transforms its logits after the head, so its forward pass computes them, which "
                "is slower",
                self._name,
            )
        self._refuse_above(
            bound,
            differences(),
            "logprobs from its hidden states",
            fix="choose a model whose logits follow from the last hidden state",
        )

    def _logprobs_after(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns `[n, K]` logprobs of `token_ids [n, K]` after `hidden [n, D]`."""
        with self._autocast():
            if self._has_plain_head:
                return token_logprobs(hidden, self._head, token_ids, temperature=self._temperature)
            size = rows_at_once(self.num_logits, hidden.device)
            chunks = zip(torch.split(hidden, size), torch.split(token_ids, size), strict=True)
            return torch.cat(
                [checkpoint(self._chosen, *chunk, use_reentrant=False) for chunk in chunks]
            )

    def _chosen(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self._logits(hidden).log_softmax(-1).gather(-1, token_ids)

    def _topk_of_model(
        self, hidden: torch.Tensor, *, k: int, num_ids: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, logprobs = [], []
        for chunk in torch.split(hidden, rows_at_once(self.num_logits, hidden.device)):
            top = self._logits(chunk).log_softmax(-1)[:, :num_ids].topk(k)
            ids.append(top.indices)
            logprobs.append(top.values)
        return torch.cat(ids), torch.cat(logprobs)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes `[n, V]` float32 logits with the model's forward pass, over the temperature.

        The decoder is temporarily replaced by one that returns `hidden [n, D]`.
        """
        output = self._output_type(last_hidden_state=hidden[None])
        ids = hidden.new_zeros(1, len(hidden), dtype=torch.long)
        self._decoder.forward = lambda *_, **__: output
        try:
            logits: torch.Tensor = self.model.forward(input_ids=ids).logits
        finally:
            del self._decoder.forward  # restores the method of its class
        return logits[0].float() / self._temperature

    def _rounding(self, largest: float) -> float:
        """Returns the bound for logprobs from equal hidden states: bfloat16's step at a logit."""
        if self._dtype == "float32":
            return exact_bound(largest)
        return torch.finfo(torch.bfloat16).eps * largest / self._temperature


class ScoreModel(PackedModel):
    """One scalar per prefix of packed sequences, for reward models and critics.

    The head is float32 in any dtype, since margins are small relative to scores.
    """

    _selected = staticmethod(valid_tokens)

    @property
    def _head(self) -> torch.nn.Linear:
        head: torch.nn.Linear = getattr(self.model, SCALAR_HEAD)
        return head

    def loss_inputs(
        self, batch: BatchedDataDict, packed: PackedTokens
    ) -> tuple[torch.Tensor, BatchedDataDict]:
        """Returns values `[B, T]` and the unchanged batch."""
        return self.values(batch, packed), batch

    def values(self, batch: BatchedDataDict, packed: PackedTokens) -> torch.Tensor:
        """Returns `[B, T]` float32 values of prefixes that end with each token; 0 in padding."""

        def score(hidden: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (self._head(hidden.float())[:, 0],)

        values = self._read(batch, packed, score)[0]
        return scatter(values, packed.selected, batch["input_ids"].shape)

    def save(
        self,
        folder: Path,
        source: Path,
        tokenizer: Any,
        named_weights: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """Writes a transformers folder, with the padding token that the model ignores."""
        pad = self.model.config.get_text_config().pad_token_id
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
        super().save(folder, source, tokenizer, named_weights)

    @torch.no_grad()
    def _compare(self) -> None:
        """Compares packed scores with the model's forward pass on three short sequences.

        A head of zeros would always agree, so the head has random weights during the comparison.
        """
        text = self.model.config.get_text_config()
        batch = self._probe(text.vocab_size, without=text.pad_token_id)
        weight = self._head.weight.clone()
        random = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        fill_parameter(self._head.weight, random / weight.shape[1] ** 0.5)
        try:
            lengths = batch["input_lengths"].tolist()
            scores = [
                self._plain_outputs(batch["input_ids"][row : row + 1, :length])[1].float()[0, 0]
                for row, length in enumerate(lengths)
            ]
            self._pack_if_faithful(
                self.values,
                batch,
                lambda packed: torch.stack(
                    [packed[row, length - 1] - scores[row] for row, length in enumerate(lengths)]
                ),
            )
        finally:
            release(self.model)  # else the weight is a gathered copy
            self._head.weight.copy_(weight)


def token_logprobs(
    hidden: torch.Tensor, head: Any, token_ids: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    """Returns `[N, K]` logprobs of `token_ids [N, K]` after `hidden [N, D]`."""
    if isinstance(head.weight, DTensor):
        return vocab_parallel_logprobs_from_hidden(
            hidden, token_ids=token_ids, temperature=temperature, **_shard(head)
        )
    return token_logprobs_within_budget(
        hidden, head.weight, token_ids, temperature=temperature, bias=head.bias
    )


def topk_logprobs(
    hidden: torch.Tensor, head: Any, *, k: int, num_ids: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and logprobs `[N, k]` of the most likely tokens below `num_ids`."""
    options: dict[str, Any] = {"k": k, "num_ids": num_ids, "temperature": temperature}
    if isinstance(head.weight, DTensor):
        return vocab_parallel_topk_logprobs_from_hidden(hidden, **_shard(head), **options)
    rows = rows_at_once(head.weight.shape[0], head.weight.device)
    return topk_logprobs_from_hidden(
        hidden, head.weight, bias=head.bias, chunk_size=rows, **options
    )


def _shard(head: Any) -> dict[str, Any]:
    mesh, size = head.weight.device_mesh, head.weight.shape[0]
    # Rows are split as by `torch.chunk`: the last rank gets the remainder.
    rows_per_rank = -(-size // mesh.size())
    return {
        "weight_shard": head.weight.to_local(),
        "bias_shard": None if head.bias is None else head.bias.to_local(),
        "group": mesh.get_group(),
        "vocab_start": min(mesh.get_local_rank() * rows_per_rank, size),
        # Chunks are collectives, so every rank needs the same number.
        "chunk_size": rows_at_once(rows_per_rank, head.weight.device),
    }
