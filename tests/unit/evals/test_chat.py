"""Chat with an exported model in the terminal."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.errors import ModelError
from nemo_rl_core.evals.chat import Chat, Conversation
from tasks.cli.models.chat import chat as command
from workflows.cli import group


def greedy(folder: Path, prompt: str, num_tokens: int) -> str:
    """Returns the greedy completion by full forward passes, without `generate` or a cache."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    start = ids = prompt_token_ids(tokenizer, prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            best = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids = [*ids, best]
        if best == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(ids[len(start) :], skip_special_tokens=True))


def ask(folder: Path, *arguments: str, lines: str | None = None) -> Result:
    return CliRunner().invoke(group, ["chat", str(folder), *arguments], input=lines)


@pytest.mark.parametrize("prompt", ["12+34=", "7+5=", "99+99="])
def test_answer_is_the_greedy_one(tiny_model: Path, prompt: str) -> None:
    assert Chat(tiny_model, max_new_tokens=6).answer(prompt) == greedy(tiny_model, prompt, 6)


@pytest.mark.slow
def test_program_prints_the_answer_and_nothing_else(tiny_model: Path) -> None:
    program = [sys.executable, "-c", "from workflows.cli import main; main()", "chat"]
    done = subprocess.run(
        [*program, str(tiny_model), "12+34=", "--max-new-tokens", "4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy(tiny_model, "12+34=", 4) + "\n"


def test_each_line_is_answered_separately(tiny_model: Path) -> None:
    result = ask(tiny_model, "--max-new-tokens", "4", lines="12+34=\n\n7+5=\n12+34=\n")
    assert result.exit_code == 0
    first, second = (greedy(tiny_model, prompt, 4) for prompt in ("12+34=", "7+5="))
    assert result.stdout == f"{first}\n{second}\n{first}\n"


@pytest.fixture
def marking_model(tiny_model: Path, tmp_path: Path) -> Path:
    """Model whose chat template separates turns with characters of its vocabulary."""
    folder = tmp_path / "marking"
    shutil.copytree(tiny_model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '*' if m['role'] == 'user' else '-' }}"
        "{{ m['content'] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}-{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def conversation_of(*turns: str) -> str:
    roles = ("user", "assistant")
    return json.dumps([{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)])


def test_earlier_turns_are_part_of_a_prompt_until_a_reset(marking_model: Path) -> None:
    chat = Chat(marking_model, max_new_tokens=4)
    assert chat.marks_turns
    first = greedy(marking_model, "12+34=", 4)
    second = greedy(marking_model, conversation_of("12+34=", first, "7+5="), 4)
    separate = greedy(marking_model, "7+5=", 4)
    lines = "12+34=\n7+5=\n/reset\n7+5=\n/quit\n1+1=\n"
    result = ask(marking_model, "--max-new-tokens", "4", lines=lines)
    assert (result.exit_code, result.stdout) == (0, f"{first}\n{second}\n{separate}\n")
    result = ask(marking_model, "--max-new-tokens", "4", "--no-history", lines="12+34=\n7+5=\n")
    assert result.stdout == f"{first}\n{separate}\n"


def test_a_failed_turn_is_not_part_of_the_conversation(marking_model: Path) -> None:
    conversation = Conversation(Chat(marking_model, max_new_tokens=4))
    first = conversation.answer("12+34=")
    with pytest.raises(ModelError) as caught:
        conversation.answer("1" * 250)
    assert caught.value.fix == "shorten the prompt, or enter /reset"
    expected = greedy(marking_model, conversation_of("12+34=", first, "7+5="), 4)
    assert conversation.answer("7+5=") == expected


def test_history_without_turn_marks_is_kept_only_on_request(
    tiny_model: Path,
) -> None:
    assert not Chat(tiny_model).marks_turns
    first = greedy(tiny_model, "12+34=", 4)
    second = greedy(tiny_model, conversation_of("12+34=", first, "7+5="), 4)
    lines = "12+34=\n7+5=\n"
    result = ask(tiny_model, "--max-new-tokens", "4", "--history", lines=lines)
    assert result.stdout == f"{first}\n{second}\n"


def test_unknown_characters_and_commands_do_not_end_the_loop(tiny_model: Path) -> None:
    result = ask(tiny_model, "--max-new-tokens", "4", lines="hello\n/rest\n7+5=\n")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:4] == [
        "the prompt has unknown characters",
        "  got: 'h', 'e', 'l', 'o'; the model's tokenizer knows only ' *+-0123456789='",
        "  fix: write the prompt without them, or chat with a model that reads any text",
        "there is no command /rest: /reset forgets the conversation, /quit ends it",
    ]
    assert result.stdout.endswith(f"\n{greedy(tiny_model, '7+5=', 4)}\n")
    single = ask(tiny_model, "hello")
    assert (single.exit_code, single.stdout) == (2, "")
    assert "unknown characters" in single.stderr


def test_sampling_settings_of_the_model_are_not_used(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 9.0}')
    chat = Chat(folder, max_new_tokens=6)
    assert {chat.answer("12+34=") for _ in range(5)} == {greedy(tiny_model, "12+34=", 6)}


def test_a_prompt_without_room_does_not_end_the_loop(tiny_model: Path) -> None:
    # 256 positions; `<bos>` and 255 characters fill them all, 254 leave room for one token.
    chat = Chat(tiny_model)
    with pytest.raises(ModelError, match="no tokens for an answer") as caught:
        chat.answer("1" * 255)
    assert caught.value.got == "256 tokens"
    assert len(chat.answer("1" * 254)) <= len("<unk>")
    result = ask(tiny_model, "--max-new-tokens", "4", lines="1" * 255 + "\n7+5=\n")
    assert result.exit_code == 0
    assert result.stdout.startswith("the prompt leaves no tokens")
    assert result.stdout.endswith(f"\n{greedy(tiny_model, '7+5=', 4)}\n")


def test_a_line_that_cannot_be_written_does_not_end_the_loop(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Not with click's runner, whose input is valid UTF-8.
    monkeypatch.setattr("sys.stdin", io.StringIO("\ud800\n7+5=\n"))
    with pytest.raises(SystemExit) as ended:
        command.main([str(tiny_model), "--max-new-tokens", "4"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("the prompt '\\ud800' has half of a surrogate pair")
    assert output.endswith(f"\n{greedy(tiny_model, '7+5=', 4)}\n")


def test_errors_go_to_stderr_with_exit_code_2(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    for weights in broken.glob("*.safetensors"):
        weights.unlink()
    untokenized = tmp_path / "untokenized"
    shutil.copytree(tiny_model, untokenized)
    for file in untokenized.glob("tokenizer*"):
        file.unlink()
    expected = {
        tmp_path / "nowhere": "no such folder",
        tmp_path: "without config.json",
        broken: "cannot load",
        untokenized: "has no vocabulary",
    }
    for folder, words in expected.items():
        result = ask(folder, "1+1=")
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in result.stderr
        assert len(result.stderr.splitlines()) < 10


def test_length_below_one_is_refused(tiny_model: Path) -> None:
    result = ask(tiny_model, "1+1=", "--max-new-tokens", "0")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--max-new-tokens" in result.stderr


def test_an_interrupt_ends_a_conversation_with_a_new_line(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Chat, prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Chat, "answer", interrupted)
    result = ask(tiny_model, lines="7+5=\n")
    assert (result.exit_code, result.output) == (0, "\n")


def test_an_answer_reaches_a_pipe_unchanged(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chat, "answer", lambda self, prompt: "\x1b[1m4")
    assert ask(tiny_model, "2+2=").stdout == "\x1b[1m4\n"
