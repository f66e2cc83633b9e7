"""GRPO with an engine that samples while the model trains."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import ceil
from typing import ClassVar, cast

from torch import Tensor

from nemo_rl_core.algorithms.grpo.dynamic_sampling import StepDraws
from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.remote_compute import Computed
from nemo_rl_core.rollouts.batch import valid_rollouts
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.rollouts.streaming_sampler import StreamingSampler
from nemo_rl_core.trainers.fit.custom import CustomParts
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.types import Prompt, Rollout

_UNEVEN_SHARE = 1.25
"""Largest number of a step's sequences for one engine, as a multiple of an equal share."""


@dataclass
class _SampledStep:
    """A step whose completions are sampled while an earlier one trains.

    Attributes:
        environment_metrics: Number of scored rollouts and the environment's metrics, by draw.
    """

    draws: StepDraws
    environment_metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)


class AsyncGRPOTrainer(GRPOTrainer):
    """Starts the rollouts of a step before the step begins.

    Steps train in order, on the same prompts as in `GRPOTrainer`; with `max_staleness: 0` the
    weights are bitwise identical. Otherwise timing decides which weights draw which token. The
    version of every token is recorded, and a replay of the records repeats the run bitwise.
    """

    sampler_class = StreamingSampler
    refuses_custom: ClassVar[Mapping[str, str]] = {
        "policy": "the engine samples while a training backend's workers train",
        "engine": "it takes weights while it generates, as VllmGeneration does with "
        "async_engine: true",
    }
    samples_ahead = True

    @classmethod
    def _refuse_unfit(cls, custom: CustomParts) -> None:
        if isinstance(custom.engine, StreamingGeneration):
            custom = replace(custom, engine=None)
        super()._refuse_unfit(custom)

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        super()._set_up(spec, resources)
        self._last_step = self._steps(spec).last
        self._last_begun = 0
        settings = self.config.asynchronous
        assert settings is not None  # checked in super()._set_up
        self._max_staleness = settings.max_staleness
        if isinstance(self.sampler, StreamingSampler):
            # The trainer has it except while it waits for rollouts. Only then is there memory for a
            # model that scores on its GPU: gradients and caches were freed before the transfer.
            self._gpu_turn = threading.Lock()
            self._gpu_turn.acquire()
            resources.callback(self._gpu_turn.release)
            self._sampled: dict[int, _SampledStep] = {}
            self._stream = self.sampler.stream(
                seed=self.settings.seed,
                timeout_seconds=settings.step_timeout_seconds,
                on_draw=self._score_draw,
            )

    def _sampler_settings(self) -> RolloutSettings:
        """Limits the concurrent sequences of each engine to its share of one step.

        Engines take requests in order. With a higher limit, requests of the next step would slow
        down those that the trainer waits for, and the engines would be idle later.
        """
        generation = self.settings.generation
        assert isinstance(generation, VllmGenerationConfig)  # others were refused
        sequences, engines = self.config.num_sequences_per_step, generation.num_engines
        most = sequences if engines == 1 else ceil(_UNEVEN_SHARE * sequences / engines)
        limits = {"max_num_seqs": min(generation.max_num_seqs, most)}
        sampling = generation.model_copy(update=limits)
        return self.settings.model_copy(update={"generation": sampling})

    def _sample_rollouts(self, prompts: list[Prompt]) -> tuple[Sequence[Rollout], dict[str, float]]:
        """Returns the step's rollouts, most of which were sampled while earlier steps trained.

        Environments, rewards and further draws also run during training, except for models that
        score on the trainer's GPU. The engine receives the weights of the step before while it
        generates, and begins the prompts of all steps that `max_staleness` now allows. Prompts are
        submitted before the transfer, so that the engine is never idle. The first transfer is the
        exception: a proof checks the engine before it gets requests.
        """
        if not isinstance(self.sampler, StreamingSampler):
            return super()._sample_rollouts(prompts)
        engine, policy = self.sampler.generation, cast("Policy", self.policy)
        version = self.step - 1
        if self.step in self._sampled:
            with self.timer.phase("rollout"), self._stream.exclusive():
                self._begin_steps(next_version=version)
                engine.finish_first(self.step)
        with self.timer.phase("sync"), self._stream.exclusive():
            engine.update_weights(policy, weight_version=version, checks_later=True)
        with self.timer.phase("rollout"):
            self._begin_steps()
        with self.timer.phase("sync"):
            engine.check_update()  # while the engine samples
            if self.sampler.scores_on_a_gpu:
                self._release_policy()  # which the check has loaded again
        with self.timer.phase("rollout"), self._gpu_given_up():
            self._stream.take(self.step)
        sampled = self._sampled.pop(self.step)
        self._environment_metrics += sampled.environment_metrics
        return sampled.draws.rollouts(), sampled.draws.metrics()

    def _record(
        self, rollouts: Sequence[Rollout], *, advantages: Tensor | None = None
    ) -> dict[str, float]:
        """Makes the stream process completions of the next step while this step is recorded.

        Afterwards, calls of the engine block until it has new weights and requests.
        """
        if isinstance(self.sampler, StreamingSampler):
            self._stream.poll_soon()
        return super()._record(rollouts, advantages=advantages)

    @contextmanager
    def _gpu_given_up(self) -> Iterator[None]:
        self._gpu_turn.release()
        try:
            yield
        finally:
            self._gpu_turn.acquire()

    def _score_draw(self, step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        """Scores a draw in the stream's thread; never calls the environment concurrently.

        Returns the prompts of the step's next draw; None if it needs none.
        """
        sampled, sampler = self._sampled[step], self.sampler
        assert sampler is not None
        # Turns were scored when they ended. What is left is to count their failures, which does not
        # call the environment.
        has_turns = sampler.environment is not None
        turn = self._gpu_turn if sampler.scores_on_a_gpu and not has_turns else nullcontext()
        with turn, nullcontext() if has_turns else self._stream.environment_alone():
            scored = sampler.score(rollouts)
        with self._stream.environment_alone():
            scored, metrics = sampler.post_process(scored)
        sampled.environment_metrics.append((len(valid_rollouts(scored)), metrics))
        sampled.draws.add(scored)
        if not sampled.draws.wants_more:
            return None
        return self._further_prompts(step=step, num_draws=sampled.draws.num_draws)

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        """Updates the weights before a validation; samples then continue with the new weights."""
        assert isinstance(sampler, StreamingSampler)
        with self._stream.exclusive():
            sampler.generation.update_weights(cast("Policy", self.policy), weight_version=last_step)

    def _validate(self) -> dict[str, float]:
        if self.sampler is None or not self._held_out:
            return {}
        with self._stream.exclusive(with_environment=True):
            return super()._validate()

    def _begin_steps(self, *, next_version: int | None = None) -> None:
        """Requests all steps that may be sampled with the current weights, or with the next."""
        first = max(self._last_begun + 1, self.step)
        last = min(self.step + self._max_staleness, self._last_step)
        for step in range(first, last + 1):
            group_size = self.config.num_generations_per_prompt
            prompts = self._batches.batch(step - 1)
            self._sampled[step] = _SampledStep(self._new_draws(len(prompts)))
            self._stream.begin(
                prompts,
                num_generations_per_prompt=group_size,
                step=step,
                next_version=next_version,
            )
            self._last_begun = step

    def _checked_by_gate(
        self, data: BatchedDataDict, computed: Computed
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """Adds the error of the proof of the engine's last weights.

        Without tokens of the current weights there is no `token_mult_prob_error`.
        """
        data, metrics = super()._checked_by_gate(data, computed)
        if not metrics["token_mult_prob_error"]:
            del metrics["token_mult_prob_error"]
        if isinstance(self.sampler, StreamingSampler):
            metrics["handover_mult_prob_error"] = self.sampler.generation.agreement
        return data, metrics
