"""Reward models and critics: values of every prefix, compared with transformers' classifier."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.backends.training.dtensor.model import ScoreModel
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConfigError, DataError, ModelError
from nemo_rl_core.model_files.loading import scoring_pad_token_id

EPSILON = 1e-3  # see test_dtensor.py: a gradient of rounding must not move a weight
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, adam_epsilon=EPSILON)
LENGTHS = [11, 4, 7, 2, 9, 3, 3, 8]
PAIRS = [5, 7, 7, 5, 2, 9, 2, 9]
CHOSEN = [True, True, False, False, True, True, False, False]
EOS = 2  # the arithmetic tokenizer's


def make_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(1)
    sequences = [
        [*torch.randint(4, 19, (length - 1,), generator=generator).tolist(), EOS]
        for length in LENGTHS
    ]
    batch = collate(sequences, [[True] * length for length in LENGTHS])
    batch["pair_ids"] = torch.tensor(PAIRS)
    batch["is_chosen"] = torch.tensor(CHOSEN)
    return batch


def make_backend(
    folder: Path, *, max_tokens: int = 24, head: str = "scalar", dtype: str = "float32"
) -> DTensorBackend:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OPTIMIZER,
            max_tokens_per_microbatch=max_tokens,
            head=head,
            dtype=dtype,
        )
    )
    return backend


def load_scorer(folder: Path) -> torch.nn.Module:
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    ).eval()


def margins(last_scores: torch.Tensor, batch: BatchedDataDict) -> torch.Tensor:
    """Returns `[P]` chosen minus rejected scores, with the pairs in order of their ids."""
    order = sorted(
        range(len(last_scores)),
        key=lambda row: (int(batch["pair_ids"][row]), not bool(batch["is_chosen"][row])),
    )
    pairs = last_scores[order].view(-1, 2)
    return pairs[:, 0] - pairs[:, 1]


def bradley_terry(values, batch, *, global_valid_seqs, global_valid_tokens):
    """A user-defined loss over pairs, as a plain function."""
    last = batch["input_lengths"][:, None] - 1
    scores = values.gather(1, last)[:, 0]
    losses = -torch.nn.functional.logsigmoid(margins(scores, batch))
    loss = losses.sum() / (global_valid_seqs / 2)
    return loss, {"loss": loss.detach()}


def plain_scores(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    """Computes `[B]` scores of each sequence separately, with the classifier's forward pass."""
    return torch.stack(
        [
            model(input_ids=batch["input_ids"][row : row + 1, :length]).logits[0, 0]
            for row, length in enumerate(batch["input_lengths"].tolist())
        ]
    )


@pytest.fixture(scope="module")
def reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a classifier whose head is not zero."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(3)
    model = load_scorer(tiny_model)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("max_tokens", [22, 30, 1000])
def test_packed_values_equal_the_classifiers_scores(reward_model: Path, max_tokens: int) -> None:
    batch = make_batch()
    values = make_backend(reward_model, max_tokens=max_tokens).get_values(batch)
    last = batch["input_lengths"][:, None] - 1
    expected = plain_scores(load_scorer(reward_model), batch).detach()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.gather(1, last)[:, 0], expected, rtol=1e-5, atol=1e-5)
    past = torch.arange(values.shape[1]) > last
    assert past.any()
    assert (values[past] == 0).all()


def values_of_a_rank(folder: Path) -> list[list[float]]:
    values: list[list[float]] = make_backend(folder).get_values(make_batch()).tolist()
    return values


@pytest.mark.slow
def test_two_ranks_keep_the_head_that_they_loaded(reward_model: Path) -> None:
    expected = make_backend(reward_model).get_values(make_batch())
    for values in run_ranks(values_of_a_rank, reward_model, world_size=2, timeout_seconds=300.0):
        torch.testing.assert_close(torch.tensor(values), expected, rtol=1e-5, atol=1e-5)


