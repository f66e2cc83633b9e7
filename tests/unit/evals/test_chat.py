"""Asking an exported model in the terminal."""

import io
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
from nemo_rl_core.evals.chat import Chat
from tasks.cli import group
from tasks.cli.chat import chat as command


def greedy(folder: Path, prompt: str, num_tokens: int) -> str:
    """Argmax by argmax over whole forward passes, without `generate` or a cache."""
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
    program = [sys.executable, "-c", "from tasks.cli import main; main()", "chat"]
    done = subprocess.run(
        [*program, str(tiny_model), "12+34=", "--max-new-tokens", "4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy(tiny_model, "12+34=", 4) + "\n"


def test_each_line_is_answered_on_its_own(tiny_model: Path) -> None:
    result = ask(tiny_model, "--max-new-tokens", "4", lines="12+34=\n\n7+5=\n12+34=\n")
    assert result.exit_code == 0
    first, second = (greedy(tiny_model, prompt, 4) for prompt in ("12+34=", "7+5="))
    assert result.stdout == f"{first}\n{second}\n{first}\n"


def test_sampling_settings_of_the_model_are_not_used(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 9.0}')
    chat = Chat(folder, max_new_tokens=6)
    assert {chat.answer("12+34=") for _ in range(5)} == {greedy(tiny_model, "12+34=", 6)}


def test_prompt_without_room_is_explained_and_the_loop_goes_on(tiny_model: Path) -> None:
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
    # Not by click's runner, whose input is bytes of valid text.
    monkeypatch.setattr("sys.stdin", io.StringIO("\ud800\n7+5=\n"))
    with pytest.raises(SystemExit) as ended:
        command.main([str(tiny_model), "--max-new-tokens", "4"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("the prompt '\\ud800' holds half of a surrogate pair")
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


def test_an_answer_reaches_a_pipe_as_the_model_wrote_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chat, "answer", lambda self, prompt: "\x1b[1m4")
    assert ask(tiny_model, "2+2=").stdout == "\x1b[1m4\n"
