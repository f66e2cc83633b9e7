"""Packed sequences: micro-batches of a rank's rows, and their hidden states."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.training.context_parallel import packed_causal_mask, spread_parts
from nemo_rl_core.backends.training.dtensor.attention import PackedAttention
from nemo_rl_core.backends.training.dtensor.context_parallel import full_rows_on_each_rank
from nemo_rl_core.backends.training.dtensor.mesh import RankMesh
from nemo_rl_core.backends.training.dtensor.microbatches import PackedTokens, packed_tokens
from nemo_rl_core.backends.training.dtensor.parallelize import gathered_in_float32, run_within
from nemo_rl_core.backends.training.dtensor.router_loss import load_balancing_losses
from nemo_rl_core.backends.training.padded import valid_tokens
from nemo_rl_core.backends.training.rounding import rounding_bound, size_of
from nemo_rl_core.config.model import DType
from nemo_rl_core.data.pretrained import shares_rows
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.loading import save_model
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
"""Function that returns a micro-batch's outputs at the positions of `PackedModel._selected`."""


class PackedModel(ABC):
    """Base class of models that compute on packed sequences.

    In all methods, `batch` is a micro-batch with `input_ids [B, T]` padded on the right and
    `input_lengths [B]`, with sequences in the order of its plan, and `packed` is the result of the
    method `packed`.

    Attributes:
        shares_rows: Whether several sequences may be packed into one row; set by `choose_layout`.
        independent_length: Longest sequence that may share a micro-batch; None for no limit.
        keeps_router_logits: Whether forward passes with gradients keep logits for `router_loss`.
    """

    _selected: Callable[[BatchedDataDict], torch.Tensor]
    """Returns a `[B, T]` or `[B, T-1]` bool mask of the tokens whose outputs are read."""

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
        self.independent_length = independent_length(model.config)
        self.sharing = sharing if self.independent_length is None else None
        self.shares_rows = shares_rows(model.config.to_dict())
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
        """Returns the load-balancing loss of the last forward pass, summed over `sample_mask`."""
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

    def packed(self, batch: BatchedDataDict, microbatch: Microbatch) -> PackedTokens:
        """Packs a micro-batch for the other methods; call it before moving the batch to a GPU."""
        group = None
        if (mesh := self._mesh) is not None:
            length = -(-microbatch.row_length // mesh.row_multiple) * mesh.row_multiple
            microbatch = replace(microbatch, row_length=length)
            group = mesh.context_group if mesh.context_size > 1 else None
        return packed_tokens(
            batch,
            microbatch,
            self._selected(batch),
            group=group,
            with_boundaries=self.attention is not None,
            with_sequence_ids=self.keeps_router_logits,
        )

    def choose_layout(self) -> None:
        """Decides whether sequences may share rows, by comparison with the model's forward pass.

        Outputs are compared in float32, so that rounding hides no difference; with an attention
        kernel, which may not support float32, in the training dtype.
        """
        if self.independent_length is not None:
            _LOG.warning(
                "%s computes each sequence of more than %d tokens in a separate micro-batch, since "
                "its outputs depend on the length of the batch",
                self._name,
                self.independent_length,
            )
        if self.attention is not None:
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
        """Sets `shares_rows`, `sharing` and, for language models, how logits are computed."""

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
        """Applies a head to hidden states of the N selected tokens; returns `[N, ...]` outputs.

        With context parallelism, `head` gets the states and indices of this rank's tokens only.
        """

        def read() -> tuple[torch.Tensor, ...]:
            selected_row, local = packed.selected[0], packed.local
            num_selected = len(selected_row)
            indices = torch.arange(num_selected, device=selected_row.device)
            if images := batch.get_multimodal_dict():
                return head(self._hidden_with_images(batch, images)[packed.selected], indices)
            hidden = self._hidden_of_text(packed)
            if local is None:
                return head(hidden, indices)
            assert self._mesh is not None
            return spread_parts(head(hidden, local), local, num_selected, self._mesh.context_group)

        values: tuple[torch.Tensor, ...]
        values = read() if self._mesh is None else run_within(self.model, read)
        return values

    def _hidden_of_text(self, packed: PackedTokens) -> torch.Tensor:
        """Returns `[n, D]` hidden states of the selected tokens that this rank has."""
        if self.attention is not None:
            boundaries = self.attention.inputs(packed)
        else:
            # Without a cache, transformers derives sequence boundaries from restarting position
            # ids; with a cache, sequences would attend to each other.
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

    def _hidden_with_images(
        self, batch: BatchedDataDict, images: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Returns `[B, T, D]` of the full model, which inserts images; rows are not packed."""
        if not self._reads_images:  # a text decoder would accept them as unknown options
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
        """Returns a sequence's hidden states `[1, T, D]` and logits `[1, T, V]` or scores `[1, 1]`.

        Every rank computes the full sequence, padded to a length that ranks can split. Padding does
        not change a causal model's outputs before it.
        """
        if self._mesh is not None:
            filler = -sequence.shape[1] % self._mesh.row_multiple
            pad = getattr(self.model.config.get_text_config(), "pad_token_id", None) or 0
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
        """Decides whether sequences may share rows, by comparison with the model's forward pass."""
        if self.shares_rows:
            outputs = read(batch, self.packed(batch, _PACKED))
            size = size_of(differences(outputs), self._dtype)
            if size < self._bound(read, batch, _PACKED):
                self._share_if_faithful(read, batch)
                return
            self.shares_rows, self.sharing = False, None
            _LOG.warning(
                "%s computes different values (by %.3g) when sequences share a row, so each gets a "
                "separate row, padded to the longest of its micro-batch",
                self._name,
                size,
            )
        outputs = read(batch, self.packed(batch, _APART))
        bound = self._bound(read, batch, _APART)
        if self._mesh is not None and self._mesh.context_size > 1:
            what, fix = "outputs for a part of the tokens", "set context_parallel_size to 1"
        else:
            what = "outputs for sequences padded on the right"
            fix = (
                "choose a model whose tokens only attend to earlier ones; for an encoder, set "
                "is_decoder: true in its config.json"
            )
        self._refuse_above(bound, differences(outputs), what, fix=fix)

    def _share_if_faithful(self, read: _Read, batch: BatchedDataDict) -> None:
        """Clears `sharing` if it changes outputs; changes the batch's second sequence."""
        if self.sharing is None:
            return
        batch["input_ids"][1, :3] = batch["input_ids"][0, :3]
        tree = Microbatch(rows=((0, 1), (2,)), row_length=11, shared=(0, 3, 0))
        shared, separate = (self._read_selected(read, batch, plan) for plan in (tree, _PACKED))
        difference = size_of(shared - separate, self._dtype)
        if not difference < self._bound(read, batch, _PACKED):
            self.sharing = None
            _LOG.warning(
                "training.share_prefixes: %s computes different values (by %.3g) for sequences "
                "that share a prefix, so each is packed separately",
                self._name,
                difference,
            )

    def _bound(self, read: _Read, batch: BatchedDataDict, plan: Microbatch) -> float:
        """Returns the largest difference between two correct passes; see `rounding_bound`."""
        return rounding_bound(
            lambda: self._read_selected(read, batch, plan), layers_of(self.model), self._dtype
        )

    def _read_selected(self, read: _Read, batch: BatchedDataDict, plan: Microbatch) -> torch.Tensor:
        return read(batch, self.packed(batch, plan))[self._selected(batch)]

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
