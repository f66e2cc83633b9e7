"""The checks of an engine's proof, on hand-made logprobs."""

from pathlib import Path

import pytest
import torch

from nemo_rl_core.backends.transformers_logprobs import transformers_logprobs
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.models.validation.logprobs import as_training_batch
from nemo_rl_core.models.validation.proof import (
    check_proof,
    check_unchanged,
    proof_bounds,
    proof_prompts,
)

GATE = GateConfig()


def completions(prompts: BatchedDataDict, num_tokens: int = 2) -> BatchedDataDict:
    """Returns each prompt with `num_tokens` more tokens, in the format of an engine."""
    rows, width = prompts["input_ids"].shape
    ids = torch.zeros(rows, width + num_tokens, dtype=torch.long)
    ids[:, :width] = prompts["input_ids"]
    for row, length in enumerate(prompts["input_lengths"].tolist()):
        ids[row, length : length + num_tokens] = prompts["input_ids"][row, 0]
    return BatchedDataDict(
        {
            "output_ids": ids,
            "unpadded_sequence_lengths": prompts["input_lengths"] + num_tokens,
            "generation_lengths": torch.full((rows,), num_tokens),
        }
    )


def compared(
    batch: BatchedDataDict, logprobs: torch.Tensor, other: torch.Tensor
) -> BatchedDataDict:
    return BatchedDataDict({**batch, "generation_logprobs": logprobs, "prev_logprobs": other})


def test_prompts_are_reproducible_and_have_only_ordinary_tokens(tiny_model: Path) -> None:
    first, second = (proof_prompts(tiny_model, max_model_len=64) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    added = load_tokenizer(tiny_model).added_tokens_decoder.keys()
    assert added
    assert not added & set(first["input_ids"].flatten().tolist())
    assert len(set(first["input_ids"].flatten().tolist())) > 5
    # Shorter than the 16 tokens of a block, so that no prompt reads another one's keys and values.
    assert int(first["input_lengths"].max()) < 16


def test_prompts_leave_room_for_a_token(tiny_model: Path) -> None:
    prompts = proof_prompts(tiny_model, max_model_len=4)
    assert prompts["input_lengths"].tolist() == [1, 2, 3]
    assert prompts["input_ids"].shape == (3, 3)


@pytest.fixture
def batch(tiny_model: Path) -> BatchedDataDict:
    return as_training_batch(completions(proof_prompts(tiny_model, max_model_len=64)))


def test_equal_logprobs_give_an_error_of_one(batch: BatchedDataDict, tiny_model: Path) -> None:
    logprobs = transformers_logprobs(tiny_model, batch)
    assert check_proof(compared(batch, logprobs, logprobs), GATE, reference="transformers") == 1.0


def test_a_reference_that_differs_is_named_with_the_worst_sequence(batch: BatchedDataDict) -> None:
    logprobs = torch.full(batch["token_mask"].shape, -1.0)
    reference = logprobs.clone()
    reference[5] = -3.0  # e^2 = 7.389 at each of its tokens; one row of 8 is 12.5 %
    with pytest.raises(ConsistencyError, match="engine and transformers disagree") as caught:
        check_proof(compared(batch, logprobs, reference), GATE, reference="transformers")
    assert "1 of 8 sequences" in caught.value.problem
    assert "fixed prompts" in caught.value.problem
    assert "sequence 5 (7.389) at position 9: engine -1.0000, transformers -3.0000 nats" in str(
        caught.value.got
    )
    assert check_proof(
        compared(batch, logprobs, reference),
        GateConfig(max_masked_fraction=0.2),
        reference="transformers",
    ) == pytest.approx(1)


@pytest.mark.parametrize(
    ("dtype", "is_quantized", "token", "sequence"),
    [
        ("float32", False, 1.05, 2.0),
        ("bfloat16", False, 1.25, 2.5),
        ("bfloat16", True, 1.5, 3.0),
        ("float32", True, 1.5, 3.0),
    ],
)
def test_rounding_widens_the_bounds(
    dtype: DType, is_quantized: bool, token: float, sequence: float
) -> None:
    bounds = proof_bounds(GATE, dtype=dtype, is_quantized=is_quantized)
    assert bounds.max_token_mult_prob_error == token
    assert bounds.max_sequence_mult_prob_error == sequence
    wide = GateConfig(max_token_mult_prob_error=4.0, max_sequence_mult_prob_error=9.0)
    assert proof_bounds(wide, dtype=dtype, is_quantized=is_quantized) == wide


def test_the_bound_of_float32_on_a_cpu_is_tight_unless_the_gate_is_wide() -> None:
    """vLLM logprobs of tiny DeepSeek-V2 and LFM2-MoE models differ by 0.03 to 0.26 nats."""
    bounds = proof_bounds(GATE, dtype="float32", is_quantized=False, has_gpu=False)
    assert bounds.max_token_mult_prob_error == 1.002
    wide = GateConfig(max_token_mult_prob_error=1.5)
    assert proof_bounds(wide, dtype="float32", is_quantized=False, has_gpu=False) == wide


def test_only_generated_tokens_are_compared(batch: BatchedDataDict) -> None:
    logprobs = torch.full(batch["token_mask"].shape, -1.0)
    reference = logprobs.masked_fill(~batch["token_mask"], -9.0)
    assert check_proof(compared(batch, logprobs, reference), GATE, reference="the trainer") == 1.0


def test_an_engine_whose_logprobs_have_changed_is_refused(tiny_model: Path) -> None:
    prompts = proof_prompts(tiny_model, max_model_len=64)
    first = torch.full(prompts["input_ids"].shape, -2.0)
    check_unchanged(prompts, first, first.clone(), GATE)
    # 0.1 nats everywhere: e^0.1 = 1.105 is past the 1.05 of the mean.
    with pytest.raises(ConsistencyError, match=r"same engine before disagree.*1\.105") as caught:
        check_unchanged(prompts, first, first - 0.1, GATE)
    assert "no weights in between" in caught.value.problem


def test_logprobs_of_transformers_under_a_repetition_penalty(
    batch: BatchedDataDict, tiny_model: Path
) -> None:
    from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    logprobs = transformers_logprobs(tiny_model, batch, repetition_penalty=1.7)
    penalize, compared = RepetitionPenaltyLogitsProcessor(1.7), 0
    for row, length in enumerate(batch["input_lengths"].tolist()):
        ids = batch["input_ids"][row : row + 1, :length]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        for position in range(1, length):
            scores = penalize(ids[:, :position], logits[position - 1 : position].clone())
            expected = torch.log_softmax(scores, dim=-1)[0, ids[0, position]]
            assert logprobs[row, position - 1] == pytest.approx(float(expected), abs=1e-6)
            compared += 1
        assert not logprobs[row, length - 1 :].any()
    assert compared == 59  # 3 + 4 + 5 + 7 + 9 + 11 + 13 + 15 tokens, less the first of each row
