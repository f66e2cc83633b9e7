"""`nemo-rl chat`: chat with an exported model."""

import sys
from collections.abc import Callable
from pathlib import Path

import click

from nemo_rl_core.errors import DataError, ModelError


@click.command()
@click.argument("model_folder", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True,
              help="Most tokens of an answer.")  # fmt: skip
def chat(model_folder: Path, prompt: str | None, max_new_tokens: int) -> None:
    """Chat with an exported model; without PROMPT, reads one prompt per line until end of file.

    Each prompt is completed alone and greedily, without earlier turns.
    """
    from nemo_rl_core.evals.chat import Chat

    try:
        model = Chat(model_folder, max_new_tokens=max_new_tokens)
        if prompt is not None:
            _write(model.answer(prompt) + "\n")
        else:
            _converse(model.answer)
    except KeyboardInterrupt:  # a normal end of a conversation
        _write("\n")


def _converse(answer: Callable[[str], str]) -> None:
    asks = "> " if sys.stdin.isatty() else ""
    _write(asks)
    for line in sys.stdin:
        if line.strip():
            _write(_reply(answer, line.strip()) + "\n")
        _write(asks)


def _reply(answer: Callable[[str], str], prompt: str) -> str:
    try:
        return answer(prompt)
    # A prompt that is too long or cannot be encoded does not end the conversation.
    except (ModelError, DataError) as error:
        return str(error)


def _write(text: str) -> None:
    click.echo(text, nl=False, color=True)  # unchanged, in a pipe too
