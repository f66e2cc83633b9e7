"""Scores of a reward model, compared with those of transformers on single, unpadded sequences."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config

from nemo_rl_core.backends.training.dtensor.model import ScoreModel
from nemo_rl_core.config.environment import WeightedSum
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.packing.plan import Microbatch
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import score_rollouts
from nemo_rl_core.environments.rewards.reward_model import RewardModelScorer, batches_by_length
from nemo_rl_core.errors import ConfigError, ModelError, RewardError
from nemo_rl_core.model_files.loading import load_scalar_model
from nemo_rl_core.types import Completion, Prompt, Rollout
from tests.simulated_cuda import simulated_cuda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # as the scorer chooses
EOS = 2  # in the arithmetic tokenizer
SEQUENCES = [([5, 9, 11], [7, EOS]), ([4], [6, 8, 10, 12, 14, EOS]), ([4, 5], [EOS]), ([9], [9])]


def make_rollout(prompt: list[int], completion: list[int]) -> Rollout:
    row = Prompt("0", "?", tuple(prompt), "?", "arithmetic")
    sampled = Completion(tuple(completion), (0.0,) * len(completion), truncated=False)
    return Rollout(row, sampled, "!")


ROLLOUTS = [make_rollout(*sequence) for sequence in SEQUENCES]


@pytest.fixture(scope="module")
def reward_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classifier of one label with random weights, which pads with the end-of-sequence token."""
    folder = tmp_path_factory.mktemp("reward") / "model"
    config = Qwen2Config.from_pretrained(tiny_model, num_labels=1, pad_token_id=EOS)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def edited(folder: Path, to: Path, **changes: object) -> Path:
    shutil.copytree(folder, to)
    path = to / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return to


@torch.no_grad()
def scores_one_by_one(folder: Path) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.to(DEVICE)
    model.config.pad_token_id = None  # otherwise the last token would count as padding
    return [
        model(input_ids=torch.tensor([prompt + completion], device=DEVICE)).logits.item()
        for prompt, completion in SEQUENCES
    ]


@pytest.mark.parametrize("max_tokens", [1, 8, 8192])
def test_scores_equal_those_of_transformers_in_order(tiny_model, reward_model, max_tokens):
    config = RewardModelScore(model=str(reward_model), max_tokens_per_batch=max_tokens)
    scorer = make_scorer(config, policy=tiny_model)
    expected = scores_one_by_one(reward_model)
    assert scorer.score(ROLLOUTS) == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 3) for value in expected}) == len(expected)
    assert scorer.score(ROLLOUTS) == scorer.score(ROLLOUTS)
    assert scorer.score([]) == []


def test_a_reward_model_folder_replaces_a_missing_name(tiny_model, reward_model):
    from_folder = make_scorer(RewardModelScore(), reward_model, policy=tiny_model)
    named = make_scorer(RewardModelScore(model=str(reward_model)), policy=tiny_model)
    assert from_folder.score(ROLLOUTS) == named.score(ROLLOUTS)


def test_a_name_in_the_config_comes_first(tiny_model, reward_model, tmp_path):
    config = RewardModelScore(model=str(reward_model))
    scorer = make_scorer(config, tmp_path / "another", policy=tiny_model)
    assert len(scorer.score(ROLLOUTS)) == len(ROLLOUTS)


def test_it_is_one_of_several_rewards(tiny_model, reward_model):
    parts = [
        {"weight": 0.5, "environment": {"kind": "reward_model"}},
        {"environment": {"kind": "exact"}},
    ]
    scorer = make_scorer(
        WeightedSum.model_validate({"parts": parts}), reward_model, policy=tiny_model
    )
    value = make_scorer(RewardModelScore(), reward_model, policy=tiny_model).score(ROLLOUTS[:1])[0]
    (scored,) = score_rollouts(scorer, ROLLOUTS[:1])
    assert scored.components == (value, 0.0)
    assert scored.reward == 0.5 * value


@torch.no_grad()
def test_a_saved_model_scores_as_in_training(tiny_model, tmp_path):
    folder = tmp_path / "trained"
    trained = ScoreModel(load_scalar_model(tiny_model), dtype="float32")
    torch.nn.init.normal_(trained.model.score.weight)
    weights = trained.model.state_dict().items()
    trained.save(folder, tiny_model, AutoTokenizer.from_pretrained(tiny_model), weights)
    sequences = [prompt + completion for prompt, completion in SEQUENCES]
    batch = collate(sequences, [[True] * len(ids) for ids in sequences])
    plan = Microbatch(rows=((0, 1), (2, 3)), row_length=12)
    batch, packed = trained.packed(batch, plan).moved_with(batch, torch.device(DEVICE))
    values = trained.values(batch, packed)[range(4), [len(ids) - 1 for ids in sequences]]
    scores = make_scorer(RewardModelScore(), folder, policy=tiny_model).score(ROLLOUTS)
    assert scores == pytest.approx(values.tolist(), abs=1e-4)


def test_a_missing_model_or_policy_is_refused(tiny_model, reward_model):
    with pytest.raises(ConfigError, match=r"set environment\.model"):
        make_scorer(RewardModelScore(), policy=tiny_model)
    with pytest.raises(ConfigError, match="policy=FOLDER"):
        make_scorer(RewardModelScore(), reward_model)


