"""Base of trainers that learn from completions of their policy.

They sample, score and record rollouts, and make one or more optimizer steps per step.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor

from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings
from nemo_rl_core.data.lengths import refuse_long_rollouts
from nemo_rl_core.data.loader import PromptLoader
from nemo_rl_core.data.pretrained import (
    context_length,
    load_tokenizer,
    sampling_length,
)
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import plan_microbatches
from nemo_rl_core.environments.needs import refuse_incomplete_rows
from nemo_rl_core.environments.rewards.retries import num_retries
from nemo_rl_core.errors import ConfigError, DataError
from nemo_rl_core.evals.evaluate import greedy_rollouts
from nemo_rl_core.evals.metrics import accuracy_metrics
from nemo_rl_core.functional.masked import num_trained_sequences
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.rollouts.batch import (
    mean_advantages,
    refuse_too_many_failures,
    rollout_batch,
    with_logprobs_of,
)
from nemo_rl_core.rollouts.prompts import load_sampled_prompts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.rollouts.sampler import Sampler, mean_metrics
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.sections import Gated, samples_per_step
from nemo_rl_core.types import Prompt, Rollout

R = TypeVar("R", bound=RolloutSettings)
C = TypeVar("C", bound=LoopConfig)

_LOG = logging.getLogger(__name__)
_COMPARISONS = ("token_mult_prob_error", "kl_generation_trainer", "sampling_importance_ratio")


class RolloutTrainer(BaseTrainer[R, C], Generic[R, C]):
    """A trainer with an engine that samples from the policy, and a scorer.

    The algorithm's section names `num_prompts_per_step` and `num_generations_per_prompt`.

    Attributes:
        sampler: The engine, with the weights of the last `_roll_out`, and the scorer; None in a
            replay of recorded rollouts.
        records: Records of each step's rollouts.
    """

    sampler_class: ClassVar[type[Sampler]] = Sampler

    sampler: Sampler | None
    records: RolloutRecords
    _replayed: RolloutRecords | None
    _held_out: Sequence[Prompt]
    _num_restarts: tuple[int, int]
    _num_retries: int
    _engine_returns_logprobs = True  # until it returns none
    _group_size: int
    _environment_metrics: list[tuple[int, dict[str, float]]]

    def _policy_methods(self) -> dict[str, str]:
        return {"generate": "completions, unless there is an engine: generation=engine"}

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        self._check_context(spec.start)
        self._group_size = samples_per_step(self.config).num_generations_per_prompt
        super()._set_up(spec, resources)
        self.records = RolloutRecords(spec.work / "rollouts")
        resources.callback(self.records.finish)
        self._replayed = RolloutRecords(spec.replay) if spec.replay is not None else None
        self.sampler, self._held_out, self._num_restarts = None, [], (0, 0)
        self._num_retries = num_retries()  # also of earlier runs in this process
        self._environment_metrics = []
        if self._replayed is not None:
            return
        if isinstance(self.policy, Policy):
            self.policy.release_memory()  # an engine takes its share of the GPU when it starts
        self.sampler = resources.enter_context(
            self.sampler_class(
                self.session,
                self._sampler_settings(),
                spec.start,
                scorer=spec.scorer,
                reward_model=spec.reward_model,
                gate=self.config.gate if isinstance(self.config, Gated) else None,
                generation=self._custom_engine,
            )
        )
        if self._custom.engine is None and isinstance(self.sampler.generation, Generation):
            self._finish_generation(self.sampler)  # an engine is awake when it has started
        self._num_restarts = self.sampler.num_restarts  # a scorer may have been used before
        if spec.validation is not None:
            self._held_out = self._prompts(spec, spec.validation)

    def _choices(self) -> dict[str, str]:
        choices = super()._choices()
        if self.sampler is not None and self.sampler.plays_episodes:
            with suppress(DataError):  # an agent of one turn may have a template for one turn
                if Renderer(self.sampler.tokenizer).rewrites_history:
                    kept = self.settings.rollouts.history
                    choices["rollouts.history"] = f"{kept}: the chat template rewrites past turns"
        return choices

    def _before_save(self) -> None:
        self.records.finish()

    def _sampler_settings(self) -> RolloutSettings:
        return self.settings

    def _make_policy(self, spec: RunSpec) -> Policy | CustomPolicyAdapter:
        policy = super()._make_policy(spec)
        if isinstance(policy, CustomPolicyAdapter):
            return CustomPolicyAdapter(
                policy.policy, temperature=self.settings.generation.temperature
            )
        return policy

    @property
    def _custom_engine(self) -> GenerationInterface | CustomPolicyAdapter | None:
        """A custom engine, or a custom policy that generates; None to start an engine."""
        policy = self.policy if isinstance(self.policy, CustomPolicyAdapter) else None
        return self._custom.engine or policy

    @property
    def _policy_samples(self) -> bool:
        """Whether a custom policy samples itself, without an engine."""
        return self._custom.policy is not None and self._custom.engine is None

    def _check_context(self, model_folder: Path) -> None:
        """Checks lengths before any worker starts; vLLM would fail a minute later, less clearly."""
        prompt, new = self.settings.max_prompt_tokens, self.settings.max_rollout_tokens
        refuse_long_rollouts(
            prompt,
            new,
            settings="max_prompt_tokens + max_new_tokens (or rollouts.max_rollout_tokens)",
            limit=sampling_length(model_folder),
            context=context_length(model_folder),
        )
        # Raises an error if the longest possible sequence does not fit into a micro-batch.
        plan_microbatches([prompt + new], max_tokens=self.config.max_tokens_per_microbatch)

    def _prompts(self, spec: RunSpec, folder: Path) -> Sequence[Prompt]:
        return load_sampled_prompts(
            folder,
            load_tokenizer(spec.start),
            spec.scorer or self.settings.environment,
            max_prompt_tokens=self.settings.max_prompt_tokens,
        )

    def _load(self, spec: RunSpec) -> PromptLoader[Prompt]:
        prompts = self._prompts(spec, spec.train)
        if spec.replay is None:
            scored_by = spec.scorer or self.settings.local_environment
            refuse_incomplete_rows(prompts, scored_by, name="train")
        size = samples_per_step(self.config).num_prompts_per_step
        return PromptLoader(prompts, batch_size=size, seed=self.settings.seed)

    def _roll_out(self, prompts: list[Prompt], *, first_group: int = 0) -> RemoteRollouts:
        """Updates the engine's weights, rolls out every prompt, and scores.

        Args:
            prompts: `P` prompts.
            first_group: Index of the first prompt within the step, if a step draws more than once.

        Returns:
            `P * G` rollouts, grouped by prompt. Some may have an error instead of a reward. In a
            replay, the recorded rollouts of this step.
        """
        if self.sampler is None:
            return self._recorded()
        with self.timer.phase("sync"):
            self._update_weights(self.sampler, last_step=self.step - 1)
        with self.timer.phase("rollout"):
            self._release_policy()
            rollouts: Sequence[Rollout] = self.sampler.engine.run(
                prompts,
                num_generations_per_prompt=self._group_size,
                step=self.step,
                first_group=first_group,
                releases_memory=True,
                discards_weights=self._custom.engine is None,
            )
        has_gate = isinstance(self.config, Gated)
        if has_gate and not self.sampler.engine.has_logprobs:
            with self.timer.phase("logprobs"):
                rollouts = self._with_policy_logprobs(rollouts)
        with self.timer.phase("reward"):
            scored, metrics = self.sampler.post_process(self.sampler.score(rollouts))
        self._environment_metrics.append((len(scored.valid().episodes()), metrics))
        return scored

    def _with_policy_logprobs(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        if self._engine_returns_logprobs:
            self._engine_returns_logprobs = False
            _LOG.warning(
                "the engine returns no logprobs, so the policy computes them: the gate has nothing "
                "to compare, and nothing checks that the engine samples with the policy's weights"
            )
        completed = with_logprobs_of(self.policy, rollouts)
        self._release_policy()  # a model may score on the same GPU
        return completed

    def _batch(self, rollouts: RemoteRollouts) -> BatchedDataDict:
        """Returns the scored rollouts as a batch with `group_ids [B]`.

        A custom policy gets local tensors here; other policies read remote columns in their ranks.
        """
        valid = rollouts.valid()
        batch = rollout_batch(valid)
        # Groups are numbered within the step: a prompt may be sampled twice.
        batch["group_ids"] = torch.from_numpy(valid.group)
        return batch if isinstance(self.policy, Policy) else batch.fetched()

    def _record(
        self, rollouts: Sequence[Rollout], trained: BatchedDataDict | None = None
    ) -> dict[str, float]:
        """Writes the step's rollouts; returns the environment's metrics of all draws.

        Args:
            trained: Batch of the valid rollouts with `advantages` and `prev_logprobs`, if the
                algorithm computes them.
        """
        metrics, self._environment_metrics = mean_metrics(self._environment_metrics), []
        columns = {}
        if trained is not None:
            columns["advantages"] = mean_advantages(trained)
            if self._engine_returns_logprobs:  # else these are the policy's, too
                columns["trainer_logprobs"] = trained["prev_logprobs"]
        self.records.save(self.step, rollouts, **columns, environment_metrics=metrics)
        return {f"environment_{name}": value for name, value in metrics.items()}

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        sampler.generation.update_weights(cast("Policy", self.policy))

    @contextmanager
    def _awake(self, sampler: Sampler) -> Iterator[None]:
        """Gives the shared GPU's memory to the engine while it generates.

        Enter it after the update of weights, which wakes the engine and needs memory for them.
        """
        self._release_policy()
        sampler.generation.prepare_for_generation()
        yield
        self._finish_generation(sampler)

    def _release_policy(self) -> None:
        """Frees GPU memory before generation: a proof may have loaded the policy's weights."""
        if isinstance(self.policy, Policy) and self.policy.offloads_weights:
            self.policy.release_memory()

    def _finish_generation(self, sampler: Sampler) -> None:
        # The next use brings new weights. A custom engine's owner may use it elsewhere, too.
        sampler.generation.finish_generation(discards_weights=self._custom.engine is None)

    def _recorded(self) -> RemoteRollouts:
        assert self._replayed is not None
        rollouts = RemoteRollouts.of(self._replayed.load(self.step))
        self._environment_metrics = [(1, self._replayed.environment_metrics(self.step))]
        limit = self.settings.rollouts.max_failed_fraction
        refuse_too_many_failures(rollouts, max_failed_fraction=limit)
        return rollouts

    def _validate(self) -> dict[str, float]:
        if self.sampler is None or not self._held_out:
            return {}
        self._update_weights(self.sampler, last_step=self.step)
        with self._awake(self.sampler):
            drawn = greedy_rollouts(self.sampler, self._held_out)
        return accuracy_metrics(RemoteRollouts.of(self.sampler.score(drawn)).episodes())

    def _restart_metrics(self) -> dict[str, float]:
        """Counts restarts of the engine, replaced actors and retried rewards of this step."""
        before, retries_before = self._num_restarts, self._num_retries
        self._num_retries = num_retries()
        if self.sampler is not None:
            self._num_restarts = self.sampler.num_restarts
        engine, environment = (
            now - then for now, then in zip(self._num_restarts, before, strict=True)
        )
        return {
            "num_engine_restarts": float(engine),
            "num_environment_restarts": float(environment),
            "num_reward_retries": float(self._num_retries - retries_before),
        }

    def _peak_memory_gib(self) -> float:
        policy = super()._peak_memory_gib()
        return (
            policy if self.sampler is None else policy + self.sampler.generation.peak_memory_gib()
        )


