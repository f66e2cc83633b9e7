"""Models of this project as models of lm-evaluation-harness, whose tasks then run on them.

    from nemo_rl_core.evals.harness import harness_model

    model = harness_model(folder, connect(ClusterConfig()), settings=RolloutSettings())
    lm_eval.simple_evaluate(model=model, tasks=["gsm8k"], apply_chat_template=True)

Leave `apply_chat_template` out for a model without a chat template alone: one that was trained on
its template's tokens is not asked the same without them.

Texts come from the generation engine, log-likelihoods from the trainer's logprobs: what the harness
measures is what training and rollouts compute. The library is imported when a model is asked for
and not before; it is the optional extra `lm-eval`. Left out: what needs encoder-decoder models or
images.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.control import encode_guarded, guarded_conversation, guarded_text
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.evals.loglikelihood import Loglikelihoods
from nemo_rl_core.rollouts.sampler import Sampler


class HarnessRequest(Protocol):
    """The part of the harness's `Instance` that is read."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The text, or two, and what belongs to it."""
        ...


class Adapter:
    """What the harness asks of a model; `harness_model` sets it before the library's own class.

    Args:
        model_folder: Weights, config and tokenizer.
        session: Where engine and trainer run.
        settings: Sampling (its `max_new_tokens` bounds every answer), precision, backend.
    """

    def __init__(
        self, model_folder: Path, session: ClusterSession, *, settings: RolloutSettings
    ) -> None:
        super().__init__()
        self._sampler = Sampler(session, settings, model_folder)
        self._scores = Loglikelihoods(model_folder, session, settings=settings)
        self._settings = settings
        self._name = model_folder.name
        self.tokenizer = self._sampler.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text is scored after."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """A part of the names of the harness's caches."""
        return self._name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Token ids; a text that begins with the start token, as templates write it, gets no other.

        Args:
            string: The text.
            add_special_tokens: Whether the tokenizer may add its own; None leaves it to the text.
        """
        if add_special_tokens is None:
            start = self.tokenizer.bos_token
            add_special_tokens = start is None or not string.startswith(start)
        return encode_guarded(self.tokenizer, string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text, the turn that is to be written left open at its end.

        Where a task's text would write control tokens, private characters stand between its own,
        by which `tok_encode` knows it.
        """
        return guarded_conversation(
            self.tokenizer,
            chat_history,
            row=f"the task's {chat_history[-1]['content'][:80]!r}",
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        # What follows a context is an answer of the task: text, whatever it spells.
        pair: tuple[list[int], list[int]] = super()._encode_pair(  # type: ignore[misc]
            context, guarded_text(self.tokenizer, continuation)
        )
        return pair

    def _loglikelihood_tokens(
        self, requests: Iterable[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        return self._scores.score([(context, scored) for _, context, scored in requests])

    def loglikelihood_rolling(self, requests: Iterable[HarnessRequest], **_: object) -> list[float]:
        """The logprob in nats of whole texts, each after the prefix token.

        A text longer than the model's context is scored in windows: each token once, the first
        window's after the prefix token, later ones after as much of the text as fits.
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
        """Completes each context up to the first of its stop strings, which is left out.

        A context beyond `max_prompt_tokens` loses its beginning.

        Raises:
            ConfigError: If a task samples at another temperature than the engine's.
        """
        asked = [(request.args[0], dict(request.args[1])) for request in requests]
        texts = [""] * len(asked)
        for greedy in (True, False):
            places = [
                place for place, (_, options) in enumerate(asked) if self._greedy(options) is greedy
            ]
            if places:
                done = self._complete([asked[place] for place in places], places, greedy)
                for place, text in zip(places, done, strict=True):
                    texts[place] = text
        return texts

    def _greedy(self, options: dict[str, Any]) -> bool:
        if not options.get("do_sample", False) or options.get("temperature") == 0:
            return True
        temperature = self._settings.generation.temperature
        if options.get("temperature", temperature) != temperature:
            raise ConfigError(
                "a task samples at another temperature than the engine",
                expected=f"temperature {temperature}, that of the settings",
                got=str(options["temperature"]),
                fix="set generation.temperature to that of the task, or the task's to the engine's",
            )
        return False

    def _complete(
        self, asked: Sequence[tuple[str, dict[str, Any]]], places: Sequence[int], greedy: bool
    ) -> list[str]:
        limit = self._settings.max_prompt_tokens
        prompts = [self.tok_encode(context)[-limit:] for context, _ in asked]
        stops = [_stop_strings(options) for _, options in asked]
        most = self._settings.generation.max_new_tokens
        output = self._sampler.generation.generate(
            BatchedDataDict(
                {
                    "input_ids": torch.nn.utils.rnn.pad_sequence(
                        [torch.tensor(ids) for ids in prompts], batch_first=True
                    ),
                    "input_lengths": torch.tensor([len(ids) for ids in prompts]),
                    # The place of a request in the task, so that a rerun draws the same.
                    "seeds": torch.tensor(places),
                    "stop_strings": stops,
                    "max_new_tokens": torch.tensor(
                        [min(most, options.get("max_gen_toks", most)) for _, options in asked]
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
    """An `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)`.

    Args:
        model_folder: Weights, config and tokenizer.
        session: Where engine and trainer run.
        settings: Sampling (its `max_new_tokens` bounds every answer), precision, backend.

    Raises:
        ConfigError: If lm-evaluation-harness is not installed.
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
    """A long text as pairs of context and what is scored after it, which hold every token once.

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
    """The text before whichever stop string comes first.

    Example:
        >>> until("12, so\\nQ: 5", ["Q:", "\\n"])
        '12, so'
    """
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)]


def _stop_strings(options: dict[str, Any]) -> list[str]:
    given = options.get("until") or []
    return [stop for stop in ([given] if isinstance(given, str) else given) if stop]
