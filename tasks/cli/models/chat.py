"""`nemo-rl chat`: a conversation with an exported model."""

import sys
from typing import TYPE_CHECKING

import click
import rich_click

from nemo_rl_core.errors import DataError, ModelError
from tasks.cli.records.names import complete_artifacts, model_folder

if TYPE_CHECKING:
    from nemo_rl_core.evals.chat import Conversation

_HELP = "/reset forgets the conversation, /quit ends it"
_NO_HISTORY_NOTE = (
    "This model's chat template does not mark turns, so each line is answered separately; "
    "--history keeps earlier ones."
)


@rich_click.command()
@click.argument("model", shell_complete=complete_artifacts)
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True,
              help="Maximum tokens per answer.")  # fmt: skip
@click.option("--history/--no-history", default=None,
              help="Whether earlier turns are part of a prompt; by default if the model's chat "
              "template marks turns.")  # fmt: skip
def chat(model: str, prompt: str | None, max_new_tokens: int, history: bool | None) -> None:
    """Chat with MODEL: a folder, or an artifact by its id or the beginning of its hash.

    Without PROMPT, each line is a turn of the user, until /quit or the end of the file; /reset
    begins a new conversation. Answers are greedy.
    """
    from nemo_rl_core.evals.chat import Chat, Conversation

    try:
        loaded = Chat(model_folder(model), max_new_tokens=max_new_tokens)
        if prompt is not None:
            _write(loaded.answer(prompt) + "\n")
            return
        keeps = loaded.marks_turns if history is None else history
        _converse(Conversation(loaded, keeps_history=keeps), separate=history is None and not keeps)
    except KeyboardInterrupt:  # a normal end of a conversation
        _write("\n")


def _converse(conversation: "Conversation", *, separate: bool) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        _write(f"{_HELP}. {_NO_HISTORY_NOTE if separate else ''}".rstrip() + "\n")
    input_prompt = "> " if is_terminal else ""
    _write(input_prompt)
    for line in sys.stdin:
        text = line.strip()
        if text == "/quit":
            return
        if text:
            _write(_reply(conversation, text))
        _write(input_prompt)
    if is_terminal:
        _write("\n")


def _reply(conversation: "Conversation", text: str) -> str:
    if text == "/reset":
        conversation.reset()
        return ""
    if text.startswith("/") and text[1:].isalpha():
        return f"there is no command {text}: {_HELP}\n"
    try:
        return conversation.answer(text) + "\n"
    # A prompt that is too long or cannot be encoded does not end the conversation.
    except (ModelError, DataError) as error:
        return f"{error}\n"


def _write(text: str) -> None:
    click.echo(text, nl=False, color=True)  # unchanged, in a pipe too