def without_comparison(metrics: dict[str, float]) -> dict[str, float]:
    """Removes metrics that compare engine and policy, for an engine that returns no logprobs."""
    kept = {name: value for name, value in metrics.items() if name not in _COMPARISONS}
    return {**kept, "num_compared_sequences": 0.0}


_STEP_METRICS = frozenset({"grad_norm", "learning_rate"})
"""Metrics of an optimizer step, which are not means over tokens."""


def train_in_parts(
    policy: PolicyInterface,
    batch: BatchedDataDict,
    loss_fn: LossFunction,
    *,
    size: int | None,
    sequence_means: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """Makes one optimizer step on each of several consecutive parts of `size` episodes.

    Failed rollouts may leave fewer rows than requested. The number of parts is then chosen so that
    their sizes are nearest to `size` and differ by at most one: an optimizer step on a few rows
    would be noisy. Every row is in exactly one part, with all rows of its episode, so that episodes
    with several training samples do not add optimizer steps; without `size` there is one part.
    `sequence_means` names metrics of the loss that are means over sequences, not over tokens.
    """
    parts, num_sequences, start = [], [], 0
    ends = _episode_ends(batch)
    for last in accumulate(_part_sizes(len(ends), size)):
        end = int(ends[last - 1]) if last else 0
        part = batch.slice(start, end)
        parts.append(policy.train(part, loss_fn))
        num_sequences.append(float(num_trained_sequences(part)))
        start = end
    by_sequence = _means(parts, num_sequences)
    means = combined(parts)
    return {
        name: by_sequence[name] if name in sequence_means else mean for name, mean in means.items()
    }


def combined(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merges the metrics of several optimizer steps as if they were one.

    Metrics are means over tokens, so that each step is weighted by its `num_valid_tokens`, which
    are summed; `grad_norm` and `learning_rate` are means over the steps.
    """
    num_tokens = [part["num_valid_tokens"] for part in parts]
    by_token, by_step = _means(parts, num_tokens), _means(parts, [1.0] * len(parts))
    means = {name: (by_step if name in _STEP_METRICS else by_token)[name] for name in by_step}
    return {**means, "num_valid_tokens": sum(num_tokens)}


def with_trained(metrics: dict[str, float], trained: dict[str, float]) -> dict[str, float]:
    """Adds the metrics of training; refuses names that other metrics of the step have."""
    if taken := sorted((metrics.keys() & trained.keys()) - {"num_valid_tokens"}):
        raise ConfigError(
            "the loss or the policy returned metrics with names that the trainer uses",
            expected=f"other names than {', '.join(sorted(metrics))}",
            got=", ".join(taken),
            fix="rename them",
        )
    return {**metrics, **trained}


def num_parts(batch: BatchedDataDict, size: int | None) -> int:
    """Returns the number of optimizer steps of `train_in_parts`."""
    return len(_part_sizes(len(_episode_ends(batch)), size))


def _episode_ends(batch: BatchedDataDict) -> Tensor:
    """Returns the number of rows up to the end of each episode, whose rows are adjacent."""
    if "episode_ids" not in batch:
        return torch.arange(1, batch.size + 1)
    ids: Tensor = batch["episode_ids"]
    ends: Tensor = torch.unique_consecutive(ids, return_counts=True)[1].cumsum(0)
    return ends


def _part_sizes(num_episodes: int, size: int | None) -> list[int]:
    count = 1 if size is None else max((2 * num_episodes + size) // (2 * size), 1)
    smaller, num_larger = divmod(num_episodes, count)
    return [smaller + 1] * num_larger + [smaller] * (count - num_larger)


def _means(parts: Sequence[dict[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Computes weighted means; 0 without weights, like the mean of no tokens in a loss.

    A metric that a part does not have is 0 there, as in a micro-batch.
    """
    total = sum(weights) or 1.0
    weighted = list(zip(parts, weights, strict=True))
    return {
        name: sum(weight * part.get(name, 0.0) for part, weight in weighted) / total
        for name in dict.fromkeys(name for part in parts for name in part)
    }
