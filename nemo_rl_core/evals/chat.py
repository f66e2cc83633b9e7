"""Ask an exported model: `python -m nemo_rl_core.evals.chat MODEL_FOLDER [PROMPT]`.

Each prompt is answered on its own, greedily, the way evaluation asks; earlier turns are not shown
to the model, since it is trained on single turns.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.errors import DataError, ModelError, NemoRLError
from nemo_rl_core.infra.weights import load_pretrained


class Chat:
    """A model and its tokenizer, loaded once.

    Args:
        model_folder: Config, weights and tokenizer in the transformers layout.
        max_new_tokens: Where an answer is cut, if the model does not end it.

    Raises:
        ModelError: If the folder is not there or holds no model that transformers can load.

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
        """The model's most likely answer, token by token.

        Raises:
            ModelError: If the prompt holds no tokens, or fills the model's context.
        """
        import torch

        ids = prompt_token_ids(self._tokenizer, prompt)
        if not ids:
            raise ModelError(
                f"the prompt {prompt[:80]!r} holds no tokens",
                fix="ask something",
            )
        context = getattr(self._model.config, "max_position_embeddings", None)
        room = self._max_new_tokens if context is None else context - len(ids)
        if room < 1:
            raise ModelError(
                "the prompt leaves no room for an answer",
                expected=f"fewer than {context} tokens",
                got=f"{len(ids)} tokens",
                fix="ask something shorter",
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
    # A model may ship sampling settings, which greedy decoding has no use for and warns about.
    model.generation_config = GenerationConfig()
    return model.eval()


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers one prompt, or each line of the standard input.

    Returns:
        The exit code: 0, or 1 after an error that has been explained.
    """
    parser = argparse.ArgumentParser(
        prog="python -m nemo_rl_core.evals.chat",
        description="Ask an exported model; without PROMPT, one question a line until end of file.",
    )
    parser.add_argument("model_folder", type=Path)
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    given = parser.parse_args(arguments)
    if given.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1, not {given.max_new_tokens}")
    try:
        chat = Chat(given.model_folder, max_new_tokens=given.max_new_tokens)
        if given.prompt is not None:
            _say(chat.answer(given.prompt) + "\n")
        else:
            _converse(chat)
    except NemoRLError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        _say("\n")
    return 0


def _converse(chat: Chat) -> None:
    asks = "> " if sys.stdin.isatty() else ""
    _say(asks)
    for line in sys.stdin:
        if line.strip():
            _say(_reply(chat, line.strip()) + "\n")
        _say(asks)


def _reply(chat: Chat, prompt: str) -> str:
    try:
        return chat.answer(prompt)
    # One question that is too long, or cannot be written, does not end the conversation.
    except (ModelError, DataError) as error:
        return str(error)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
