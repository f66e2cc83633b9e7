"""Hidden states of sequences that share rows: what every head reads."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.dtensor.saving import save_model
from nemo_rl_core.config.model import DType
from nemo_rl_core.data.packing import Microbatch, pack
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError


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

    def save(
        self, folder: Path, tokenizer: Any, named_weights: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Writes the transformers folder that the model can be loaded from again; see `save_model`."""
        save_model(folder, self.model, tokenizer, named_weights)

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
        if self.shares_rows:  # a text decoder would take them as options it does not know
            raise ModelError(
                f"the batch has images, but {type(self.model).__name__} reads text alone",
                expected="a vision-language model",
                got=f"inputs {', '.join(images)}",
                fix="choose a vision-language model, or leave the images out",
            )
        with self._autocast():
            hidden: torch.Tensor = self.model.base_model(
                input_ids=batch["input_ids"],
                attention_mask=valid_tokens(batch).long(),
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


def valid_tokens(batch: BatchedDataDict) -> torch.Tensor:
    """`[B, T]` bool: every token up to its sequence's end."""
    ids, lengths = batch["input_ids"], batch["input_lengths"]
    valid: torch.Tensor = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return valid


def _image_inputs(batch: BatchedDataDict) -> dict[str, torch.Tensor]:
    """What the model is given besides tokens, such as `pixel_values`; empty for text."""
    return batch.get_multimodal_dict()
