"""What is read off packed sequences: logprobs of next tokens, or a value for every prefix."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.dtensor.loading import SCALAR_HEAD
from nemo_rl_core.backends.training.dtensor.packed import PackedModel, valid_tokens
from nemo_rl_core.config.model import DType
from nemo_rl_core.data.packing import Microbatch
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.logprobs import (
    logprobs_from_logits,
    token_logprobs_from_hidden,
    topk_logprobs_from_hidden,
)

_LOGPROB_CHUNK_TOKENS = 1024


class LogprobModel(PackedModel):
    """Next-token logprobs of packed sequences, `[N, V]` logits never being made whole.

    Args:
        model: A transformers causal model.
        temperature: What logits are divided by.
        dtype: Type of the matrix products.
    """

    def __init__(self, model: Any, *, temperature: float, dtype: DType) -> None:
        super().__init__(model, dtype=dtype)
        self._temperature = temperature
        self._head = model.get_output_embeddings()

    @property
    def num_logits(self) -> int:
        """Rows of the head; at least as many as the tokenizer has tokens."""
        return int(self._head.weight.shape[0])

    def loss_inputs(
        self, batch: BatchedDataDict, microbatch: Microbatch
    ) -> tuple[torch.Tensor, BatchedDataDict]:
        """Logprobs `[B, T-1]`, and those of the batch's `topk_ids [B, T-1, K]` where it has any.

        These join the batch as `current_topk_logprobs [B, T-1, K]`.
        """
        if "topk_ids" not in batch:
            return self.logprobs(batch, microbatch), batch
        # Both in one pass, which then makes each chunk of logits once.
        token_ids = torch.cat([_next_tokens(batch), batch["topk_ids"]], dim=-1)
        logprobs = self._token_logprobs(batch, microbatch, token_ids)
        current = {"current_topk_logprobs": logprobs[..., 1:]}
        return logprobs[..., 0], BatchedDataDict({**batch, **current})

    def logprobs(self, batch: BatchedDataDict, microbatch: Microbatch) -> torch.Tensor:
        """Logprobs of each next token where `token_mask [B, T-1]` asks for one.

        Returns:
            `[B, T-1]` in nats, float32; 0 where the mask is not set.
        """
        return self._token_logprobs(batch, microbatch, _next_tokens(batch))[..., 0]

    def topk_logprobs(
        self, batch: BatchedDataDict, microbatch: Microbatch, *, k: int, num_ids: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k likeliest next tokens where `token_mask [B, T-1]` asks for them.

        Returns:
            `[B, T-1, k]` int64 ids below `num_ids`, and `[B, T-1, k]` logprobs in nats, float32,
            normalized over the whole head; both 0 where the mask is not set.
        """
        wanted = _wanted(batch)
        with self._autocast():
            ids, logprobs = topk_logprobs_from_hidden(
                self._hidden_states(batch, microbatch, wanted),
                self._head.weight,
                k=k,
                num_ids=num_ids,
                temperature=self._temperature,
                chunk_size=_LOGPROB_CHUNK_TOKENS,
                bias=getattr(self._head, "bias", None),
            )
        return _spread(ids, wanted), _spread(logprobs, wanted)

    def _token_logprobs(
        self, batch: BatchedDataDict, microbatch: Microbatch, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """`[B, T-1, K]` logprobs of `token_ids [B, T-1, K]`, 0 where the mask is not set."""
        wanted = _wanted(batch)
        with self._autocast():
            values = token_logprobs_from_hidden(
                self._hidden_states(batch, microbatch, wanted),
                self._head.weight,
                token_ids[wanted],
                temperature=self._temperature,
                chunk_size=_LOGPROB_CHUNK_TOKENS,
                bias=getattr(self._head, "bias", None),
            )
        return _spread(values, wanted)

    @torch.no_grad()
    def refuse_unless_faithful(self) -> None:
        """Compares packed, chunked logprobs with the model's own logits on three short sequences.

        A model that scales or caps its logits, or whose attention looks across packed sequences,
        would be trained on wrong numbers in silence; it is refused instead.

        Raises:
            ModelError: If they differ.
        """
        batch, microbatch = self._probe(self.num_logits)
        packed = self.logprobs(batch, microbatch)
        for row, length in enumerate(batch["input_lengths"].tolist()):
            sequence = batch["input_ids"][row : row + 1, :length]
            with self._autocast():
                logits = self.model(input_ids=sequence, use_cache=False).logits
            plain = logprobs_from_logits(
                logits[:, :-1].float(), sequence[:, 1:], temperature=self._temperature
            )
            difference = (packed[row, : length - 1] - plain[0]).abs().max().item()
            self._refuse_above(difference, "logprobs")


class ScoreModel(PackedModel):
    """A scalar for every prefix of packed sequences: the model of rewards and of values.

    Args:
        model: A transformers model for sequence classification with one label.
        dtype: Type of the matrix products before the head, which is float32 always: a margin
            between two scores is small beside them.
    """

    def __init__(self, model: Any, *, dtype: DType) -> None:
        super().__init__(model, dtype=dtype)
        self._head: torch.nn.Linear = getattr(model, SCALAR_HEAD)

    def loss_inputs(
        self, batch: BatchedDataDict, microbatch: Microbatch
    ) -> tuple[torch.Tensor, BatchedDataDict]:
        """Values `[B, T]`, and the batch as it is."""
        return self.values(batch, microbatch), batch

    def values(self, batch: BatchedDataDict, microbatch: Microbatch) -> torch.Tensor:
        """The value of each prefix that ends with a valid token.

        Returns:
            `[B, T]` float32; 0 past a sequence's end.
        """
        valid = valid_tokens(batch)
        hidden = self._hidden_states(batch, microbatch, valid)
        return _spread(self._head(hidden.float())[:, 0], valid)

    def save(
        self, folder: Path, tokenizer: Any, named_weights: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Writes the transformers folder, its tokenizer padding with what the model skips."""
        pad = self.model.config.get_text_config().pad_token_id
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
        super().save(folder, tokenizer, named_weights)

    @torch.no_grad()
    def refuse_unless_faithful(self) -> None:
        """Compares packed scores with the model's own on three short sequences.

        A head of zeros would agree with anything, so the comparison is made under random weights
        in the head, which get their own back.

        Raises:
            ModelError: If they differ.
        """
        text = self.model.config.get_text_config()
        batch, microbatch = self._probe(text.vocab_size, without=text.pad_token_id)
        own = self._head.weight.clone()
        random = torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
        self._head.weight.copy_(random / own.shape[1] ** 0.5)
        try:
            packed = self.values(batch, microbatch)
            for row, length in enumerate(batch["input_lengths"].tolist()):
                sequence = batch["input_ids"][row : row + 1, :length]
                with self._autocast():
                    score = self.model(input_ids=sequence, use_cache=False).logits.float()
                difference = (packed[row, length - 1] - score[0, 0]).abs().item()
                self._refuse_above(difference, "scores")
        finally:
            self._head.weight.copy_(own)


def _next_tokens(batch: BatchedDataDict) -> torch.Tensor:
    """`[B, T-1, 1]` ids that the positions of the batch predict."""
    next_tokens: torch.Tensor = batch["input_ids"][:, 1:, None]
    return next_tokens


def _wanted(batch: BatchedDataDict) -> torch.Tensor:
    """`[B, T-1]` bool: the mask, without positions that have no next token."""
    mask: torch.Tensor = batch["token_mask"].bool()
    positions = torch.arange(mask.shape[1], device=mask.device)
    has_next: torch.Tensor = positions < batch["input_lengths"][:, None] - 1
    return mask & has_next


def _spread(values: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`values [N, ...]` at the N places of `wanted [B, T]` that are set, 0 at the others."""
    places = wanted.reshape(*wanted.shape, *[1] * (values.dim() - 1))
    spread: torch.Tensor = values.new_zeros(*wanted.shape, *values.shape[1:])
    return spread.masked_scatter(places, values)