def test_value_is_the_score_of_the_prefix_that_ends_there(reward_model: Path) -> None:
    batch = make_batch()
    values = make_backend(reward_model).get_values(batch)
    model = load_scorer(reward_model)
    for end in range(1, LENGTHS[2] + 1):
        score = model(input_ids=batch["input_ids"][2:3, :end]).logits[0, 0]
        assert values[2, end - 1].item() == pytest.approx(score.item(), abs=1e-5)


def test_in_bfloat16_the_head_stays_in_float32(reward_model: Path) -> None:
    batch = make_batch()
    exact = make_backend(reward_model).get_values(batch)
    backend = make_backend(reward_model, dtype="bfloat16")
    values = backend.get_values(batch)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
    torch.testing.assert_close(values, exact, rtol=0.05, atol=0.1)
    assert backend.train_step(batch, bradley_terry)["grad_norm"] > 0


def test_changed_sequence_does_not_change_its_neighbors_values(
    reward_model: Path,
) -> None:
    batch, changed = make_batch(), make_batch()
    changed["input_ids"][1, :3] = 4 + (changed["input_ids"][1, :3] - 4 + 5) % 15
    backend = make_backend(reward_model, max_tokens=1000)
    before, after = backend.get_values(batch), backend.get_values(changed)
    others = [row for row in range(len(LENGTHS)) if row != 1]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[1], after[1])


