"""Distillation's columns: a teacher's likeliest tokens, and the student's logprobs of them."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.errors import ConfigError, ModelError

EPSILON = 1e-3  # see test_dtensor.py: a gradient of rounding must not move a weight
LENGTHS = [11, 4, 7, 2, 9, 3]
NUM_TOKENS, NUM_TEACHER_ROWS = 19, 32
K = 3


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(4, 19, (n,), generator=generator).tolist() for n in LENGTHS]
    return collate(sequences, [[index >= n // 2 for index in range(n)] for n in LENGTHS])


def make_backend(folder: Path, teacher: Path | None = None, **changes: object) -> DTensorBackend:
    backend = DTensorBackend()
    settings: dict[str, object] = {"max_tokens_per_microbatch": 24, **changes}
    optimizer = OptimizerConfig(learning_rate=1e-2, adam_epsilon=EPSILON)
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=optimizer,
            reference_folder=teacher,
            **settings,
        )
    )
    return backend


@pytest.fixture(scope="module")
def teacher(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a Llama with the student's tokenizer, and with rows in its head that have no token."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    config = LlamaConfig(
        vocab_size=NUM_TEACHER_ROWS,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    # Large random values, so that rows without a token are often the likeliest.
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def plain_distribution(folder: Path, batch: BatchedDataDict, temperature: float) -> torch.Tensor:
    """Returns `[B, T-1, V]` logprobs of separate sequences; 0 where the mask is not set."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return distribution(model, batch, temperature)


def distribution(model, batch, temperature=1.0):
    mask, rows = batch["token_mask"], []
    for row, length in enumerate(batch["input_lengths"].tolist()):
        logits = model(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0, :-1]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        rows.append(torch.nn.functional.pad(logprobs, (0, 0, 0, mask.shape[1] + 1 - length)))
    return torch.where(mask[..., None], torch.stack(rows), torch.zeros(()))


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "temperature"), [(11, 1.0), (1000, 0.5)])
def test_teachers_likeliest_tokens(
    tiny_model: Path, teacher: Path, max_tokens: int, temperature: float
) -> None:
    batch = make_batch()
    backend = make_backend(
        tiny_model, teacher, max_tokens_per_microbatch=max_tokens, temperature=temperature
    )
    ids, logprobs = backend.get_reference_topk_logprobs(batch, K)
    with torch.no_grad():
        full = plain_distribution(teacher, batch, temperature)
    mask = batch["token_mask"]
    # Normalized over all 32 rows, chosen among the 19 that have tokens.
    assert (full.argmax(-1)[mask] >= NUM_TOKENS).any()
    expected = full[..., :NUM_TOKENS].topk(K, dim=-1)
    assert ids.shape == logprobs.shape == (*mask.shape, K)
    assert torch.equal(ids[mask], expected.indices[mask])
    torch.testing.assert_close(logprobs[mask], expected.values[mask], rtol=1e-4, atol=1e-5)
    assert (ids[~mask] == 0).all()
    assert (logprobs[~mask] == 0).all()


def test_different_vocabulary_is_refused(tiny_model: Path, teacher: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match="a different vocabulary") as caught:
        make_backend(tiny_model, other).get_reference_topk_logprobs(make_batch(), K)
    assert "19 tokens" in str(caught.value.expected)
    assert "20 tokens; 1 differ, such as ['<tool>']" in str(caught.value.got)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, NUM_TOKENS + 1])
def test_k_is_limited_by_the_vocabulary(tiny_model: Path, teacher: Path, k: int) -> None:
    backend = make_backend(tiny_model, teacher)
    with pytest.raises(ConfigError, match="cannot be chosen") as caught:
        backend.get_reference_topk_logprobs(make_batch(), k)
    assert "1 to the vocabulary's 19 tokens" in str(caught.value.expected)
    assert backend.get_reference_topk_logprobs(make_batch(), NUM_TOKENS)[0].shape[-1] == NUM_TOKENS


