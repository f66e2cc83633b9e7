"""What algorithms share that learn from completions of their own policy.

They sample, score and record rollouts, and take several optimizer steps on those of one step.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, Generic, TypeVar, cast

from torch import Tensor

from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings
from nemo_rl_core.data.lengths import refuse_long_rollouts
from nemo_rl_core.data.loader import PromptLoader, load_prompts
from nemo_rl_core.data.pretrained import (
    context_length,
    load_tokenizer,
    sampling_length,
    stop_token_ids,
)
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import plan_microbatches
from nemo_rl_core.environments.needs import refuse_incomplete_rows
from nemo_rl_core.environments.rewards.retries import num_retries
from nemo_rl_core.evals.evaluate import greedy_rollouts
from nemo_rl_core.evals.metrics import accuracy_metrics
from nemo_rl_core.functional.protocols import LossFunction
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.own import OwnGeneration
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.policy.own import OwnPolicy
from nemo_rl_core.rollouts.batch import refuse_too_many_failures, valid_rollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.sampler import Sampler, mean_metrics
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.loop import RunSpec
from nemo_rl_core.trainers.sections import Gated, samples_per_step
from nemo_rl_core.types import Prompt, Rollout

R = TypeVar("R", bound=RolloutSettings)
C = TypeVar("C", bound=LoopConfig)


class RolloutTrainer(BaseTrainer[R, C], Generic[R, C]):
    """A trainer with an engine that samples from the policy, and a scorer.

    The algorithm's section names `num_prompts_per_step` and `num_generations_per_prompt`.

    Attributes:
        sampler: The engine, with the weights that the last `_roll_out` gave it, and the scorer;
            None where recorded rollouts are trained on again.
        records: Where each step's rollouts are written.
    """

    sampler_class: ClassVar[type[Sampler]] = Sampler

    sampler: Sampler | None
    records: RolloutRecords
    _replayed: RolloutRecords | None
    _held_out: Sequence[Prompt]
    _num_restarts: tuple[int, int]
    _num_retries = 0
    _of_environment: list[tuple[int, dict[str, float]]]

    def _policy_methods(self) -> dict[str, str]:
        return {"generate": "completions, unless there is an engine: generation=engine"}

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        self._check_context(spec.start)
        super()._set_up(spec, resources)
        self.records = RolloutRecords(spec.work / "rollouts")
        resources.callback(self.records.finish)
        self._replayed = RolloutRecords(spec.replay) if spec.replay is not None else None
        self.sampler, self._held_out, self._num_restarts = None, [], (0, 0)
        self._of_environment = []
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
                generation=self._own_generation(spec),
            )
        )
        if self._own.engine is None and isinstance(self.sampler.generation, Generation):
            self._finish_generation(self.sampler)  # an engine is awake when it has started
        self._num_restarts = self.sampler.num_restarts  # a scorer may have served others before
        self._num_retries = num_retries()
        if spec.validation is not None:
            self._held_out = load_prompts(spec.validation, self.sampler.tokenizer)

    def _before_save(self) -> None:
        self.records.finish()

    def _sampler_settings(self) -> RolloutSettings:
        """What the sampler and its engines are started with."""
        return self.settings

    def _make_policy(self, spec: RunSpec) -> Policy | OwnPolicy:
        made = super()._make_policy(spec)
        if isinstance(made, OwnPolicy):
            return OwnPolicy(made.policy, temperature=self.settings.generation.temperature)
        return made

    def _own_generation(self, spec: RunSpec) -> Generation | OwnGeneration | None:
        """The engine of the user's, or the policy's own generation; None for one to be started."""
        engine = self._own.engine or (self.policy if isinstance(self.policy, OwnPolicy) else None)
        if engine is None or isinstance(engine, Generation):
            return engine
        return OwnGeneration(
            engine,
            self.settings.generation,
            stop_token_ids=stop_token_ids(spec.start, load_tokenizer(spec.start)),
        )

    def _check_context(self, model_folder: Path) -> None:
        """Before any worker starts: vLLM says the same a minute later, and less plainly."""
        prompt, new = self.settings.max_prompt_tokens, self.settings.max_rollout_tokens
        refuse_long_rollouts(
            prompt,
            new,
            settings="max_prompt_tokens + max_new_tokens (or rollouts.max_rollout_tokens)",
            limit=sampling_length(model_folder),
            context=context_length(model_folder),
        )
        # Raises where the longest sequence that can come up would fit into no micro-batch.
        plan_microbatches([prompt + new], max_tokens=self.config.max_tokens_per_microbatch)

    def _load(self, spec: RunSpec) -> PromptLoader[Prompt]:
        prompts = load_prompts(spec.train, load_tokenizer(spec.start))
        if spec.replay is None:
            scored_by = spec.scorer or self.settings.environment
            refuse_incomplete_rows(prompts, scored_by, name="train")
        size = samples_per_step(self.config).num_prompts_per_step
        return PromptLoader(prompts, batch_size=size, seed=self.settings.seed)

    def _roll_out(self, prompts: list[Prompt], *, first_place: int = 0) -> Sequence[Rollout]:
        """Gives the engine the policy's weights, rolls every prompt out, and scores.

        Args:
            prompts: `P` prompts.
            first_place: Of the first one within the step, where a step rolls out more than once.

        Returns:
            `P * G` rollouts; those of one prompt lie next to each other. Some may have an error
            instead of a reward. Of a replayed run, what was recorded at this step.

        Raises:
            RewardError: If too many could not be scored.
        """
        if self.sampler is None:
            return self._recorded()
        with self.timer.phase("sync"):
            self._update_weights(self.sampler, last_step=self.step - 1)
        with self.timer.phase("rollout"):
            rollouts = self._run(self.sampler, prompts, first_place)
        return self._scored(self.sampler, rollouts)

    def _run(self, sampler: Sampler, prompts: list[Prompt], first_place: int) -> Sequence[Rollout]:
        """The engine's rollouts, with their tokens here or where they are made."""
        engine, size = sampler.engine, samples_per_step(self.config).num_generations_per_prompt
        if self._holds_rollouts and engine.holds:
            self._release_policy()
            return engine.run_held(
                prompts,
                num_generations_per_prompt=size,
                step=self.step,
                first_place=first_place,
                discards_weights=self._discards_weights,
            )
        with self._awake(sampler):
            return engine.run(
                prompts, num_generations_per_prompt=size, step=self.step, first_place=first_place
            )

    @property
    def _holds_rollouts(self) -> bool:
        """Whether tokens stay with an engine that can keep them, since nothing here reads them."""
        return False

    def _scored(self, sampler: Sampler, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """With rewards, as the environment adapts them to all rollouts of the draw."""
        with self.timer.phase("reward"):
            scored, metrics = sampler.post_process(sampler.score(rollouts))
        self._of_environment.append((len(valid_rollouts(scored)), metrics))
        return scored

    def _record(
        self, rollouts: Sequence[Rollout], *, advantages: Tensor | None = None
    ) -> dict[str, float]:
        """Writes the step's rollouts; returns the environment's metrics of all that were drawn."""
        found, self._of_environment = mean_metrics(self._of_environment), []
        self.records.save(self.step, rollouts, advantages=advantages, environment_metrics=found)
        return {f"environment_{name}": value for name, value in found.items()}

    def _update_weights(self, sampler: Sampler, *, last_step: int) -> None:
        """Gives the engine the policy's weights, as they are after that step."""
        sampler.generation.update_weights(cast("Policy", self.policy))

    @contextmanager
    def _awake(self, sampler: Sampler) -> Iterator[None]:
        """Engine and trainer share a GPU: its memory is the engine's only while it generates.

        After the update of weights, which wakes the engine as well: they have a place then.
        """
        self._release_policy()
        sampler.generation.prepare_for_generation()
        yield
        self._finish_generation(sampler)

    def _release_policy(self) -> None:
        """Before an engine generates: a proof may have called the policy's weights back."""
        if isinstance(self.policy, Policy) and self.policy.offloads_weights:
            self.policy.release_memory()

    def _finish_generation(self, sampler: Sampler) -> None:
        sampler.generation.finish_generation(discards_weights=self._discards_weights)

    @property
    def _discards_weights(self) -> bool:
        """Every use of an engine begins with new weights; the user's own may have other uses."""
        return self._own.engine is None

    def _recorded(self) -> list[Rollout]:
        assert self._replayed is not None
        rollouts = self._replayed.load(self.step)
        self._of_environment = [(1, self._replayed.environment_metrics(self.step))]
        limit = self.settings.rollouts.max_failed_fraction
        refuse_too_many_failures(rollouts, max_failed_fraction=limit)
        return rollouts

    def _validate(self) -> dict[str, float]:
        """Greedy accuracy and mean reward on the held-out prompts."""
        if self.sampler is None or not self._held_out:
            return {}
        self._update_weights(self.sampler, last_step=self.step)
        with self._awake(self.sampler):
            drawn = greedy_rollouts(self.sampler, self._held_out)
        return accuracy_metrics(self.sampler.score(drawn))

    def _replacements(self) -> dict[str, float]:
        """Restarts of the engine, replaced actors and retried rewards of this step."""
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
        own = super()._peak_memory_gib()
        return own if self.sampler is None else own + self.sampler.generation.peak_memory_gib()


_STEP_METRICS = frozenset({"grad_norm", "learning_rate"})
"""Figures of an optimizer step as such, each of which counts once."""


def train_in_parts(
    policy: PolicyInterface,
    batch: BatchedDataDict,
    loss_fn: LossFunction,
    *,
    size: int | None,
    sequence_means: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """One optimizer step on each of consecutive parts of the batch.

    Rollouts that could not be scored may leave fewer rows than were asked for. There are then as
    many parts as come nearest to `size` rows each, and their sizes differ by at most one: a part of
    a few rows would make a whole optimizer step of their noise. Every row is in exactly one part.

    Args:
        policy: What is trained.
        batch: `B` rows.
        loss_fn: The loss.
        size: Rows a part; None takes all at once.
        sequence_means: The metrics of the loss that are means over sequences, not over tokens.

    Returns:
        The parts' metrics as `combined` has them.
    """
    parts, num_sequences, start = [], [], 0
    for rows in _part_sizes(batch.size, size):
        part = batch.slice(start, start + rows)
        parts.append(policy.train(part, loss_fn))
        num_sequences.append(float(part["sample_mask"].sum()))
        start += rows
    by_sequence = _means(parts, num_sequences)
    means = combined(parts)
    return {
        name: by_sequence[name] if name in sequence_means else mean for name, mean in means.items()
    }


def combined(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several optimizer steps as if they were one.

    A metric is a mean over tokens, so that each step counts by its `num_valid_tokens`, which are
    summed; `grad_norm` and `learning_rate` are means over the steps.
    """
    num_tokens = [part["num_valid_tokens"] for part in parts]
    by_token, by_step = _means(parts, num_tokens), _means(parts, [1.0] * len(parts))
    means = {name: (by_step if name in _STEP_METRICS else by_token)[name] for name in by_step}
    return {**means, "num_valid_tokens": sum(num_tokens)}


def num_parts(num_rows: int, size: int | None) -> int:
    """How many optimizer steps `train_in_parts` takes."""
    return 1 if size is None else max((2 * num_rows + size) // (2 * size), 1)


def _part_sizes(num_rows: int, size: int | None) -> list[int]:
    count = num_parts(num_rows, size)
    least, longer = divmod(num_rows, count)
    return [least + 1] * longer + [least] * (count - longer)


def _means(parts: Sequence[dict[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """Weighted means; 0 where nothing has a weight, as the mean of no tokens is in a loss."""
    total = sum(weights) or 1.0
    return {
        name: sum(weight * part[name] for part, weight in zip(parts, weights, strict=True)) / total
        for name in parts[0]
    }
