"""Adapter that runs lm-evaluation-harness tasks on models of this project; see docs/evaluation.md.

Texts come from the generation engine, log-likelihoods from the trainer's logprobs: the harness
measures the same computations as training and rollouts. Left out: tasks that need encoder-decoder
models or images.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import RolloutSettings, TrainerSettings
from nemo_rl_core.data.control import encode_guarded, guarded_conversation, guarded_text
from nemo_rl_core.data.pretrained import context_length
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError, ModelError
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.rollouts.sampler import Sampler

_TokenPair = tuple[Sequence[int], Sequence[int]]
"""A context of at least one token, and the continuation to score."""

_ROWS_AT_ONCE = 256
_MICROBATCH_TOKENS = 8192
_UNBOUNDED = 4096
"""Maximum length for models without one in their config."""


class HarnessRequest(Protocol):
    """Attributes of the harness's `Instance` that the adapter reads."""

    @property
    def args(self) -> tuple[Any, ...]:
        """One or two texts, and their options."""
        ...


class Adapter:
    """Methods of a harness model, which override those of the library's class."""

    def __init__(
        self, model_folder: Path, session: ClusterSession, *, settings: RolloutSettings
    ) -> None:
        super().__init__()
        self._sampler = Sampler(session, settings, model_folder)
        self._scores = _Loglikelihoods(model_folder, session, settings=settings)
        self._settings = settings
        self._name = model_folder.name
        self.tokenizer = self._sampler.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before the first token of a scored text."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """Part of the harness's cache names."""
        return self._name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Encodes a text; by default without special tokens if it already starts with one."""
        if add_special_tokens is None:
            start = self.tokenizer.bos_token
            add_special_tokens = start is None or not string.startswith(start)
        return encode_guarded(self.tokenizer, string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders the conversation with the next turn opened at its end.

        If a task's text spells control tokens, guard characters are inserted for `tok_encode`.
        """
        return guarded_conversation(
            self.tokenizer,
            chat_history,
            row=f"the task's {chat_history[-1]['content'][:80]!r}",
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        # The continuation is an answer of the task and is encoded without control tokens.
        pair: tuple[list[int], list[int]] = super()._encode_pair(  # type: ignore[misc]
            context, guarded_text(self.tokenizer, continuation)
        )
        return pair

    def _loglikelihood_tokens(
        self, requests: Iterable[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        return self._scores.score([(context, scored) for _, context, scored in requests])

    def loglikelihood_rolling(self, requests: Iterable[HarnessRequest], **_: object) -> list[float]:
        """Returns the logprob in nats of each full text after the prefix token.

        A text longer than the model's context is scored in windows. Each token is scored once; the
        first window starts with the prefix token, later ones with as much context as fits.
        """
        sums = []
        for request in requests:
            text = guarded_text(self.tokenizer, request.args[0])
            ids = self.tok_encode(text, add_special_tokens=False)
            scored = self._scores.score(
                windows(ids, prefix=self.prefix_token_id, max_tokens=self._scores.max_tokens)
            )
            sums.append(sum(logprob for logprob, _ in scored))
        return sums

    def generate_until(self, requests: Iterable[HarnessRequest], **_: object) -> list[str]:
        """Completes each context up to its first stop string, which is not included.

        A context longer than `max_prompt_tokens` is truncated on the left.
        """
        calls = [(request.args[0], dict(request.args[1])) for request in requests]
        texts = [""] * len(calls)
        for greedy in (True, False):
            indices = [
                index for index, (_, options) in enumerate(calls) if self._greedy(options) is greedy
            ]
            if indices:
                done = self._complete([calls[index] for index in indices], indices, greedy)
                for index, text in zip(indices, done, strict=True):
                    texts[index] = text
        return texts

    def _greedy(self, options: dict[str, Any]) -> bool:
        if not options.get("do_sample", False) or options.get("temperature") == 0:
            return True
        temperature = self._settings.generation.temperature
        if options.get("temperature", temperature) != temperature:
            raise ConfigError(
                "the temperature of a task differs from the engine's",
                expected=f"temperature {temperature} of the settings",
                got=str(options["temperature"]),
                fix="set generation.temperature and the task's temperature to one value",
            )
        return False

    def _complete(
        self, requests: Sequence[tuple[str, dict[str, Any]]], indices: Sequence[int], greedy: bool
    ) -> list[str]:
        limit = self._settings.max_prompt_tokens
        prompts = [self.tok_encode(context)[-limit:] for context, _ in requests]
        stops = [_stop_strings(options) for _, options in requests]
        most = self._settings.generation.max_new_tokens
        output = self._sampler.generation.generate(
            BatchedDataDict(
                {
                    "input_ids": torch.nn.utils.rnn.pad_sequence(
                        [torch.tensor(ids) for ids in prompts], batch_first=True
                    ),
                    "input_lengths": torch.tensor([len(ids) for ids in prompts]),
                    # The index of a request in the task, so that a rerun samples the same
                    # completions.
                    "seeds": torch.tensor(indices),
                    "stop_strings": stops,
                    "max_new_tokens": torch.tensor(
                        [min(most, options.get("max_gen_toks", most)) for _, options in requests]
                    ),
                }
            ),
            greedy,
        )
        ends = output["unpadded_sequence_lengths"].tolist()
        written = [
            ids[len(prompt) : end].tolist()
            for ids, prompt, end in zip(output["output_ids"], prompts, ends, strict=True)
        ]
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        return [until(text, stop) for text, stop in zip(texts, stops, strict=True)]


def harness_model(model_folder: Path, session: ClusterSession, *, settings: RolloutSettings) -> Any:
    """Returns an `lm_eval.api.model.LM` for `lm_eval.simple_evaluate(model=...)`.

    Use `apply_chat_template=True` for models with a chat template: a model trained with template
    tokens needs them in prompts. `max_new_tokens` of the settings limits every answer.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ConfigError(
            "lm-evaluation-harness is not installed",
            expected="the package lm-eval",
            got=str(error),
            fix="install it: pip install 'nemo-rl-flow[lm-eval]'",
        ) from error
    kind = type("HarnessModel", (Adapter, TemplateLM), {})
    return kind(model_folder, session, settings=settings)


def windows(
    ids: Sequence[int], *, prefix: int, max_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Splits a text into pairs of context and scored tokens; each token is scored once.

    Example:
        >>> windows([1, 2, 3, 4, 5], prefix=0, max_tokens=3)
        [([0], [1, 2]), ([2], [3, 4]), ([3, 4], [5])]
    """
    step = max_tokens - 1
    pairs = []
    for start in range(0, len(ids), step):
        scored = list(ids[start : start + step])
        room = max_tokens - len(scored)
        context = list(ids[max(0, start - room) : start]) if start else [prefix]
        pairs.append((context, scored))
    return pairs


def until(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string.

    Example:
        >>> until("12, so\\nQ: 5", ["Q:", "\\n"])
        '12, so'
    """
    return text[: min((index for stop in stops if (index := text.find(stop)) >= 0), default=None)]


def _stop_strings(options: dict[str, Any]) -> list[str]:
    until_option = options.get("until") or []
    stops = [until_option] if isinstance(until_option, str) else until_option
    return [stop for stop in stops if stop]


class _Loglikelihoods:
    """Logprobs of a model in a training worker.

    The most likely tokens come from a reference policy with the same weights, since workers compute
    them for the reference only; this costs the memory of a second copy. `max_tokens` is the maximum
    length of a context and its continuation together.
    """

    def __init__(
        self, model_folder: Path, session: ClusterSession, *, settings: TrainerSettings
    ) -> None:
        self.max_tokens = context_length(model_folder) or _UNBOUNDED
        self._policy = Policy(
            session,
            TrainingSetup(
                model_folder=model_folder,
                optimizer=OptimizerConfig(),
                max_tokens_per_microbatch=max(_MICROBATCH_TOKENS, self.max_tokens),
                training=settings.training,
                dtype=settings.dtype,
                reference_folder=model_folder,
            ),
        )

    def score(self, pairs: Sequence[_TokenPair]) -> list[tuple[float, bool]]:
        """Returns each continuation's logprob in nats, and whether its tokens are the most likely.

        Long contexts are truncated on the left; an empty continuation is `(0.0, True)`.
        """
        results = [(0.0, True)] * len(pairs)
        filled = [index for index, (_, continuation) in enumerate(pairs) if continuation]
        for start in range(0, len(filled), _ROWS_AT_ONCE):
            indices = filled[start : start + _ROWS_AT_ONCE]
            scored = self._scored([self._fitting(pairs[index]) for index in indices])
            for index, result in zip(indices, scored, strict=True):
                results[index] = result
        return results

    def _fitting(self, pair: _TokenPair) -> _TokenPair:
        context, continuation = pair
        room = self.max_tokens - len(continuation)
        if room < 1 or not context:
            raise ModelError(
                "a continuation cannot be scored after at least one token of context",
                expected=f"a context, and fewer than {self.max_tokens} tokens to score",
                got=f"{len(context)} and {len(continuation)} tokens",
                fix="use a model with a longer context, or shorter texts",
            )
        return context[-room:], continuation

    def _scored(self, pairs: Sequence[_TokenPair]) -> list[tuple[float, bool]]:
        batch = collate(
            [[*context, *continuation] for context, continuation in pairs],
            [[False] * len(context) + [True] * len(scored) for context, scored in pairs],
        )
        mask = batch["token_mask"]
        logprobs = self._policy.get_logprobs(batch)["logprobs"]
        sums = (logprobs.double() * mask).sum(dim=1).tolist()
        return list(zip(sums, self._is_greedy(batch), strict=True))

    def _is_greedy(self, batch: BatchedDataDict) -> list[bool]:
        likeliest = self._policy.get_reference_topk_logprobs(batch, k=1)["topk_ids"][..., 0]
        is_likeliest = (likeliest == batch["input_ids"][:, 1:]) | ~batch["token_mask"]
        greedy: list[bool] = is_likeliest.all(dim=1).tolist()
        return greedy
