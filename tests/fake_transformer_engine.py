"""A Transformer Engine with torch's kernels, for Megatron-core's own layer specification.

    with simulated_cuda():
        install()  # before anything imports megatron.core

Megatron-core 0.16.1 builds its layers from the classes here. Their signatures are those of
Transformer Engine 2.11.0: `test_megatron_transformer_engine.py` compares them with a record of the
library, `transformer_engine_2.11.json`. So a call that this accepts, the library accepts. The
library's results, precision and speed on a GPU have never been tested.
"""

import itertools
import sys
from contextlib import AbstractContextManager, ContextDecorator, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.fake_fused_adam import (
    CALLS,
    FusedAdam,
    FusedSGD,
    MultiTensorApply,
    multi_tensor_l2norm,
    multi_tensor_scale,
    refuse,
)

VERSION = "2.11.0"


class _Module(torch.nn.Module):
    """Attributes of all modules of the library that Megatron-core uses."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Does nothing without FP8."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def get_extra_state(self) -> torch.Tensor:
        """Returns the FP8 state, which is empty without FP8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.numel() == 0, "a checkpoint has no pickled state"

    def _weight(self, name: str, rows: int, columns: int, dtype: Any, device: Any) -> None:
        shape = (rows, columns)
        self.register_parameter(
            name, torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        )


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refuse(ranks=tp_size > 1, wgrad=fuse_wgrad_accumulation, delayed=delay_wgrad_compute)
        self.parallel_mode, self.return_bias, self.use_bias = parallel_mode, return_bias, bias
        self.in_features, self.out_features = in_features, out_features
        self.save_original_input = save_original_input
        self._weight("weight", out_features, in_features, params_dtype, device)
        if bias:
            self.bias = torch.nn.Parameter(
                torch.empty(out_features, dtype=params_dtype, device=device)
            )
        if init_method is not None:
            init_method(self.weight)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        CALLS.append(("Linear", tuple(inp.shape)))
        bias = self.bias if self.use_bias else None
        if self.return_bias:
            return F.linear(inp, self.weight), bias
        return F.linear(inp, self.weight, bias)


