"""Transformers decoders over packed rows: one answers with logprobs, one with values."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.dtensor.loading import SCALAR_HEAD
from nemo_rl_core.config.model import DType
from nemo_rl_core.data.packing import Microbatch, pack
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError
from nemo_rl_core.functional.logprobs import (
    logprobs_from_logits,
    token_logprobs_from_hidden,
    topk_logprobs_from_hidden,
)

_LOGPROB_CHUNK_TOKENS = 1024


class PackedModel(ABC):
    """What a head reads: hidden states of sequences that share rows.

    In all methods, `batch` is a micro-batch with `input_ids [B, T]` padded on the right and
    `input_lengths [B]`, its sequences in `microbatch.indices` order.

    Args:
        model: A transformers model around a decoder.
        dtype: Type of the matrix products.
    """

    def __init__(self, model: Any, *, dtype: DType) -> None:
        self.model = model
        self._dtype = dtype
        self._decoder = model.get_decoder()

    @property
    def shares_rows(self) -> bool:
        """Whether several sequences may lie in one row.

        Not in models that read images as well: their positions have several dimensions, off which
        transformers does not read where a sequence begins.
        """
        return self._decoder is self.model.base_model

    @abstractmethod
    def loss_inputs(
        self, batch: BatchedDataDict, microbatch: Microbatch
    ) -> tuple[torch.Tensor, BatchedDataDict]:
        """The first argument of the loss, with gradients, and the batch with what it reads."""

    @abstractmethod
    def refuse_unless_faithful(self) -> None:
        """Compares what packed rows give with the model's own forward pass.

        Raises:
            ModelError: If they differ.
        """

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Writes the transformers folder that the model can be loaded from again."""
        self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype == "float32":
            return nullcontext()
        return torch.autocast(device_type=self.model.device.type, dtype=torch.bfloat16)

    def _hidden_states(
        self, batch: BatchedDataDict, microbatch: Microbatch, wanted: torch.Tensor
    ) -> torch.Tensor:
        """`[N, D]` final hidden states at the N tokens that `wanted [B, T' <= T]` is set for."""
        width = wanted.shape[1]
        images = _image_inputs(batch)
        if images:
            return self._hidden_with_images(batch, images)[:, :width][wanted]
        rows = pack(batch["input_ids"], batch["input_lengths"], microbatch)
        with self._autocast():
            # Without a cache, transformers reads the borders of packed sequences off position ids
            # that restart; with one it would let them see each other.
            hidden = self._decoder(
                input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False
            ).last_hidden_state
        picked: torch.Tensor = hidden[rows.row[:, :width][wanted], rows.column[:, :width][wanted]]
        return picked

    def _hidden_with_images(
        self, batch: BatchedDataDict, images: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """`[B, T, D]` of the whole model, one sequence a row: it puts images and positions in."""
        with self._autocast():
            hidden: torch.Tensor = self.model.base_model(
                input_ids=batch["input_ids"],
                attention_mask=_valid(batch).long(),
                use_cache=False,
                **{name: value.to(self.model.device) for name, value in images.items()},
            ).last_hidden_state
        return hidden

    def _probe(
        self, vocab_size: int, without: int | None = None
    ) -> tuple[BatchedDataDict, Microbatch]:
        """Three sequences, every token wanted; the id `without` does not occur."""
        generator = torch.Generator().manual_seed(0)
        num_ids = vocab_size if without is None else vocab_size - 1
        ids = torch.randint(0, num_ids, (3, 9), generator=generator)
        if without is not None:
            ids += (ids >= without).long()
        lengths, mask = torch.tensor([9, 5, 4]), torch.ones(3, 8, dtype=torch.bool)
        batch = BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "token_mask": mask})
        rows = ((0,), (1, 2)) if self.shares_rows else ((0,), (1,), (2,))
        return batch.to(self.model.device), Microbatch(rows=rows, row_length=9)

    def _refuse_above(self, difference: float, what: str) -> None:
        bound = 1e-3 if self._dtype == "float32" else 0.3
        if not difference < bound:
            raise ModelError(
                f"{type(self.model).__name__} computes other {what} packed than alone",
                expected=f"a difference below {bound}",
                got=f"{difference:.3g}",
                fix="this model changes its outputs after the head, or does not keep packed "
                "sequences apart; choose another model",
            )


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
        valid = _valid(batch)
        hidden = self._hidden_states(batch, microbatch, valid)
        return _spread(self._head(hidden.float())[:, 0], valid)

    def save(self, folder: Path, tokenizer: Any) -> None:
        """Writes the transformers folder, its tokenizer padding with what the model skips."""
        pad = self.model.config.get_text_config().pad_token_id
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
        super().save(folder, tokenizer)

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


def _image_inputs(batch: BatchedDataDict) -> dict[str, torch.Tensor]:
    """What the model is given besides tokens, such as `pixel_values`; empty for text."""
    inputs: dict[str, torch.Tensor] = getattr(batch, "get_multimodal_dict", dict)()
    return inputs


def _valid(batch: BatchedDataDict) -> torch.Tensor:
    """`[B, T]` bool: every token up to its sequence's end."""
    ids, lengths = batch["input_ids"], batch["input_lengths"]
    valid: torch.Tensor = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return valid


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
