"""Adapter that runs lm-evaluation-harness tasks on models of this project.

    from nemo_rl_core.evals.harness import harness_model

    model = harness_model(folder, connect(ClusterConfig()), settings=RolloutSettings())
    lm_eval.simple_evaluate(model=model, tasks=["gsm8k"], apply_chat_template=True)

Omit `apply_chat_template` only for models without a chat template: a model trained with template
tokens needs them in prompts.

Texts come from the generation engine, log-likelihoods from the trainer's logprobs: the harness
measures the same computations as training and rollouts. The library is the optional extra `lm-eval`
and is imported by `harness_model`. Left out: tasks that need encoder-decoder models or images.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.control import encode_guarded, guarded_conversation, guarded_text
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.evals.harness_requests import HarnessRequest, stop_strings_of, until, windows
from nemo_rl_core.evals.loglikelihood import Loglikelihoods
from nemo_rl_core.rollouts.sampler import Sampler


class Adapter:
    """The methods of a harness model; `harness_model` puts it before the library's class.

    Args:
        model_folder: Weights, config and tokenizer.
        session: The cluster of engine and trainer.
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
        """Encodes a text; no second start token is added to text from templates.

        Args:
            string: The text.
            add_special_tokens: Whether the tokenizer adds its special tokens; None decides by the
                text.
        """
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
        """Returns the logprob in nats of each whole text after the prefix token.

        A text longer than the model's context is scored in windows: each token once, in the first
        window after the prefix token, in later ones after as much text as fits.
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

        A context beyond `max_prompt_tokens` loses its beginning.

        Raises:
            ConfigError: If a task samples at another temperature than the engine's.
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
                "a task samples at another temperature than the engine",
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
        stops = [stop_strings_of(options) for _, options in requests]
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
    """An `lm_eval.api.model.LM`, for `lm_eval.simple_evaluate(model=...)`.

    Args:
        model_folder: Weights, config and tokenizer.
        session: The cluster of engine and trainer.
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
