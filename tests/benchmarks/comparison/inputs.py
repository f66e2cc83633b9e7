"""The model and the rows that all sides use."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_core.algorithms.dpo.config import DPOSettings
from nemo_rl_core.config.model import ModelFromConfig, TextModelFromConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer

NUM_THREADS = 2
LEARNING_RATE = 1e-4
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.0}
"""AdamW with the project's defaults."""

VOCAB_SIZE = 8_960
TEXT = TextModelFromConfig(kind="text_from_config", max_position_embeddings=1024)
"""The byte-level Qwen2 of the recipes.

Its head and embedding get `VOCAB_SIZE` rows, of which the tokenizer uses the first: 1.6 M weights.
A head over bytes only would cost almost nothing, unlike in real models.
"""

SUMS = ModelFromConfig()
"""The model of the default recipe."""


def model_folder(
    scratch: Path,
    config: TextModelFromConfig | ModelFromConfig = TEXT,
    *,
    vocab_size: int | None = None,
) -> Path:
    """Creates a model folder in the transformers layout, the same for all sides.

    Args:
        scratch: Folder to create it in.
        config: Config of the model.
        vocab_size: Rows of its head; the tokenizer's size by default, `VOCAB_SIZE` for `TEXT`.
    """
    rows = VOCAB_SIZE if config is TEXT else vocab_size
    folder = scratch / f"{config.kind}-{config.num_layers}-{config.hidden_size}-{rows}"
    if not folder.exists():
        materialize(config, folder, seed=0)
        if rows is not None:
            _widen(folder, rows)
    return folder


def _widen(folder: Path, vocab_size: int) -> None:
    config = AutoConfig.from_pretrained(folder, vocab_size=vocab_size)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def text(generator: random.Random, length: int) -> str:
    """Returns lowercase letters and spaces, with a letter at both ends."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    inner = (generator.choice(letters + "  ") for _ in range(length - 2))
    return generator.choice(letters) + "".join(inner) + generator.choice(letters)


def pairs(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Returns prompts of 120 characters with two answers of 10 to 60."""
    generator = random.Random(seed)
    return [
        {
            "prompt": text(generator, 120),
            "chosen": text(generator, generator.randint(10, 60)),
            "rejected": text(generator, generator.randint(10, 60)),
        }
        for _ in range(count)
    ]


def examples(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Returns prompts of 20 to 60 characters with completions of 20 to 180."""
    generator = random.Random(seed)
    return [
        {
            "prompt": text(generator, generator.randint(20, 60)),
            "completion": text(generator, generator.randint(20, 180)),
        }
        for _ in range(count)
    ]


def prompts(count: int, length: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Returns prompts of one length."""
    generator = random.Random(seed)
    return [{"prompt": text(generator, length), "answer": "a"} for _ in range(count)]


def saved(rows: Sequence[dict[str, Any]], model: Path, folder: Path) -> Path:
    """Saves the rows as a data set folder that a trainer's run reads."""
    # A data set also needs held-out rows, which no side reads here.
    validation_row = {name: value[::-1] for name, value in rows[0].items()}
    data = DataModule.of(list(rows), validation=[validation_row], tokenizer=load_tokenizer(model))
    folder.mkdir(parents=True, exist_ok=True)
    save_frame(data.train, folder)
    return folder


def reference_settings() -> DPOSettings:
    """Returns the settings of the pass that computes the reference's logprobs."""
    return DPOSettings.model_validate({"cluster": {"num_threads": NUM_THREADS}})
