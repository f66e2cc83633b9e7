"""GRPO with an engine that samples while the model trains."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
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
from nemo_rl_core.models.validation import agreement
from nemo_rl_core.rollouts.batch import valid_rollouts
from nemo_rl_core.rollouts.sampler import Sampler
from nemo_rl_core.rollouts.streaming_sampler import StreamingSampler
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.own import OwnParts
from nemo_rl_core.types import Prompt, Rollout

_UNEVEN_SHARE = 1.25
"""Of a step's sequences, an engine may get so many times its equal share."""


@dataclass
class _SampledStep:
    """A step whose completions are sampled while an earlier one trains.

    Attributes:
        draws: Those that were scored.
        of_environment: The number of scored rollouts, and the environment's metrics, of each draw.
    """

    draws: StepDraws
    of_environment: list[tuple[int, dict[str, float]]] = field(default_factory=list)


class AsyncGRPOTrainer(GRPOTrainer):
    """As `GRPOTrainer`, but the rollouts of a step begin before the step does.

    Steps are trained in order, on the prompts that `GRPOTrainer` would give them; with
    `max_staleness: 0` the weights are equal to the bit. Beyond that, which weights drew which token
    depends on time. Every token's version is recorded, and a replay of the records repeats the
    run to the bit.
    """

    sampler_class = StreamingSampler
    refuses_own: ClassVar[Mapping[str, str]] = {
        "policy": "the engine samples while a training backend's workers train",
        "engine": "it takes weights while it generates, as VllmGeneration does with "
        "async_engine: true",
    }
    samples_ahead = True

    @classmethod
    def _refuse_unfit(cls, own: OwnParts) -> None:
        if isinstance(own.engine, StreamingGeneration):
            own = replace(own, engine=None)
        super()._refuse_unfit(own)

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        super()._set_up(spec, resources)
        self._last_step = self._steps(spec).last
        self._last_begun = 0
        settings = self.config.asynchronous
        assert settings is not None  # checked in super()._set_up
        self._max_staleness = settings.max_staleness
        if isinstance(self.sampler, StreamingSampler):
            # Of the trainer, but while it waits for rollouts. A model that scores on its GPU has
            # memory there only then: gradients and caches were given back before the last transfer.
            self._gpu_turn = threading.Lock()
            self._gpu_turn.acquire()
            resources.callback(self._gpu_turn.release)
            self._sampled: dict[int, _SampledStep] = {}
            self._stream = self.sampler.stream(
                seed=self.settings.seed,
                timeout_seconds=settings.step_timeout_seconds,
                holds=self._holds_rollouts,
                on_draw=self._score_draw,
            )

    def _sampler_settings(self) -> RolloutSettings:
        """With engines that compute no more sequences at once than one step has for each.

        They take requests in their order. With more at once, those of the step after would slow
        down those that the trainer waits for, and the engines would have too little to do later.
        """
        generation = self.settings.generation
        assert isinstance(generation, VllmGenerationConfig)  # others were refused
        sequences, engines = self.config.num_sequences_per_step, generation.num_engines
        most = sequences if engines == 1 else ceil(_UNEVEN_SHARE * sequences / engines)
        limits = {"max_num_seqs": min(generation.max_num_seqs, most)}
        sampling = generation.model_copy(update=limits)
        return self.settings.model_copy(update={"generation": sampling})

    def _sample_rollouts(self, prompts: list[Prompt]) -> tuple[Sequence[Rollout], dict[str, float]]:
        """The step's rollouts, most of them made while earlier steps were trained.

        Environments answer, rewards are computed and further draws begin meanwhile, too, so that
        none of that waits for the trainer, but for models that score on its GPU. The engine takes
        over the weights of the step before, in the middle of whatever it generates, and begins the
        prompts of steps that are now near enough. It has them before, so that it need not wait; but
        for the first weights, which it proves before it gets requests.
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
                self._release_policy()  # which the check has called back
        with self.timer.phase("rollout"), self._gpu_given_up():
            self._stream.take(self.step)
        sampled = self._sampled.pop(self.step)
        self._of_environment += sampled.of_environment
        return sampled.draws.rollouts(), sampled.draws.metrics()

    def _record(
        self, rollouts: Sequence[Rollout], *, advantages: Tensor | None = None
    ) -> dict[str, float]:
        """Beside it, the stream hands out what the engine has completed for the next step.

        Later, calls of the engine would wait until it has new weights and requests.
        """
        if isinstance(self.sampler, StreamingSampler):
            self._stream.look()
        return super()._record(rollouts, advantages=advantages)

    @contextmanager
    def _gpu_given_up(self) -> Iterator[None]:
        self._gpu_turn.release()
        try:
            yield
        finally:
            self._gpu_turn.acquire()

    def _score_draw(self, step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        """Scores a draw beside the trainer's thread; the environment need not bear two calls.

        Returns:
            The prompts of the step's next draw; None where it needs none.
        """
        sampled, sampler = self._sampled[step], self.sampler
        assert sampler is not None
        # Turns were scored as they ended: failures count though the environment does not return.
        has_turns = sampler.environment is not None
        turn = self._gpu_turn if sampler.scores_on_a_gpu and not has_turns else nullcontext()
        with turn, nullcontext() if has_turns else self._stream.environment_alone():
            scored = sampler.score(rollouts)
        with self._stream.environment_alone():
            scored, metrics = sampler.post_process(scored)
        sampled.of_environment.append((len(valid_rollouts(scored)), metrics))
        sampled.draws.add(scored)
        if not sampled.draws.wants_more:
            return None
        return self._further_prompts(step=step, num_draws=sampled.draws.num_draws)

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        """Before a validation, in whose wake samples go on with the new weights."""
        assert isinstance(sampler, StreamingSampler)
        with self._stream.exclusive():
            sampler.generation.update_weights(cast("Policy", self.policy), weight_version=last_step)

    def _validate(self) -> dict[str, float]:
        if self.sampler is None or not self._held_out:
            return {}
        with self._stream.exclusive(with_environment=True):
            return super()._validate()

    def _begin_steps(self, *, next_version: int | None = None) -> None:
        """Asks for every step that may be sampled with the weights of now, or with the next."""
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

    def _check_consistency(
        self, batch: BatchedDataDict
    ) -> tuple[BatchedDataDict, dict[str, float]]:
        """Engine and trainer must agree on tokens of the trainer's own weights; of older, not.

        So there may be none to compare; the proof at each transfer of weights needs none.
        """
        if "weight_versions" not in batch:
            return super()._check_consistency(batch)
        age = self.step - 1 - batch["weight_versions"]
        mask = batch["token_mask"].bool()
        current = BatchedDataDict({**batch, "token_mask": mask & (age == 0)})
        checked, metrics = super()._check_consistency(current)
        metrics |= {
            "staleness": float(age[mask].float().mean()),
            "staleness_max": float(age[mask].max()),
        }
        metrics = self._with_proof(metrics)
        return BatchedDataDict({**checked, "token_mask": batch["token_mask"]}), metrics

    def _agreement(self) -> Callable[[BatchedDataDict], dict[str, float]]:
        return partial(agreement, gate=self.config.gate, version=self.step - 1)

    def _agreement_metrics(self, parts: Sequence[dict[str, float]]) -> dict[str, float] | None:
        metrics = super()._agreement_metrics(parts)
        return None if metrics is None else self._with_proof(metrics)

    def _with_proof(self, metrics: dict[str, float]) -> dict[str, float]:
        """With that of the engine's last weights, and without an error of no token."""
        if not metrics["token_mult_prob_error"]:
            del metrics["token_mult_prob_error"]
        if isinstance(self.sampler, StreamingSampler):
            metrics["handover_mult_prob_error"] = self.sampler.generation.agreement
        return metrics
