"""Packed sequences: micro-batches of a rank's rows, and their hidden states."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.context_parallel import packed_causal_mask, sum_parts
from nemo_rl_core.backends.training.dtensor.attention import PackedAttention
from nemo_rl_core.backends.training.dtensor.context_parallel import full_rows_on_each_rank
from nemo_rl_core.backends.training.dtensor.loading import save_model
from nemo_rl_core.backends.training.dtensor.mesh import RankMesh
from nemo_rl_core.backends.training.dtensor.packed_tokens import PackedTokens, packed_tokens
from nemo_rl_core.backends.training.dtensor.parallelize import gathered_in_float32, run_within
from nemo_rl_core.backends.training.dtensor.router_loss import load_balancing_losses
from nemo_rl_core.backends.training.rounding import rounding_bound, size_of
from nemo_rl_core.config.model import DType
from nemo_rl_core.data.pretrained import shares_rows
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning.model_parts import (
    accepted,
    decoder_of,
    independent_length,
    layers_of,
    reset_rotary,
)

_LOG = logging.getLogger(__name__)
_PACKED = Microbatch(rows=((0,), (1, 2)), row_length=9)
_APART = Microbatch(rows=((0,), (1,), (2,)), row_length=9)
"""Plans of `_probe`'s sequences."""

_Read = Callable[[BatchedDataDict, PackedTokens], torch.Tensor]
"""Returns the outputs of a micro-batch, at the positions of `PackedModel._wanted`."""