class LayerNormLinear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert normalization == "RMSNorm"
        refuse(ranks=tp_size > 1, output=return_layernorm_output)
        self.zero_centered_gamma = zero_centered_gamma
        self.eps, self.return_bias, self.use_bias = eps, return_bias, bias
        self.parallel_mode = parallel_mode
        self.layer_norm_weight = torch.nn.Parameter(
            torch.empty(in_features, dtype=params_dtype, device=device)
        )
        self._weight("weight", out_features, in_features, params_dtype, device)
        if bias:
            self.bias = torch.nn.Parameter(
                torch.empty(out_features, dtype=params_dtype, device=device)
            )

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        CALLS.append(("LayerNormLinear", tuple(inp.shape)))
        gamma = self.layer_norm_weight + self.zero_centered_gamma
        normed = F.rms_norm(inp, inp.shape[-1:], gamma, self.eps)
        bias = self.bias if self.use_bias else None
        if self.return_bias:
            return F.linear(normed, self.weight), bias
        return F.linear(normed, self.weight, bias)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refuse(ranks=tp_size > 1, bias=bias, wgrad=fuse_wgrad_accumulation)
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.parallel_mode = parallel_mode
        for gemm in range(num_gemms):
            self._weight(f"weight{gemm}", out_features, in_features, params_dtype, device)

    def forward(
        self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        assert isinstance(m_splits, list)
        assert len(m_splits) == self.num_gemms
        assert sum(m_splits) == inp.shape[0]
        CALLS.append(("GroupedLinear", tuple(inp.shape)))
        parts = inp.split(m_splits)
        done = [F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]
        return torch.cat(done)


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert not kwargs.keys() - {"device", "dtype"}
        size = hidden_size if normalized_shape is None else normalized_shape
        device = kwargs.get("device", "cuda")
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = bool(sequence_parallel)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        CALLS.append(("RMSNorm", tuple(inp.shape)))
        gamma = self.weight + self.zero_centered_gamma
        return F.rms_norm(inp, inp.shape[-1:], gamma, self.eps)


class DotProductAttention(_Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        super().__init__()
        refuse(ranks=tp_size > 1, window=window_size, dropout=attention_dropout)
        self.scale = softmax_scale

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Any = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> torch.Tensor:
        # The library's rules for sequences in one row.
        assert qkv_format == "thd"
        assert attn_mask_type == "padding_causal"
        assert attention_mask is None
        assert cu_seqlens_q is not None
        assert cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_q.is_cuda == query_layer.is_cuda
        assert query_layer.ndim == key_layer.ndim == value_layer.ndim == 3
        CALLS.append(("DotProductAttention", tuple(query_layer.shape)))
        borders = cu_seqlens_q.tolist()
        assert borders[-1] == query_layer.shape[0]
        lengths = [end - start for start, end in itertools.pairwise(borders)]
        assert max_seqlen_q == max_seqlen_kv
        assert max_seqlen_q is not None
        assert max(lengths) <= max_seqlen_q
        parts = [part.split(lengths) for part in (query_layer, key_layer, value_layer)]
        attended = [self._one(*sequence) for sequence in zip(*parts, strict=True)]
        return torch.cat(attended).flatten(1)

    def _one(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        scale = self.scale or query.shape[-1] ** -0.5
        scores = torch.einsum("qhe,khe->hqk", query, key) * scale
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khe->qhe", weights, value)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotates halves, starting at the first position of each sequence."""
    assert (tensor_format, fused, interleaved, cp_size) == ("thd", True, False, 1)
    assert cu_seqlens is not None
    assert freqs.dtype == torch.float32  # which the library asserts
    CALLS.append(("rope", tuple(t.shape)))
    borders = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(borders)]
    assert max(lengths) <= freqs.shape[0]
    angles = torch.cat([freqs[:length, 0] for length in lengths])  # [T, 1, d]
    half = t.shape[-1] // 2
    turned = torch.cat([-t[..., half:], t[..., :half]], dim=-1)
    return (t * angles.cos() + turned * angles.sin()).to(t.dtype)


class activation_recompute_forward(AbstractContextManager[Any], ContextDecorator):  # noqa: N801
    """Wraps both computations of a layer that is recomputed; only matters for FP8."""

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        super().__init__()

    def __exit__(self, *exc_details: Any) -> None:
        return None


class CudaRNGStatesTracker:
    """Megatron subclasses it and uses its own."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}


def _absent(*_: Any, **__: Any) -> Any:
    raise AssertionError("the fake has no such kernel")


_NAMES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    ".common": {},
    ".common.recipe": {"DelayedScaling": SimpleNamespace, "Format": SimpleNamespace},
    ".pytorch": {
        "Linear": Linear,
        "LayerNormLinear": LayerNormLinear,
        "GroupedLinear": GroupedLinear,
        "DotProductAttention": DotProductAttention,
        "RMSNorm": RMSNorm,
        "LayerNorm": type("LayerNorm", (torch.nn.Module,), {}),
    },
    ".pytorch.ops": {"Sequential": torch.nn.Sequential, "FusibleOperation": torch.nn.Module},
    ".pytorch.fp8": {
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False),
        "fp8_autocast": nullcontext,
    },
    ".pytorch.distributed": {
        "CudaRNGStatesTracker": CudaRNGStatesTracker,
        "activation_recompute_forward": activation_recompute_forward,
        "checkpoint": _absent,
    },
    ".pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
    ".pytorch.tensor.float8_tensor": {"Float8Tensor": type("Float8Tensor", (), {})},
    ".pytorch.attention": {},
    ".pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
    ".pytorch.router": {
        "fused_topk_with_score_function": _absent,
        "fused_compute_score_for_moe_aux_loss": _absent,
        "fused_moe_aux_loss": _absent,
    },
    ".pytorch.optimizers": {
        "FusedAdam": FusedAdam,
        "FusedSGD": FusedSGD,
        "multi_tensor_applier": MultiTensorApply(2048 * 32),
        "multi_tensor_l2norm": multi_tensor_l2norm,
        "multi_tensor_scale": multi_tensor_scale,
    },
}


def install() -> None:
    """Makes `import transformer_engine` find this module, permanently in this process."""
    assert "megatron.core" not in sys.modules, "it looks for the library when it is imported"
    for below, contents in _NAMES.items():
        name = f"transformer_engine{below}"
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
        outer, _, last = name.rpartition(".")
        if outer:
            setattr(sys.modules[outer], last, module)
