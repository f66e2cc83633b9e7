"""Options that a recipe passes to vLLM: speculation on n-grams samples from the same policy."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.rollouts.engine import SingleTurnRollouts
from nemo_rl_core.types import Prompt, Rollout
from tests.ray.test_engine import compared, largest_difference

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
NUM_SAMPLES = 2000


@pytest.fixture(scope="module")
def speculating(session: ClusterSession, generation_setup: GenerationSetup) -> VllmGeneration:
    options = {"speculative_config": SPECULATION}
    config = generation_setup.config.model_copy(update={"engine_options": options})
    return VllmGeneration(session, replace(generation_setup, config=config, stop_token_ids=()))


def sampled(
    engine: VllmGeneration, model: Path, prompts: Sequence[Prompt], *, num: int = 8, greedy=False
) -> list[Rollout]:
    rollouts = SingleTurnRollouts(engine, load_tokenizer(model), seed=0)
    return rollouts.run(prompts, num_generations_per_prompt=num, step=1, greedy=greedy)


def exact_marginals(model_folder: Path, prompt: Prompt) -> list[torch.Tensor]:
    """Returns the probabilities of the second and third token, over all tokens before them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows, weights, marginals = torch.tensor([prompt.token_ids]), torch.ones(1), []
    with torch.no_grad():
        for _ in range(3):
            probabilities = model(rows).logits[:, -1].double().softmax(-1) * weights[:, None]
            marginals.append(probabilities.sum(0))
            num_rows, num_tokens = probabilities.shape
            tokens = torch.arange(num_tokens).repeat(num_rows)[:, None]
            rows = torch.cat([rows.repeat_interleave(num_tokens, 0), tokens], 1)
            weights = probabilities.flatten()
    return marginals[1:]


def test_speculation_changes_neither_greedy_tokens_nor_the_policys_distribution(
    speculating: VllmGeneration,
    generation_setup: GenerationSetup,
    session: ClusterSession,
    tiny_model: Path,
    prompts: list[Prompt],
    make_policy: Callable[..., Policy],
) -> None:
    greedy = sampled(speculating, tiny_model, prompts, num=1, greedy=True)
    rollouts = sampled(speculating, tiny_model, prompts)
    assert sampled(speculating, tiny_model, prompts) == rollouts
    assert largest_difference(compared(rollouts, make_policy())) < 1e-4

    # Drafts follow the pattern; after a token that the prompt does not have, there is none.
    pattern = replace(prompts[0], token_ids=tuple(range(4, 12)) * 2)
    samples = sampled(speculating, tiny_model, [pattern], num=NUM_SAMPLES)
    drawn = torch.tensor([each.completion.token_ids for each in samples])
    for position, probabilities in enumerate(exact_marginals(tiny_model, pattern), 1):
        counts = drawn[:, position].bincount(minlength=len(probabilities))
        deviations = (NUM_SAMPLES * probabilities * (1 - probabilities)).sqrt()
        # Four standard deviations: a false alarm in 0.24 % of draws of 38 counts.
        assert ((counts - NUM_SAMPLES * probabilities).abs() < 4 * deviations).all()

    plain = VllmGeneration(session, replace(generation_setup, stop_token_ids=()))
    expected = sampled(plain, tiny_model, prompts, num=1, greedy=True)
    assert [each.completion.token_ids for each in greedy] == [
        each.completion.token_ids for each in expected
    ]
