"""Greedy answers of an exported model to single prompts.

Each prompt is completed alone and greedily, as in evaluation. Earlier turns are not part of the
context, since the model is trained on single turns.
"""

from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.weights import load_pretrained
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.errors import ModelError


class Chat:
    """A model and its tokenizer, loaded once.

    Args:
        model_folder: Config, weights and tokenizer in the transformers layout.
        max_new_tokens: Most tokens of an answer.

    Raises:
        ModelError: If the folder is missing or holds no model that transformers can load.

    Example:
        >>> Chat(Path("model")).answer("12+34=")                              # doctest: +SKIP
        '46'
    """

    def __init__(self, model_folder: Path, *, max_new_tokens: int = 256) -> None:
        if not (model_folder / "config.json").is_file():
            raise ModelError(
                f"there is no model in {str(model_folder)!r}",
                expected="a folder with config.json, *.safetensors and a tokenizer",
                got="a folder without config.json" if model_folder.is_dir() else "no such folder",
                fix="use the folder that the run printed after `model:`",
            )
        self._tokenizer = load_tokenizer(model_folder)
        self._stop = stop_token_ids(model_folder, self._tokenizer)
        self._model = _load_model(model_folder)
        self._max_new_tokens = max_new_tokens

    def answer(self, prompt: str) -> str:
        """Returns the greedy completion of a prompt.

        Raises:
            ModelError: If the prompt holds no tokens, or fills the model's context.
        """
        import torch

        ids = prompt_token_ids(self._tokenizer, prompt)
        if not ids:
            raise ModelError(
                f"the prompt {prompt[:80]!r} holds no tokens",
                fix="enter a prompt with text",
            )
        context = getattr(self._model.config, "max_position_embeddings", None)
        room = self._max_new_tokens if context is None else context - len(ids)
        if room < 1:
            raise ModelError(
                "the prompt leaves no tokens for an answer",
                expected=f"fewer than {context} tokens",
                got=f"{len(ids)} tokens",
                fix="shorten the prompt",
            )
        tokens = torch.tensor([ids])  # [1, T]
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=min(room, self._max_new_tokens),
            eos_token_id=list(self._stop),
            pad_token_id=self._stop[0],
        )
        text: str = self._tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        return text


def _load_model(model_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, _ = load_pretrained(AutoModelForCausalLM, model_folder, called=f"{str(model_folder)!r}")
    # Sampling settings of the model would cause warnings in greedy decoding.
    model.generation_config = GenerationConfig()
    return model.eval()