class PackedModel(ABC):
    """Base of models that compute on packed sequences.

    In all methods, `batch` is a micro-batch with `input_ids [B, T]` padded on the right and
    `input_lengths [B]`, its sequences in the order of its plan, and `packed` is what the method of
    that name returns of them.

    Args:
        model: A transformers model around a decoder.
        dtype: Type of the matrix products.
        mesh: The ranks that shard the model; None for one rank with all of it.
        attention: The kernel that attends over packed rows; None for transformers' own attention.
        sharing: How prefixes may be packed once; None packs each sequence whole.

    Attributes:
        shares_rows: Whether several sequences may be packed into one row; known after
            `choose_layout`.
        independent_length: The longest sequence that shares a micro-batch; None for any.
        attention: As given.
        sharing: As given; None with an `independent_length`, or once `choose_layout` finds that
            shared prefixes change values.
        keeps_router_logits: Whether forward passes with gradients keep what `router_loss` reads.
    """

    def __init__(
        self,
        model: Any,
        *,
        dtype: DType,
        mesh: RankMesh | None = None,
        attention: PackedAttention | None = None,
        sharing: PrefixSharing | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.sharing = sharing if independent_length(model.config) is None else None
        self.shares_rows = shares_rows(model.config.to_dict())
        self.independent_length = independent_length(model.config)
        self._reads_images = not self.shares_rows
        self._dtype = dtype
        self._mesh = mesh
        self._decoder = decoder_of(model)
        self._name = type(model).__name__.removeprefix("FSDP")
        self._output_type: Any = None
        self.keeps_router_logits = False
        self._router_logits: tuple[torch.Tensor, ...] = ()

    @abstractmethod
    def loss_inputs(
        self, batch: BatchedDataDict, packed: PackedTokens
    ) -> tuple[torch.Tensor, BatchedDataDict]:
        """Returns the first argument of the loss, with gradients, and the batch for the loss."""

    def router_loss(self, batch: BatchedDataDict, packed: PackedTokens) -> torch.Tensor:
        """The load-balancing loss of the last forward pass, summed over `sample_mask [B]`."""
        assert packed.sequence_ids is not None
        losses = load_balancing_losses(
            self._router_logits,
            packed.sequence_ids.flatten(),
            num_sequences=batch.size,
            top_k=self.model.config.get_text_config().num_experts_per_tok,
        )
        self._router_logits = ()
        total: torch.Tensor = (losses * batch["sample_mask"]).sum()
        return total

    @abstractmethod
    def _wanted(self, batch: BatchedDataDict) -> torch.Tensor:
        """`[B, T]` or `[B, T-1]` bool, set for the tokens whose outputs are read."""

    def packed(self, batch: BatchedDataDict, microbatch: Microbatch) -> PackedTokens:
        """What the other methods read of a micro-batch; best made before it is moved to a GPU.

        Args:
            batch: The micro-batch.
            microbatch: Its plan.
        """
        group = None
        if (mesh := self._mesh) is not None:
            length = -(-microbatch.row_length // mesh.row_multiple) * mesh.row_multiple
            microbatch = replace(microbatch, row_length=length)
            group = mesh.context_group if mesh.context_size > 1 else None
        return packed_tokens(
            batch,
            microbatch,
            self._wanted(batch),
            group=group,
            with_boundaries=self.attention is not None,
            with_sequence_ids=self.keeps_router_logits,
        )

    def choose_layout(self) -> None:
        """Finds out what may share a row, by comparisons with the model's own forward pass.

        They are made in float32, so that rounding hides nothing; with an attention kernel or
        quantized weights, which may lack float32, in the training dtype.

        Raises:
            ModelError: If outputs differ even with a row for each sequence.
        """
        if self.independent_length is not None:
            _LOG.warning(
                "%s computes each sequence of more than %d tokens in a separate micro-batch, since "
                "its values depend on the length of a batch",
                self._name,
                self.independent_length,
            )
        if self.attention is not None or getattr(self.model, "is_quantized", False):
            self._compare()
            return
        usual, self._dtype = self._dtype, "float32"
        try:
            with gathered_in_float32(self.model):
                self._compare()
        finally:
            self._dtype = usual

    @abstractmethod
    def _compare(self) -> None:
        """Sets `shares_rows`, `sharing` and, of a language model, the head."""

    def save(
        self,
        folder: Path,
        source: Path,
        tokenizer: Any,
        named_weights: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """Writes the model as a transformers folder; see `save_model`."""
        save_model(folder, self.model, source, tokenizer, named_weights)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype == "float32":
            return nullcontext()
        return torch.autocast(device_type=self.model.device.type, dtype=torch.bfloat16)

    def _read(
        self,
        batch: BatchedDataDict,
        packed: PackedTokens,
        head: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    ) -> tuple[torch.Tensor, ...]:
        """Applies a head to hidden states of tokens; the same result on all ranks of a replica.

        Args:
            batch: The micro-batch.
            packed: Its tokens, of which N are wanted.
            head: Called with `[N, D]` hidden states and `[N]` indices among the N tokens; under
                context parallelism, only with this rank's tokens.

        Returns:
            The head's outputs, each `[N, ...]`.
        """

        def read() -> tuple[torch.Tensor, ...]:
            num_wanted, own = len(packed.wanted_row), packed.own
            numbers = torch.arange(num_wanted, device=packed.wanted_row.device)
            if images := _image_inputs(batch):
                return head(self._hidden_with_images(batch, images)[packed.wanted], numbers)
            hidden = self._hidden_of_text(packed)
            if own is None:
                return head(hidden, numbers)
            return tuple(self._on_all_ranks(part, own, num_wanted) for part in head(hidden, own))

        values: tuple[torch.Tensor, ...] = run_within(self.model, read)
        return values

    def _hidden_of_text(self, packed: PackedTokens) -> torch.Tensor:
        """`[n, D]` hidden states of the wanted tokens that this rank has."""
        if self.attention is not None:
            boundaries = self.attention.inputs(packed)
        else:
            # Without a cache, transformers derives sequence boundaries from position ids that
            # restart; with a cache sequences would attend to each other.
            mesh = self._mesh
            group = mesh.context_group if mesh and mesh.context_size > 1 else None
            is_given = group is not None or packed.is_tree
            mask = packed_causal_mask(packed.last, group) if is_given else None
            boundaries = {"attention_mask": mask}
        if self.independent_length is not None:
            reset_rotary(self._decoder)
        with self._autocast():
            options = {"use_cache": False, **boundaries}
            if keeps := self.keeps_router_logits and torch.is_grad_enabled():
                options["output_router_logits"] = True
            if self.shares_rows:
                options["position_ids"] = packed.position_ids
            output = self._decoder(input_ids=packed.input_ids, **accepted(self._decoder, options))
        self._router_logits = output.router_logits if keeps else ()
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[packed.row, packed.column]

    def _on_all_ranks(
        self, part: torch.Tensor, numbers: torch.Tensor, num_wanted: int
    ) -> torch.Tensor:
        assert self._mesh is not None
        whole = part.new_zeros(num_wanted, *part.shape[1:]).index_put((numbers,), part)
        return sum_parts(whole, self._mesh.context_group)

    def _hidden_with_images(
        self, batch: BatchedDataDict, images: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """`[B, T, D]` of the whole model, which inserts images and positions; unpacked rows."""
        if not self._reads_images:  # a text decoder would pass them on as unknown options
            raise ModelError(
                f"the batch has images, but {self._name} reads text only",
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

    def _plain_outputs(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the model's own forward pass on one sequence.

        Every rank computes the full sequence, padded to a length that ranks can split, which does
        not change a causal model's outputs before the padding.

        Args:
            sequence: `[1, T]` token ids.

        Returns:
            `[1, T, D]` hidden states of the decoder, and `[1, T, V]` logits or `[1, 1]` scores.
        """
        if self._mesh is not None:
            filler = -sequence.shape[1] % self._mesh.row_multiple
            pad = self.model.config.get_text_config().pad_token_id or 0
            sequence = torch.nn.functional.pad(sequence, (0, filler), value=pad)
        outputs: list[Any] = []
        hook = self._decoder.register_forward_hook(lambda _, __, output: outputs.append(output))
        options = accepted(self.model, {"use_cache": False})
        try:
            with self._autocast(), full_rows_on_each_rank(self.model):
                logits: torch.Tensor = self.model(input_ids=sequence, **options).logits
        finally:
            hook.remove()
        self._output_type = type(outputs[0])
        return outputs[0].last_hidden_state, logits

    def _probe(self, vocab_size: int, without: int | None = None) -> BatchedDataDict:
        """Three sequences without the id `without`, with all tokens unmasked."""
        generator = torch.Generator().manual_seed(0)
        num_ids = vocab_size if without is None else vocab_size - 1
        ids = torch.randint(0, num_ids, (3, 9), generator=generator)
        if without is not None:
            ids += (ids >= without).long()
        lengths, mask = torch.tensor([9, 5, 4]), torch.ones(3, 8, dtype=torch.bool)
        batch = BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "token_mask": mask})
        return batch.to(self.model.device)

    def _pack_if_faithful(
        self,
        read: _Read,
        batch: BatchedDataDict,
        differences: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Decides what may share a row, by comparisons with the model's own forward pass.

        Args:
            read: Returns the outputs of a micro-batch.
            batch: Of `_probe`.
            differences: From the model's own outputs, of those that `read` returns.

        Raises:
            ModelError: If a row for each sequence gives other outputs, too.
        """
        if self.shares_rows:
            outputs = read(batch, self.packed(batch, _PACKED))
            size = size_of(differences(outputs), self._dtype)
            if size < self._bound(read, batch, _PACKED):
                self._share_if_faithful(read, batch)
                return
            self.shares_rows, self.sharing = False, None
            _LOG.warning(
                "%s gives different values when sequences share a row (by %.3g): each gets a "
                "separate row, padded to the longest of its micro-batch",
                self._name,
                size,
            )
        outputs = read(batch, self.packed(batch, _APART))
        bound, found = self._bound(read, batch, _APART), differences(outputs)
        if self._mesh is not None and self._mesh.context_size > 1:
            what, fix = "outputs for a part of the tokens", "set context_parallel_size to 1"
        else:
            what = "outputs for sequences padded on the right"
            fix = (
                "choose a model whose tokens attend to earlier ones only; for an encoder, set "
                "is_decoder: true in its config.json"
            )
        self._refuse_above(bound, found, what, fix=fix)

    def _share_if_faithful(self, read: _Read, batch: BatchedDataDict) -> None:
        """Compares outputs of a tree of prefixes with those of sequences that share nothing.

        Args:
            read: Returns the outputs of a micro-batch.
            batch: Of `_probe`; the second sequence then begins as the first.
        """
        if self.sharing is None:
            return
        batch["input_ids"][1, :3] = batch["input_ids"][0, :3]
        tree = Microbatch(rows=((0, 1), (2,)), row_length=11, shared=(0, 3, 0))
        differences = self._read_wanted(read, batch, tree) - self._read_wanted(read, batch, _PACKED)
        difference = size_of(differences, self._dtype)
        if not difference < self._bound(read, batch, _PACKED):
            self.sharing = None
            _LOG.warning(
                "training.share_prefixes: %s computes other values for sequences that share a "
                "prefix, by %.3g, so that each is packed whole",
                self._name,
                difference,
            )

    def _bound(self, read: _Read, batch: BatchedDataDict, plan: Microbatch) -> float:
        """The largest difference between two correct passes; see `rounding_bound`."""
        return rounding_bound(
            lambda: self._read_wanted(read, batch, plan), layers_of(self.model), self._dtype
        )

    def _read_wanted(self, read: _Read, batch: BatchedDataDict, plan: Microbatch) -> torch.Tensor:
        return read(batch, self.packed(batch, plan))[self._wanted(batch)]

    def _refuse_above(
        self, bound: float, differences: torch.Tensor, what: str, *, fix: str
    ) -> None:
        size = size_of(differences, self._dtype)
        if not size < bound:
            mean = "" if self._dtype == "float32" else "mean "
            raise ModelError(
                f"{self._name} computes different {what}",
                expected=f"a {mean}difference below {bound:.3g}",
                got=f"{size:.3g}",
                fix=fix,
            )


def valid_tokens(batch: BatchedDataDict) -> torch.Tensor:
    """`[B, T]` bool mask of tokens before the padding."""
    ids, lengths = batch["input_ids"], batch["input_lengths"]
    valid: torch.Tensor = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return valid


def _image_inputs(batch: BatchedDataDict) -> dict[str, torch.Tensor]:
    """Model inputs besides tokens, such as `pixel_values`; empty for text."""
    return batch.get_multimodal_dict()
