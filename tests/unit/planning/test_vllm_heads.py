"""Heads that vLLM does not compute on a CPU are refused before anything is trained."""

import logging
import shutil
import sys
from pathlib import Path

import pytest

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.vllm import VllmBackend
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning import vllm_heads
from nemo_rl_core.planning.vllm_heads import (
    _SOURCE,
    head_size,
    head_sizes_of_kernels,
    listed_head_sizes,
    refuse_heads_on_cpu,
)

NARROW = {"hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (NARROW, 16),
        ({**NARROW, "head_dim": 32}, 32),
        ({**NARROW, "head_dim": None}, 16),
        ({"text_config": {**NARROW, "head_dim": 80}, "hidden_size": 1}, 80),
        ({**NARROW, "kv_lora_rank": 512}, None),  # compressed keys have separate kernels
        ({"n_embd": 64, "n_head": 4}, None),
        ({"hidden_size": 64, "num_attention_heads": 0}, None),
    ],
)
def test_head_size_is_read_like_vllm(config: dict, width: int | None) -> None:
    assert head_size(config) == width


@pytest.mark.slow
def test_unsupported_head_size_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ModelError, match="cannot sample from the model 'mine' on a CPU") as refused:
        refuse_heads_on_cpu(NARROW, called="the model 'mine'")
    taken = head_sizes_of_kernels(16)
    assert {32, 64, 128} <= set(taken)
    assert refused.value.expected.startswith("a head_dim of 32, 48, 64,")
    assert refused.value.expected.endswith(f" or {max(taken)}")
    assert refused.value.got == "head_dim 16, which is hidden_size 64 / num_attention_heads 4"
    assert "generation.backend: hf" in refused.value.fix
    for width in taken:
        refuse_heads_on_cpu({**NARROW, "head_dim": width}, called="the model 'mine'")


@pytest.mark.parametrize(
    "source",
    ["", "class CPUAttentionBackend: ...", "class CPUAttentionBackend:\n  def x(self): pass", "(",
     "class CPUAttentionBackend:\n  def get_supported_head_sizes(cls):\n    return SIZES"],
)  # fmt: skip
def test_nothing_is_refused_without_vllms_list(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm" / _SOURCE.parent).mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / _SOURCE).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    listed_head_sizes.cache_clear()
    try:
        assert listed_head_sizes() == ()
        refuse_heads_on_cpu(NARROW, called="the model 'mine'")
    finally:
        listed_head_sizes.cache_clear()


@pytest.mark.slow
def test_an_engine_on_a_cpu_refuses_before_it_imports_vllm(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    setup = GenerationSetup(
        model_folder=folder, config=VllmGenerationConfig(), max_model_len=32, stop_token_ids=()
    )
    with pytest.raises(ModelError, match="the model folder 'model' on a CPU"):
        VllmBackend().setup(setup)


@pytest.mark.slow
def test_kernels_accept_listed_head_sizes_and_others_are_tried() -> None:
    taken = head_sizes_of_kernels(16)
    assert set(listed_head_sizes()) < set(taken)
    assert 16 not in taken
    for width in {*taken} - {*listed_head_sizes()}:
        refuse_heads_on_cpu({**NARROW, "head_dim": width}, called="the model 'mine'")


def test_nothing_is_refused_if_the_kernels_cannot_be_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The list lacks widths that they take."""
    head_sizes_of_kernels.cache_clear()
    monkeypatch.setattr(vllm_heads, "_PROBE", "raise SystemExit(1)")
    monkeypatch.setattr(logging.getLogger("nemo_rl_core"), "propagate", True)
    try:
        refuse_heads_on_cpu({**NARROW, "head_dim": 48}, called="the model 'mine'")
    finally:
        head_sizes_of_kernels.cache_clear()
    assert "size 48 on this CPU is unknown" in caplog.text