def test_another_vocabulary_is_refused(tiny_model, reward_model, tmp_path):
    other = edited(reward_model, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match="the vocabulary of the reward model") as caught:
        RewardModelScorer(str(other), policy=tiny_model)
    assert "<new>" in str(caught.value)


def test_a_language_model_is_not_a_reward_model(tiny_model):
    with pytest.raises(ModelError, match="Qwen2ForCausalLM with 2 labels"):
        RewardModelScorer(str(tiny_model), policy=tiny_model)


def test_a_classifier_of_several_labels_is_not_a_reward_model(tiny_model, reward_model, tmp_path):
    labels = {str(index): f"LABEL_{index}" for index in range(3)}
    folder = edited(reward_model, tmp_path / "three", id2label=labels)
    with pytest.raises(ModelError, match="with 3 labels"):
        RewardModelScorer(str(folder), policy=tiny_model)


def test_a_model_without_head_weights_is_refused(tiny_model, tmp_path):
    one = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    folder = edited(tiny_model, tmp_path / "headless", **one)
    scorer = RewardModelScorer(str(folder), policy=tiny_model)
    with pytest.raises(ModelError, match=r"1 missing: score\.weight"):
        scorer.score(ROLLOUTS)


def test_an_empty_folder_is_refused(tiny_model, tmp_path):
    with pytest.raises(ModelError, match="cannot load"):
        RewardModelScorer(str(tmp_path), policy=tiny_model)


def test_a_sequence_beyond_the_context_fails_only_its_row(tiny_model, reward_model, tmp_path):
    short = edited(reward_model, tmp_path / "short", max_position_embeddings=5)
    scorer = RewardModelScorer(str(short), policy=tiny_model)
    first, too_long, *others = scorer.score(ROLLOUTS)
    assert isinstance(too_long, RewardError)
    assert "7 tokens; the context length of the model is 5" in str(too_long)
    expected = scores_one_by_one(reward_model)
    assert [first, *others] == pytest.approx([expected[0], *expected[2:]], abs=1e-4)


def with_head_of(value, reward_model, folder):
    shutil.copytree(reward_model, folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.score.weight.data.fill_(value)
    model.save_pretrained(folder)
    return str(folder)


def test_weights_that_are_not_finite_are_refused(tiny_model, reward_model, tmp_path):
    broken = with_head_of(torch.nan, reward_model, tmp_path / "broken")
    with pytest.raises(ModelError, match=r"not finite(.|\n)*score\.weight"):
        RewardModelScorer(broken, policy=tiny_model).score(ROLLOUTS)


def test_scores_that_are_not_finite_are_errors(tiny_model, reward_model, tmp_path):
    # The weights are finite, but their products with the hidden states exceed float32.
    largest = with_head_of(torch.finfo(torch.float32).max, reward_model, tmp_path / "largest")
    outcomes = RewardModelScorer(largest, policy=tiny_model).score(ROLLOUTS)
    assert all(isinstance(outcome, RewardError) for outcome in outcomes)


@torch.no_grad()
def test_a_bfloat16_body_keeps_its_dtype_with_a_float32_head(tiny_model, reward_model, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(reward_model, folder)
    half = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    half.save_pretrained(folder)
    # One sequence at a time, as in the comparison: padding would change the rounding of bfloat16.
    scorer = RewardModelScorer(str(folder), policy=tiny_model, max_tokens_per_batch=1)
    half.to(DEVICE)
    head = half.score.weight[0].float()
    expected = [
        half.model(input_ids=torch.tensor([prompt + completion], device=DEVICE))
        .last_hidden_state[0, -1]
        .float()
        @ head
        for prompt, completion in SEQUENCES
    ]
    assert scorer.score(ROLLOUTS) == pytest.approx([float(each) for each in expected], abs=1e-4)


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_batches_contain_every_sequence_once_within_the_budget(lengths, max_tokens):
    batches = list(batches_by_length(lengths, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= max_tokens or len(batch) == 1


def test_release_memory_moves_the_weights_to_the_host(
    tiny_model: Path, reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = RewardModelScore(model=str(reward_model))
    here = make_scorer(part, policy=tiny_model)
    expected = here.score(ROLLOUTS)
    here.release_memory()  # no-op on a CPU
    assert here.score(ROLLOUTS) == expected
    one = {"weight": 1.0, "environment": part}
    emptied: list[str] = []
    # Simulated tensors keep their class, so moved modules need new parameters.
    monkeypatch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
    for config in (part, WeightedSum(parts=[one])):
        scorer = make_scorer(config, policy=tiny_model)
        model_of = scorer if isinstance(scorer, RewardModelScorer) else scorer._scorers[0]
        with simulated_cuda(), monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cache"))
            scorer.release_memory()  # nothing is loaded yet
            for _ in range(2):
                assert scorer.score(ROLLOUTS) == expected
                assert {each.device.type for each in model_of._loaded.parameters()} == {"cuda"}
                scorer.release_memory()
                scorer.release_memory()
                assert {each.device.type for each in model_of._loaded.parameters()} == {"cpu"}
    assert emptied == ["cache"] * 4
