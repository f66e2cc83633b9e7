"""Rows that are longer than the model's context."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms.dpo.trainer import DPOTrainer
from nemo_rl_core.algorithms.reward_model.trainer import RewardModelTrainer
from nemo_rl_core.algorithms.sft.trainer import SFTTrainer
from nemo_rl_core.config.row_policy import RowPolicy
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.schemas import checked_rows
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import DataError
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.types import Row

# <bos> 1 + 1 = 2 <eos> are 7 tokens; with 1+1+1+1= they are 11.
SHORT, LONG = "1+1=", "1+1+1+1="


def rows_of(kind: str) -> list[Row]:
    """Returns four rows, of which the second and the last are long."""
    prompts = [SHORT, LONG, "1+2=", "2+1+1+1="]
    match kind:
        case "prompts":
            return [{"prompt": prompt, "completion": "2"} for prompt in prompts]
        case "conversations":
            return [
                {"messages": [{"role": "user", "content": prompt},
                              {"role": "assistant", "content": "2"}]}
                for prompt in prompts
            ]  # fmt: skip
        case "text":
            return [{"text": f"{prompt}2"} for prompt in prompts]
    return [{"prompt": prompt, "chosen": "2", "rejected": "3"} for prompt in prompts]


@pytest.fixture
def short_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A model with a context of 8 tokens."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    return folder


@pytest.mark.parametrize(
    ("trainer", "section", "kind"),
    [
        (SFTTrainer, {"sft": {"global_batch_size": 2}}, "prompts"),
        (SFTTrainer, {"sft": {"global_batch_size": 2}}, "conversations"),
        (SFTTrainer, {"sft": {"global_batch_size": 2}}, "text"),
        (DPOTrainer, {"dpo": {"num_pairs_per_step": 2}}, "preferences"),
        (RewardModelTrainer, {"reward_model": {"num_pairs_per_step": 2}}, "preferences"),
    ],
)
def test_a_trainer_counts_and_names_longer_rows(
    trainer: Any, section: Row, kind: str, short_model: Path, tmp_path: Path
) -> None:
    data = DataModule.of(rows_of(kind), validation=rows_other(kind))
    save_frame(data.train, tmp_path / "train")
    spec = RunSpec(train=tmp_path / "train", start=short_model, work=tmp_path / "work")
    with pytest.raises(DataError, match="2 rows of the train data set are longer") as caught:
        trainer(section)._load(spec)
    assert caught.value.expected == "at most 8 tokens in a row"
    assert caught.value.got is not None
    assert caught.value.got.startswith("rows 1, 3, counted from 0, with up to 11 tokens")


def rows_other(kind: str) -> list[Row]:
    """Returns rows of a kind that are not in any other set."""
    text = json.dumps(rows_of(kind)[:1]).replace(SHORT, "3+3=")
    return list(json.loads(text))


@pytest.mark.parametrize("kind", ["prompts", "conversations", "text", "preferences"])
def test_rows_are_refused_dropped_or_cut_when_they_are_prepared(kind: str) -> None:
    rows = DataModule.of(rows_of(kind), validation=rows_other(kind)).train.to_dict("records")

    def checked(overlong: str, context_length: int | None = 8, **limits: int) -> Any:
        return checked_rows(
            rows,
            tokenizer=build_arithmetic_tokenizer(),
            max_prompt_tokens=None,
            name="train",
            policy=RowPolicy(overlong=overlong, **limits),
            context_length=context_length,
        )

    with pytest.raises(DataError) as caught:
        checked("refuse")
    assert "row has more than 8 tokens (the model's context): rows 1, 3" in str(caught.value)
    assert "data.overlong: truncate or drop allows longer rows" in str(caught.value.fix)
    assert len(checked("drop")) == 2
    assert len(checked("refuse", None)) == 4
    assert len(checked("refuse", 11)) == 4
    # The message names the stricter of both limits.
    with pytest.raises(DataError, match=r"more than 9 tokens \(max_sequence_tokens\)"):
        checked("refuse", 10, max_sequence_tokens=9)


def test_text_is_cut_at_the_context() -> None:
    rows = DataModule.of(rows_of("text"), validation=rows_other("text")).train.to_dict("records")
    table = checked_rows(
        rows,
        tokenizer=build_arithmetic_tokenizer(),
        max_prompt_tokens=None,
        name="train",
        policy=RowPolicy(overlong="truncate"),
        context_length=8,
    )
    assert table.column("max_tokens").to_pylist() == [8] * 4