def forward_kl(logprobs, batch, *, global_valid_seqs, global_valid_tokens):
    """A user-defined loss: `sum p_T (log p_T - log p_S)` over the teacher's tokens."""
    teacher, student = batch["topk_logprobs"], batch["current_topk_logprobs"]
    each = (teacher.exp() * (teacher - student)).sum(-1)
    loss = torch.where(batch["token_mask"], each, 0.0).sum() / global_valid_tokens
    return loss, {"loss": loss.detach()}


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [11, 24, 1000])
def test_three_steps_of_distillation_match_the_plain_loop(
    tiny_model: Path, teacher: Path, max_tokens: int
) -> None:
    batch = make_batch()
    backend = make_backend(tiny_model, teacher, max_tokens_per_microbatch=max_tokens)
    ids, targets = backend.get_reference_topk_logprobs(batch, K)
    mask = batch["token_mask"]
    # Ids outside of the mask are not read, not even as an index.
    batch["topk_ids"] = torch.where(mask[..., None], ids, 10**6)
    batch["topk_logprobs"] = targets
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    for _ in range(3):
        optimizer.zero_grad()
        student = distribution(model, batch).gather(-1, ids)
        each = (targets.exp() * (targets - student)).sum(-1)
        loss = each[mask].sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        metrics = backend.train_step(batch, forward_kl)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    expected = dict(model.named_parameters())
    for name, weight in backend.named_weights():
        torch.testing.assert_close(weight.cpu(), expected[name].detach(), rtol=1e-4, atol=1e-5)


def test_microbatch_without_trained_tokens_adds_nothing(tiny_model: Path, teacher: Path) -> None:
    batch = make_batch()
    batch["token_mask"][0] = False  # 11 tokens, a separate micro-batch
    backend = make_backend(tiny_model, teacher, max_tokens_per_microbatch=11)
    ids, logprobs = backend.get_reference_topk_logprobs(batch, K)
    assert (ids[0] == 0).all()
    assert (logprobs[0] == 0).all()
    batch["topk_ids"], batch["topk_logprobs"] = ids, logprobs
    separate = make_backend(tiny_model).train_step(
        batch.select_indices(range(1, len(LENGTHS))), forward_kl
    )
    together = backend.train_step(batch, forward_kl)
    assert together["loss"] == pytest.approx(separate["loss"], rel=1e-5)
    assert together["grad_norm"] == pytest.approx(separate["grad_norm"], rel=1e-4)


def test_loss_gets_both_columns_of_the_same_weights(tiny_model: Path) -> None:
    batch = make_batch()
    # The first of the K tokens is the next one, so its column must repeat the logprobs.
    batch["topk_ids"] = torch.stack([batch["input_ids"][:, 1:], batch["input_ids"][:, :-1]], -1)
    seen = []

    def watching(logprobs, batch, *, global_valid_seqs, global_valid_tokens):
        current = batch["current_topk_logprobs"]
        assert current.requires_grad
        assert current.shape == (*batch["token_mask"].shape, 2)
        assert torch.equal(current[..., 0], logprobs)
        assert (current[~batch["token_mask"]] == 0).all()
        seen.append(len(current))
        return logprobs.sum(), {}

    make_backend(tiny_model).train_step(batch, watching)
    assert sum(seen) == len(LENGTHS)
    assert "current_topk_logprobs" not in batch


def test_logprobs_are_bitwise_identical_with_and_without_the_column(tiny_model: Path) -> None:
    def collected(batch: BatchedDataDict) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def watching(logprobs, batch, *, global_valid_seqs, global_valid_tokens):
            seen.append(logprobs.detach())
            return logprobs.sum(), {}

        make_backend(tiny_model).train_step(batch, watching)
        return seen

    with_column = make_batch()
    with_column["topk_ids"] = with_column["input_ids"][:, 1:, None]
    for one, other in zip(collected(make_batch()), collected(with_column), strict=True):
        assert torch.equal(one, other)
