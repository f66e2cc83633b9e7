"""A transformers causal model that answers with logprobs of next tokens, not with logits."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.config.model import DType
from nemo_rl_core.data.packing import Microbatch, pack
from nemo_rl_core.errors import ModelError
from nemo_rl_core.functional.logprobs import (
    logprobs_from_logits,
    next_token_logprobs_from_hidden,
)

_LOGPROB_CHUNK_TOKENS = 1024


def load_model(folder: Path) -> Any:
    """Loads a transformers folder with float32 parameters, in evaluation mode (no dropout)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


class LogprobModel:
    """Next-token logprobs of packed sequences, `[N, V]` logits never being made whole.

    Args:
        model: A transformers causal model.
        temperature: What logits are divided by.
        dtype: Type of the matrix products.
    """

    def __init__(self, model: Any, *, temperature: float, dtype: DType) -> None:
        self.model = model
        self._temperature = temperature
        self._dtype = dtype
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._dtype == "float32":
            return nullcontext()
        return torch.autocast(device_type=self.model.device.type, dtype=torch.bfloat16)

    def logprobs(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        token_mask: torch.Tensor,
        microbatch: Microbatch,
    ) -> torch.Tensor:
        """Logprobs of each next token where the mask asks for one.

        Args:
            input_ids: `[B, T]`, sequences in `microbatch.indices` order, padded on the right.
            lengths: `[B]` valid tokens.
            token_mask: `[B, T-1]` bool.
            microbatch: How to lay the sequences into rows.

        Returns:
            `[B, T-1]` in nats, float32; 0 where the mask is not set.
        """
        rows = pack(input_ids, lengths, microbatch)
        positions = torch.arange(token_mask.shape[1], device=lengths.device)
        wanted = token_mask & (positions < lengths[:, None] - 1)
        with self._autocast():
            # Without a cache, transformers reads the borders of packed sequences off position ids
            # that restart; with one it would let them see each other.
            hidden = self._decoder(
                input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False
            ).last_hidden_state
            picked = hidden[rows.row[:, :-1][wanted], rows.column[:, :-1][wanted]]
            values = next_token_logprobs_from_hidden(
                picked,
                self._head.weight,
                input_ids[:, 1:][wanted],
                temperature=self._temperature,
                chunk_size=_LOGPROB_CHUNK_TOKENS,
                bias=getattr(self._head, "bias", None),
            )
        zeros = torch.zeros(token_mask.shape, device=values.device)
        return zeros.masked_scatter(wanted, values)

    @torch.no_grad()
    def refuse_unless_faithful(self) -> None:
        """Compares packed, chunked logprobs with the model's own logits on three short sequences.

        A model that scales or caps its logits, or whose attention looks across packed sequences,
        would be trained on wrong numbers in silence; it is refused instead.

        Raises:
            ModelError: If they differ.
        """
        vocabulary = int(self._head.weight.shape[0])
        device = self.model.device
        lengths = torch.tensor([9, 5, 4], device=device)
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(0, vocabulary, (3, 9), generator=generator).to(device)
        mask = torch.ones(3, 8, dtype=torch.bool, device=device)
        microbatch = Microbatch(rows=((0,), (1, 2)), row_length=9)
        packed = self.logprobs(input_ids, lengths, mask, microbatch)
        for row, length in enumerate(lengths.tolist()):
            sequence = input_ids[row : row + 1, :length]
            with self._autocast():
                logits = self.model(input_ids=sequence, use_cache=False).logits
            plain = logprobs_from_logits(
                logits[:, :-1].float(), sequence[:, 1:], temperature=self._temperature
            )
            difference = (packed[row, : length - 1] - plain[0]).abs().max().item()
            bound = 1e-3 if self._dtype == "float32" else 0.3
            if not difference < bound:
                raise ModelError(
                    f"{type(self.model).__name__} computes other logprobs packed than alone",
                    expected=f"a difference below {bound}",
                    got=f"{difference:.3g}",
                    fix="this model changes its logits after the head, or does not keep packed "
                    "sequences apart; choose another model",
                )