def test_first_loss_of_a_new_head_is_ln_2(tiny_model: Path) -> None:
    backend = make_backend(tiny_model)
    assert (backend.get_values(make_batch()) == 0).all()
    metrics = backend.train_step(make_batch(), bradley_terry)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert metrics["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [22, 30, 1000])
def test_four_steps_follow_the_plain_loop(tiny_model: Path, max_tokens: int) -> None:
    batch = make_batch()
    backend = make_backend(tiny_model, max_tokens=max_tokens)
    model = load_scorer(tiny_model)
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    for _ in range(4):
        optimizer.zero_grad()
        loss = -torch.nn.functional.logsigmoid(margins(plain_scores(model, batch), batch)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        metrics = backend.train_step(batch, bradley_terry)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["loss"] < 0.9 * math.log(2)
    expected = dict(model.named_parameters())
    for name, weight in backend.named_weights():
        torch.testing.assert_close(weight.cpu(), expected[name].detach(), rtol=1e-4, atol=1e-5)


def test_rows_of_a_pair_reach_the_loss_together(reward_model: Path) -> None:
    seen: list[list[int]] = []

    def watching(values, batch, **counts):
        seen.append(sorted(batch["pair_ids"].tolist()))
        return bradley_terry(values, batch, **counts)

    # Pair 5 needs two rows of 11 (11 and 2 tokens), 22 tokens, which leave no room for another row.
    make_backend(reward_model, max_tokens=22).train_step(make_batch(), watching)
    assert len(seen) > 1
    assert all(ids[0::2] == ids[1::2] for ids in seen)
    assert sorted(pair for ids in seen for pair in ids) == sorted(PAIRS)


def test_pair_over_the_budget_is_refused(reward_model: Path) -> None:
    with pytest.raises(DataError, match="2 sequences that belong together") as caught:
        make_backend(reward_model, max_tokens=21).train_step(make_batch(), bradley_terry)
    assert "at least 22" in str(caught.value.fix)


def test_checkpoint_has_the_same_scores_in_transformers(tiny_model: Path, tmp_path: Path) -> None:
    batch = make_batch()
    backend = make_backend(tiny_model)
    for _ in range(2):
        backend.train_step(batch, bradley_terry)
    backend.save_checkpoint(tmp_path)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values())
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == 0
    values = backend.get_values(batch).gather(1, batch["input_lengths"][:, None] - 1)[:, 0]
    assert values.abs().min() > 0
    torch.testing.assert_close(plain_scores(model, batch).detach(), values, rtol=1e-5, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.pad_token_id == model.config.pad_token_id
    # Padded, as a user would score a batch; the model skips the padding by itself.
    attended = (torch.arange(11) < batch["input_lengths"][:, None]).long()
    with torch.no_grad():
        padded = model(input_ids=batch["input_ids"], attention_mask=attended).logits[:, 0]
    torch.testing.assert_close(padded, values, rtol=1e-5, atol=1e-6)


def test_saved_head_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    first = make_backend(tiny_model)
    first.train_step(make_batch(), bradley_terry)
    first.save_checkpoint(tmp_path)
    again = make_backend(tmp_path / "model")
    assert torch.equal(again.get_values(make_batch()), first.get_values(make_batch()))


def test_resumed_training_is_bitwise_identical(tiny_model: Path, tmp_path: Path) -> None:
    straight, first, second = (make_backend(tiny_model) for _ in range(3))
    for _ in range(4):
        straight.train_step(make_batch(), bradley_terry)
    for _ in range(2):
        first.train_step(make_batch(), bradley_terry)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    for _ in range(2):
        second.train_step(make_batch(), bradley_terry)
    for (name, one), (_, other) in zip(
        straight.named_weights(), second.named_weights(), strict=True
    ):
        assert torch.equal(one, other), name


def test_padding_token_is_not_the_end_of_sequence_token(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": EOS}))
    assert scoring_pad_token_id(folder) == tokenizer.unk_token_id

    backend = make_backend(folder)
    backend.train_step(make_batch(), bradley_terry)
    (tmp_path / "saved").mkdir()
    backend.save_checkpoint(tmp_path / "saved")
    saved = tmp_path / "saved" / "model"
    assert AutoTokenizer.from_pretrained(saved).pad_token_id == tokenizer.unk_token_id
    batch = make_batch()  # every sequence ends with EOS, where the score is read
    scores = plain_scores(load_scorer(saved), batch).detach()
    values = backend.get_values(batch).gather(1, batch["input_lengths"][:, None] - 1)[:, 0]
    torch.testing.assert_close(scores, values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head", ["zero", "own"])
def test_model_that_changes_its_scores_is_refused(
    tiny_model: Path, reward_model: Path, head: str
) -> None:
    model = load_scorer(reward_model)
    if head == "zero":  # it agrees with any change
        torch.nn.init.zeros_(model.score.weight)
    before = model.score.weight.detach().clone()

    def double(module: object, args: object, output: object) -> object:
        output.logits = output.logits * 2
        return output

    handle = model.register_forward_hook(double)
    with pytest.raises(ModelError, match="different outputs for sequences padded on the right"):
        ScoreModel(model, dtype="float32").choose_layout()
    assert torch.equal(model.score.weight, before)
    handle.remove()
    ScoreModel(model, dtype="float32").choose_layout()
    assert torch.equal(model.score.weight, before)


def test_classifier_with_two_labels_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder)
    with pytest.raises(ModelError, match="a classifier with several labels"):
        make_backend(folder)


def test_model_without_a_plain_scalar_head_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(vocab_size=19, intermediate_size=8, num_labels=1, is_decoder=True, **size)
    BertForSequenceClassification(config).save_pretrained(folder)
    with pytest.raises(ModelError, match="no class with a scalar head"):
        make_backend(folder)


def test_folder_without_a_language_model_head_is_refused_as_a_policy(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    causal = AutoModelForCausalLM.from_pretrained(tiny_model, tie_word_embeddings=False)
    causal.save_pretrained(folder)
    make_backend(folder)
    scorer = load_scorer(folder)
    scorer.save_pretrained(folder)
    with pytest.raises(ModelError, match="lacks weights") as caught:
        make_backend(folder, head="lm")
    assert "lm_head.weight" in str(caught.value.got)


def test_each_head_only_supports_its_outputs(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="has no values"):
        make_backend(tiny_model, head="lm").get_values(make_batch())
    with pytest.raises(ConfigError, match="has no logprobs"):
        make_backend(tiny_model).get_logprobs(make_batch())
