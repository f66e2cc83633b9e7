"""Compares the answers to lm-evaluation-harness with transformers; works without the library.

`Adapter` is everything that the library's class uses of this project. Where lm-eval is installed,
the library's own encoding of pairs is tested too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.evals.harness import Adapter, harness_model, until, windows


@dataclass(frozen=True)
class Asked:
    """The fields of the library's Instance that are read."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def settings(generation_setup: GenerationSetup) -> RolloutSettings:
    return RolloutSettings(
        generation=generation_setup.config, dtype="float32", max_prompt_tokens=16, seed=0
    )


@pytest.fixture(scope="module")
def adapter(session: ClusterSession, tiny_model: Path, settings: RolloutSettings) -> Adapter:
    return Adapter(tiny_model, session, settings=settings)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Callable[[list[int]], torch.Tensor]:
    """Next-token logprobs `[T, V]` of a full forward pass in transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


def test_loglikelihoods_are_those_of_transformers(
    adapter: Adapter, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    pairs = [([1, 5, 14, 6], [17, 7]), ([1, 8], [9]), ([1], [4, 4, 4, 4]), ([1, 5], [])]
    # The most likely continuation of a context, computed argmax by argmax.
    context = [1, 5, 14]
    likeliest: list[int] = []
    for _ in range(3):
        likeliest.append(int(reference(context + likeliest)[-1].argmax()))
    pairs.append((context, likeliest))
    scored = adapter._loglikelihood_tokens([(None, *pair) for pair in pairs])
    for (before, after), (logprob, is_greedy) in zip(pairs, scored, strict=True):
        rows = reference(before + after)[len(before) - 1 : -1]
        expected = sum(float(row[token]) for row, token in zip(rows, after, strict=True))
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert is_greedy is ([int(row.argmax()) for row in rows] == after)
    assert scored[-1][1] is True
    assert scored[3] == (0.0, True)


def test_a_long_text_is_scored_in_windows(
    adapter: Adapter, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    text = "12+34=46" * 40  # 320 tokens, 256 fit
    (logprob,) = adapter.loglikelihood_rolling([Asked((text,))])
    ids = adapter.tok_encode(text, add_special_tokens=False)
    expected = 0.0
    for context, scored in windows(ids, prefix=1, max_tokens=256):
        rows = reference(context + scored)[len(context) - 1 : -1]
        expected += sum(float(row[token]) for row, token in zip(rows, scored, strict=True))
    assert logprob == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ModelError, match="cannot be scored"):
        adapter._loglikelihood_tokens([(None, [1], [4] * 256)])


def test_texts_are_the_greedy_ones_up_to_a_stop_string(
    adapter: Adapter, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    contexts = ["12+34=", "7+5=", "9*9="]
    written = []
    for context in contexts:
        ids = adapter.tok_encode(context)
        while len(ids) < len(adapter.tok_encode(context)) + 6:
            ids.append(int(reference(ids)[-1].argmax()))
            if ids[-1] == adapter.eot_token_id:
                break
        new = ids[len(adapter.tok_encode(context)) :]
        written.append(adapter.tokenizer.decode(new, skip_special_tokens=True))
    free = [Asked((context, {"until": []})) for context in contexts]
    assert adapter.generate_until(free) == written
    stop = written[0][2]
    stopped = adapter.generate_until([Asked((contexts[0], {"until": stop, "max_gen_toks": 5}))])
    assert stopped == [written[0][: written[0].index(stop)]]


def test_samples_use_only_the_engines_temperature(adapter: Adapter) -> None:
    sampled = [Asked(("1+1=", {"do_sample": True, "temperature": 1.0, "until": ["\n"]}))] * 2
    assert adapter.generate_until(sampled) == adapter.generate_until(sampled)
    with pytest.raises(ConfigError, match="temperature of a task differs"):
        adapter.generate_until([Asked(("1+1=", {"do_sample": True, "temperature": 0.3}))])


def test_start_tokens_are_not_doubled(adapter: Adapter) -> None:
    chat = adapter.apply_chat_template([{"role": "user", "content": "1+2="}])
    assert chat == "<bos>1+2="
    assert adapter.tok_encode(chat) == [1, 5, 14, 6, 17]
    assert adapter.prefix_token_id == 1


def test_windows_hold_every_token_once() -> None:
    for length in range(1, 30):
        pairs = windows(list(range(100, 100 + length)), prefix=1, max_tokens=7)
        assert [token for _, scored in pairs for token in scored] == list(range(100, 100 + length))
        assert all(
            len(context) >= 1 and len(context) + len(scored) <= 7 for context, scored in pairs
        )
    assert windows([], prefix=1, max_tokens=7) == []
    assert until("abc", ["c", "b"]) == "a"
    assert until("abc", []) == "abc"


def test_the_library_is_asked_for_by_name_or_used(
    session: ClusterSession, tiny_model: Path, settings: RolloutSettings
) -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="lm-evaluation-harness is not installed"):
            harness_model(tiny_model, session, settings=settings)
        return
    model = harness_model(tiny_model, session, settings=settings)
    pairs = [Asked(("12+34=", "46")), Asked(("", "12"))]
    assert all(logprob < 0 for logprob, _ in model.loglikelihood(pairs))
