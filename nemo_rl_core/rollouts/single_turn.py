"""Single-turn rollouts: a prompt, a completion, and no answer to it."""

from collections.abc import Sequence
from typing import Any

from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.engine import RolloutEngine, request_seed
from nemo_rl_core.rollouts.requests import Request, answers_to
from nemo_rl_core.types import Completion, Prompt, Rollout


class SingleTurnRollouts(RolloutEngine):
    """Samples completions, which somebody else scores.

    Args:
        generation: The engine.
        tokenizer: Decodes completions; token ids are never made from text again.
        seed: The run's seed.
    """

    def __init__(self, generation: GenerationInterface, tokenizer: Any, *, seed: int) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._seed = seed

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_place: int = 0,
        greedy: bool = False,
    ) -> list[Rollout]:
        """As `RolloutEngine.run`; the rollouts are unscored."""
        asked = [
            (prompt, group, sample)
            for group, prompt in enumerate(prompts, start=first_place)
            for sample in range(num_generations_per_prompt)
        ]
        requests = [
            Request(prompt.token_ids, request_seed(self._seed, step, group, sample))
            for prompt, group, sample in asked
        ]
        answers = answers_to(requests, self._generation, greedy=greedy)
        texts = self._tokenizer.batch_decode(
            [list(answer.token_ids) for answer in answers], skip_special_tokens=True
        )
        return [
            Rollout(
                prompt,
                Completion(answer.token_ids, answer.logprobs, answer.truncated),
                text,
                group=group,
                sample=sample,
            )
            for (prompt, group, sample), answer, text in zip(asked, answers, texts, strict=True)
        ]
