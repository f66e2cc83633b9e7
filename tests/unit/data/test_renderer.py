"""An environment's turn between two turns of the policy, under templates of several families."""

import pytest

from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.errors import DataError

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKS = CHATML.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
STRICT = "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}" + (
    "{{ raise_exception('roles must be user and assistant') }}{% endif %}{{ m['content'] }}"
    "{{ eos_token if m['role'] == 'assistant' }}{% endfor %}"
)


def reply_token_ids(tokenizer, prompt, message, *, last_token):
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "0"}]
    renderer = Renderer(tokenizer)
    return renderer.continuation(turns, [message], last_token=last_token, row="a turn")


@pytest.fixture
def chat(request):
    """A tokenizer of words, with special tokens for the ends of turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<end>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "\n", *"0123+="]
    core = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=words[2:6],
        chat_template=request.param,
        clean_up_tokenization_spaces=False,
    )


def reply(tokenizer, role, content, last_token):
    message = {"role": role, "content": content}
    return tokenizer.decode(reply_token_ids(tokenizer, "1+1=", message, last_token=last_token))


@pytest.mark.parametrize("chat", [CHATML], indirect=True)
@pytest.mark.parametrize(("role", "named"), [("environment", "user"), ("tool", "tool")])
def test_a_reply_closes_the_turn_and_opens_the_next(chat, role, named):
    end, one = chat.convert_tokens_to_ids(["<end>", "1"])
    # The policy's stop token is not repeated; a turn that ended without it is closed.
    assert reply(chat, role, "2", end) == f"\n<|{named}|>2<end>\n<|assistant|>"
    assert reply(chat, role, "2", one) == f"<end>\n<|{named}|>2<end>\n<|assistant|>"
    # Also one that was cut after a line break, which the template writes after the end.
    line_break = chat.convert_tokens_to_ids("\n")
    assert reply(chat, role, "2", line_break) == f"<end>\n<|{named}|>2<end>\n<|assistant|>"


@pytest.mark.parametrize("chat", [CHATML], indirect=True)
def test_appended_replies_equal_the_rendered_conversation(chat):
    # A full conversation from the template, and the same one turn by turn.
    turns = [("user", "1+1="), ("assistant", "3"), ("user", "2="), ("assistant", "2")]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = chat.apply_chat_template(messages, tokenize=False)
    prompt = chat.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    (end,) = chat.convert_tokens_to_ids(["<end>"])
    built = f"{prompt}3<end>{reply(chat, 'user', '2=', end)}2<end>\n"
    assert built == text


@pytest.mark.parametrize("chat", [THINKS], indirect=True)
def test_a_turn_stays_as_sampled_if_the_template_opens_past_turns_differently(chat, caplog):
    (end,) = chat.convert_tokens_to_ids(["<end>"])
    assert reply(chat, "user", "2", end) == "\n<|user|>2<end>\n<|assistant|><think>"
    assert "a new turn with 'r|>0<end>\\n<|assistant|><think>', and a past" in caplog.text


@pytest.mark.parametrize("chat", [STRICT], indirect=True)
def test_a_role_that_the_template_lacks_is_a_users_or_named(chat, caplog):
    assert reply(chat, "environment", "2", 1) == "2"
    assert reply(chat, "tool", "2", 3) == "<end>2"
    assert "are user turns" in caplog.text
    with pytest.raises(DataError, match=r"turn of 'system'(.|\n)*roles must be"):
        reply(chat, "system", "2", 1)


def test_a_base_model_reads_on(request):
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.chat_template = None
    assert reply(tokenizer, "environment", "2=", 5) == "2="
