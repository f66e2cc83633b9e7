"""Model types in vLLM: each loads its trainer's weights and computes the same logprobs."""

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.type_engines import Agreement, agreements

BOUND = 1e-3
"""Tolerance in nats; BLOOM differs by 2e-4, the others by less than 1e-5."""
AGREEING = [
    *("gpt2", "gemma2", "bloom", "cohere2"),  # tied heads with different names, caps, windows
    *("qwen3_moe", "granitemoehybrid"),  # experts, and state in addition to keys and values
    *("gpt_neox", "phi3"),  # vLLM's generic class, and fused matrices
]
REFUSED = {
    "mamba": "selective_scan_fwd",
    "gpt_oss": "cannot load new weights",
}


@pytest.mark.thorough
def test_types_load_their_trainers_weights_and_agree() -> None:
    actual = agreements(AGREEING)
    assert [each.kind for each in actual if isinstance(each, Agreement)] == AGREEING
    assert [
        each for each in actual if not (isinstance(each, Agreement) and each.error < BOUND)
    ] == []


@pytest.mark.slow
def test_types_that_vllm_cannot_compute_are_refused_with_the_reason() -> None:
    for each in agreements([*REFUSED]):
        assert isinstance(each, Agreement)
        assert each.is_named
        assert REFUSED[each.kind] in each.refused


@pytest.mark.thorough
def test_every_type_agrees_or_is_refused_with_a_project_error() -> None:
    actual = agreements(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    tried = [each for each in actual if isinstance(each, Agreement)]
    assert [each for each in tried if each.refused and not each.is_named] == []
