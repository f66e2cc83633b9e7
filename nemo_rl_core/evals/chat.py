"""Greedy answers of an exported model to single prompts and in conversations."""

import json
from pathlib import Path
from typing import Any

from nemo_rl_core.checkpoints.weights import load_pretrained
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.data.turns import Turn, as_turns
from nemo_rl_core.data.unknown import described_unknown, unknown_characters
from nemo_rl_core.errors import DataError, ModelError
from nemo_rl_core.planning.model_parts import longest_sequence, reset_rotary


class Chat:
    """A model and its tokenizer, loaded once from a folder in the transformers layout.

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

    @property
    def marks_turns(self) -> bool:
        """Whether the chat template separates turns.

        Without a template, or with one that writes only the user's text, a model was not trained to
        continue a conversation.
        """
        if not self._tokenizer.chat_template:
            return False
        turn = {"role": "user", "content": "?"}
        text: str = self._tokenizer.apply_chat_template(
            [turn], tokenize=False, add_generation_prompt=True
        )
        return text.removeprefix(self._tokenizer.bos_token or "") != turn["content"]

    def answer(self, prompt: str) -> str:
        """Returns the greedy completion of a text or of the JSON of a conversation."""
        import torch

        ids = prompt_token_ids(self._tokenizer, prompt)
        if not ids:
            raise ModelError(
                f"the prompt {prompt[:80]!r} contains no tokens", fix="enter a prompt with text"
            )
        self._refuse_unknown(as_turns(prompt, role="user"))
        context = longest_sequence(self._model.config)
        room = self._max_new_tokens if context is None else context - len(ids)
        if room < 1:
            raise ModelError(
                "the prompt leaves no tokens for an answer",
                expected=f"fewer than {context} tokens",
                got=f"{len(ids)} tokens",
                fix="shorten the prompt",
            )
        tokens = torch.tensor([ids])  # [1, T]
        reset_rotary(self._model)
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

    def _refuse_unknown(self, turns: list[Turn]) -> None:
        text = "".join(str(turn["content"]) for turn in turns if turn["role"] != "assistant")
        if unknown := unknown_characters(self._tokenizer, text):
            raise DataError(
                "the prompt has unknown characters",
                got=described_unknown(self._tokenizer, unknown),
                fix="write the prompt without them, or chat with a model that reads any text",
            )


class Conversation:
    """A conversation with a model, whose prompts contain earlier turns if `keeps_history`."""

    def __init__(self, chat: Chat, *, keeps_history: bool = True) -> None:
        self._chat, self._keeps_history = chat, keeps_history
        self._turns: list[Turn] = []

    def answer(self, text: str) -> str:
        """Returns the answer to the user's next turn.

        A turn that fails is not part of the conversation.
        """
        turns = [*self._turns, {"role": "user", "content": text}]
        if not self._keeps_history:
            return self._chat.answer(text)
        try:
            # A single turn is text, which also works for a model without a chat template.
            answer = self._chat.answer(json.dumps(turns) if self._turns else text)
        except ModelError as error:
            if not self._turns:
                raise
            raise ModelError(
                error.problem, error.expected, error.got, "shorten the prompt, or enter /reset"
            ) from error
        self._turns = [*turns, {"role": "assistant", "content": answer}]
        return answer

    def reset(self) -> None:
        """Forgets all turns."""
        self._turns = []


def _load_model(model_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, _ = load_pretrained(
        AutoModelForCausalLM, model_folder, source_name=f"{str(model_folder)!r}"
    )
    # Sampling settings of the model would cause warnings in greedy decoding.
    model.generation_config = GenerationConfig()
    return model.eval()
