"""GRPO with an engine that samples while the model trains."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil, isnan, nan
from typing import cast

from nemo_rl_core.algorithms.grpo.data import StepDraws
from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError, WorkerLostError
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.remote_compute import Computed
from nemo_rl_core.rollouts.batch_stream import BatchStream
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.rollouts.streaming_sampler import StreamingSampler
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.types import Prompt, Rollout

_LOG = logging.getLogger(__name__)
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
    weights are bitwise identical. With a larger limit, vLLM gets new weights in the middle of its
    completions, so which weights draw a token depends on timing. The version of every token is
    recorded, and a replay of the records repeats the run bitwise.

    Engines other than vLLM complete one batch at a time, and take weights only between steps: the
    same weights draw all tokens of a step, also in a second run.
    """

    sampler_class = StreamingSampler
    samples_ahead = True
    _stream: RolloutStream | BatchStream
    _agreement = nan  # of engine and policy on fixed prompts; NaN if this step has no such proof

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        super()._set_up(spec, resources)
        self._last_step = self._steps(spec).last
        self._last_begun, self._agreement = 0, nan
        settings = self.config.asynchronous
        assert settings is not None  # checked in super()._set_up
        self._max_staleness = settings.max_staleness
        if isinstance(self.sampler, StreamingSampler):
            # Locked by the trainer, and released while it waits for rollouts. A model that scores
            # on the trainer's GPU has memory only then, without gradients and caches.
            self._gpu_turn = threading.Lock()
            self._gpu_turn.acquire()
            self._sampled: dict[int, _SampledStep] = {}
            if self.sampler.streaming is None:
                stream = BatchStream(self._roll_out_ahead, self._score_draw, self._gpu_released)
                self._stream = resources.enter_context(stream)
            else:
                self._stream = self.sampler.stream(
                    seed=self.settings.seed,
                    timeout_seconds=settings.step_timeout_seconds,
                    on_draw=self._score_draw,
                )
            resources.callback(self._gpu_turn.release)

    def _sampler_settings(self) -> RolloutSettings:
        """Limits the concurrent sequences of each engine to its share of one step.

        Engines take requests in order. With a higher limit, requests of the next step would slow
        down those that the trainer waits for, and the engines would be idle later.
        """
        generation = self.settings.generation
        if not isinstance(generation, VllmGenerationConfig):
            return self.settings
        sequences, engines = self.config.num_sequences_per_step, generation.num_engines
        share = sequences if engines == 1 else ceil(_UNEVEN_SHARE * sequences / engines)
        limits = {"max_num_seqs": min(generation.max_num_seqs, share)}
        sampling = generation.model_copy(update=limits)
        return self.settings.model_copy(update={"generation": sampling})

    def _sample_rollouts(self, prompts: list[Prompt]) -> tuple[RemoteRollouts, dict[str, float]]:
        """Returns the step's rollouts, most of which were sampled while earlier steps trained.

        Environments, rewards and further draws also run during training, except for models that
        score on the trainer's GPU. The engine receives the weights of the step before while it
        generates, and begins the prompts of all steps that `max_staleness` now allows. Prompts are
        submitted before the transfer, so that the engine is never idle. The first transfer is the
        exception: a proof checks the engine before it gets requests.
        """
        if not isinstance(self.sampler, StreamingSampler):
            return super()._sample_rollouts(prompts)
        stream, engine = self._stream, self.sampler.streaming
        if engine is None:
            return self._sample_batches(prompts)
        assert isinstance(stream, RolloutStream)
        policy, version = cast("Policy", self.policy), self.step - 1
        if self.step in self._sampled:
            with self.timer.phase("rollout"), stream.exclusive():
                self._begin_steps(stream, next_version=version)
                engine.finish_first(self.step)
        with self.timer.phase("sync"), stream.exclusive():
            engine.update_weights(policy, weight_version=version, checks_later=True)
        with self.timer.phase("rollout"):
            self._begin_steps(stream)
        with self.timer.phase("sync"):
            engine.check_update()  # while the engine samples
            self._agreement = engine.agreement
            if self.sampler.scores_on_a_gpu:
                self._release_policy()  # which the check has loaded again
        with self.timer.phase("rollout"), self._gpu_released():
            stream.take(self.step)
        sampled = self._sampled.pop(self.step)
        self._environment_metrics += sampled.environment_metrics
        return sampled.draws.rollouts(), sampled.draws.metrics()

    def _sample_batches(self, prompts: list[Prompt]) -> tuple[RemoteRollouts, dict[str, float]]:
        """Returns the step's rollouts, from an engine that completes one batch at a time.

        The engine gets the weights of the step before, and samples the steps that `max_staleness`
        now allows while this one is trained. The first step, and each step without staleness, is
        sampled as in `GRPOTrainer`. Other steps have no tokens of the current weights for the gate
        to compare, so a proof checks the engine.
        """
        sampler, stream = self.sampler, self._stream
        assert sampler is not None and isinstance(stream, BatchStream)
        with self.timer.phase("rollout"):
            if sampler.scores_on_a_gpu:
                self._release_policy()
            stream.finish()
        sampler.engine.weight_version, self._agreement = self.step - 1, nan
        sampled = self._finished_step(stream)
        if sampled is None:
            rollouts, metrics = super()._sample_rollouts(prompts)
        else:
            with self.timer.phase("sync"):
                self._update_weights(sampler, last_step=self.step - 1)
                if sampler.engine.has_logprobs and not self._policy_samples:
                    self._agreement = sampler.generation.prove(cast("Policy", self.policy))
                self._finish_generation(sampler)
            self._environment_metrics += sampled.environment_metrics
            rollouts, metrics = sampled.draws.rollouts(), sampled.draws.metrics()
        with self.timer.phase("rollout"):
            self._begin_batches(stream)
        return rollouts, metrics

    def _finished_step(self, stream: BatchStream) -> _SampledStep | None:
        """Returns the current step; None if it was not begun, or its sampling lost a worker."""
        sampled = self._sampled.pop(self.step, None)
        if sampled is not None:
            try:
                stream.take(self.step)
            except WorkerLostError as lost:
                _LOG.warning("%s; step %d is sampled again", lost.problem, self.step)
                return None
        return sampled

    def _begin_batches(self, stream: BatchStream) -> None:
        """Begins later steps with the current weights.

        A custom policy or engine samples in this process before training, since it draws from the
        random number generator of the process. So does an engine without logprobs, which the
        policy computes before it is trained.
        """
        assert self.sampler is not None
        has_workers = isinstance(self.sampler.generation, Generation)
        while_training = has_workers and self.sampler.engine.has_logprobs
        for step, prompts in self._steps_to_begin(first=self.step + 1):
            stream.begin(prompts, step=step, while_training=while_training)
        if not while_training and self.config.dynamic_sampling is not None:
            stream.finish()  # further draws

    def _roll_out_ahead(
        self, prompts: Sequence[Prompt], *, step: int, first_group: int, while_training: bool
    ) -> Sequence[Rollout]:
        """Rolls out prompts of a later step; does not restart workers while the policy trains."""
        sampler = self.sampler
        assert sampler is not None
        if not while_training:
            self._release_policy()
        sampler.generation.may_restart = not while_training
        try:
            rollouts = sampler.engine.run(
                prompts,
                num_generations_per_prompt=self._group_size,
                step=step,
                first_group=first_group,
                releases_memory=True,
            )
        finally:
            sampler.generation.may_restart = True
        if sampler.engine.has_logprobs:
            return rollouts
        if while_training:
            raise ConfigError(
                f"the engine has returned no logprobs for some completions of step {step}",
                expected="logprobs of all completions, as in the first step, or of none",
                fix="return them always or never, or leave out asynchronous",
            )
        return self._with_policy_logprobs(rollouts)

    def _record(
        self, rollouts: Sequence[Rollout], trained: BatchedDataDict | None = None
    ) -> dict[str, float]:
        """Makes the stream process completions of the next step while this step is recorded.

        Afterwards, calls of the engine block until it has new weights and requests.
        """
        if self.sampler is not None and isinstance(self._stream, RolloutStream):
            self._stream.poll_soon()
        return super()._record(rollouts, trained)

    @contextmanager
    def _gpu_released(self) -> Iterator[None]:
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
        # Turns were scored when they ended; `score` only counts their failures.
        has_turns = sampler.plays_episodes
        turn = self._gpu_turn if sampler.scores_on_a_gpu and not has_turns else nullcontext()
        with turn, nullcontext() if has_turns else self._stream.environment_alone():
            scored = sampler.score(rollouts)
        with self._stream.environment_alone():
            scored, metrics = sampler.post_process(scored)
        sampled.environment_metrics.append((len(scored.valid().episodes()), metrics))
        sampled.draws.add(scored)
        if not sampled.draws.wants_more:
            return None
        return self._further_prompts(step=step, num_draws=sampled.draws.num_draws)

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        """Updates the weights before a validation; samples then continue with the new weights.

        An engine that completes batches gets all its weights here.
        """
        assert isinstance(sampler, StreamingSampler)
        if sampler.streaming is None:
            super()._update_weights(sampler, last_step=last_step)
            return
        with self._stream.exclusive():
            sampler.streaming.update_weights(cast("Policy", self.policy), weight_version=last_step)

    def _validate(self) -> dict[str, float]:
        if self.sampler is None or not self._held_out:
            return {}
        with self._stream.environment_alone(), self._stream.exclusive():
            return super()._validate()

    def _begin_steps(self, stream: RolloutStream, *, next_version: int | None = None) -> None:
        """Requests all steps that may be sampled with the current weights, or with the next."""
        for step, prompts in self._steps_to_begin(first=self.step):
            stream.begin(
                prompts,
                num_generations_per_prompt=self._group_size,
                step=step,
                next_version=next_version,
            )

    def _steps_to_begin(self, *, first: int) -> Iterator[tuple[int, list[Prompt]]]:
        """Yields the steps that may be sampled with the current weights, with their prompts."""
        last = min(self.step + self._max_staleness, self._last_step)
        for step in range(max(self._last_begun + 1, first), last + 1):
            prompts = self._batches.batch(step - 1)
            draws = StepDraws(self._sampling, self.config.advantage, num_prompts=len(prompts))
            self._sampled[step] = _SampledStep(draws)
            self._last_begun = step
            yield step, prompts

    def _checked_by_gate(
        self, data: BatchedDataDict, computed: Computed
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """Adds the error of the proof of the engine's last weights.

        Without tokens of the current weights there is no `token_mult_prob_error`.
        """
        data, metrics = super()._checked_by_gate(data, computed)
        if not metrics["token_mult_prob_error"]:
            del metrics["token_mult_prob_error"]
        if not isnan(self._agreement):
            metrics["handover_mult_prob_error"] = self._agreement
        return data, metrics
