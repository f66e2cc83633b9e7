"""The scorer of a run, which may need the run's cluster and engines on it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.environment import (
    EnvironmentWorkers,
    ModelScorer,
    has_reward_model,
    judges_of_the_run,
    model_scorers,
)
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.config.judge import JudgeModel
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.factory import make_remote_scorer, make_scorer
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.rewards.llm_judge import ChatModel
from nemo_rl_core.errors import DataError
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.interfaces import GenerationInterface


def scorer_of(
    session: ClusterSession,
    settings: RolloutSettings,
    model_folder: Path,
    reward_model: Path | None = None,
) -> Scorer:
    """Makes the scorer of the settings, in actors if the settings ask for them.

    Args:
        reward_model: Model for an environment `reward_model` that names none.
    """
    environment, workers = settings.environment, settings.environment_workers
    cluster, models = session.cluster, model_scorers(environment)
    has_own = any(each.dedicated_bundles for each in models)
    needs_actors = has_reward_model(environment) and not judges_of_the_run(environment)
    if cluster.use_gpus and workers is None and needs_actors and not has_own:
        workers = _WITH_A_MODEL
    if workers is not None:
        takes_gpus = cluster.use_gpus and (workers.use_gpus or needs_actors)
        return make_remote_scorer(
            environment,
            workers,
            reward_model,
            policy=model_folder,
            bundles=cluster if takes_gpus else None,
            isolation=settings.isolation.environment,
        )
    start = _Models(session, models, reward_model=reward_model, policy=model_folder)
    return make_scorer(
        environment,
        reward_model,
        policy=model_folder,
        start_judge=start.judge,
        start_reward_model=start.reward_model if cluster.use_gpus or has_own else None,
    )


_WITH_A_MODEL = EnvironmentWorkers(rows_per_call=64, call_timeout_seconds=600.0)
"""Workers of a reward model in actors if the settings name none."""


class _Models:
    """Starts the models that score, each group of workers once."""

    def __init__(
        self,
        session: ClusterSession,
        models: Sequence[ModelScorer],
        *,
        reward_model: Path | None,
        policy: Path,
    ) -> None:
        self._session, self._reward_model, self._policy = session, reward_model, policy
        self._models = {(each.config, each.max_new_tokens): each for each in models}
        self._in_own_actors: dict[str, Scorer] = {}

    def judge(self, config: JudgeModel, max_new_tokens: int) -> ChatModel:
        name = self._models[config, max_new_tokens].name
        return start_judge(self._session, config, max_new_tokens, name)

    def reward_model(self, config: RewardModelScore) -> Scorer:
        model, cluster = self._models[config, None], self._session.cluster
        if not model.dedicated_bundles and not cluster.use_gpus:
            return make_scorer(config, self._reward_model, policy=self._policy)
        in_actors = partial(
            make_remote_scorer, config, reward_model=self._reward_model, policy=self._policy
        )
        if not model.dedicated_bundles:  # this process sees all GPUs, or none
            return in_actors(workers=_WITH_A_MODEL, bundles=cluster)
        (bundles,) = model.dedicated_bundles
        if bundles.name not in self._in_own_actors:
            self._in_own_actors[bundles.name] = in_actors(
                workers=_WITH_A_MODEL.replace(num_workers=bundles.number),
                bundles=self._session.dedicated_cluster(bundles),
                is_dedicated=True,
            )
        return self._in_own_actors[bundles.name]


def scores_on_a_gpu(session: ClusterSession, settings: RolloutSettings) -> bool:
    """Whether the scorer uses a GPU of the trainer, whose memory engines must free first."""
    models, workers = model_scorers(settings.environment), settings.environment_workers
    has_colocated = any(not each.dedicated_bundles for each in models)
    takes_gpus = workers is not None and workers.use_gpus
    return session.cluster.use_gpus and (has_colocated or takes_gpus)


def start_judge(
    session: ClusterSession, config: JudgeModel, max_new_tokens: int, name: str = "judge"
) -> "EngineChat":
    """Starts vLLM workers with the judge's model, or reuses those of an earlier stage.

    On a GPU of the trainer the judge is asleep afterwards.
    """
    folder = Path(config.model).expanduser()
    tokenizer = load_tokenizer(folder)
    setup = GenerationSetup(
        model_folder=folder,
        config=VllmGenerationConfig(
            max_new_tokens=max_new_tokens,
            kv_cache_gib=config.kv_cache_gib,
            gpu_memory_utilization=config.gpu_memory_utilization,
            placement=config.placement,
            tensor_parallel_size=config.tensor_parallel_size,
        ),
        max_model_len=config.max_model_len,
        stop_token_ids=stop_token_ids(folder, tokenizer),
        dtype=config.dtype,
    )
    generation = VllmGeneration(session, setup, name=name)
    generation.finish_generation()  # the policy's engine starts now, and needs the GPU
    return EngineChat(
        generation, tokenizer, max_question_tokens=config.max_model_len - max_new_tokens
    )


class EngineChat:
    """A generation engine as a `ChatModel`; greedy, so that equal questions get equal replies.

    Args:
        max_question_tokens: Maximum length of a question; a longer one gets no reply.
    """

    def __init__(
        self, generation: GenerationInterface, tokenizer: Any, *, max_question_tokens: int
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._max_question_tokens = max_question_tokens

    def replies(self, questions: Sequence[str]) -> list[str | Exception]:
        """Returns a reply or an exception for each question, in order."""
        prompts = [self._encoded(question) for question in questions]
        fits = {row: ids for row, ids in enumerate(prompts) if not isinstance(ids, Exception)}
        replies = dict(zip(fits, self._complete(list(fits.values())), strict=True))
        return [
            ids if isinstance(ids, Exception) else replies[row] for row, ids in enumerate(prompts)
        ]

    def _encoded(self, question: str) -> list[int] | Exception:
        try:
            ids = prompt_token_ids(self._tokenizer, question)
        except DataError as error:  # One bad completion must not fail the others.
            return error
        limit = self._max_question_tokens
        fits = len(ids) <= limit
        return ids if fits else ValueError(f"a question of {len(ids)} tokens; at most {limit} fit")

    def close(self) -> None:
        """Does nothing: the session keeps its workers for the next stage."""

    def _complete(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        if not prompts:
            return []
        lengths = torch.tensor([len(ids) for ids in prompts])
        input_ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, ids in enumerate(prompts):
            input_ids[row, : len(ids)] = torch.tensor(ids)
        seeds = torch.zeros(len(prompts), dtype=torch.long)
        batch = BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, "seeds": seeds})
        output = self._generation.generate(batch, True)
        self._generation.finish_generation()  # the policy's engine and training need the GPU
        ends = output["unpadded_sequence_lengths"].tolist()
        completions = [
            ids[start:end].tolist()
            for ids, start, end in zip(output["output_ids"], lengths.tolist(), ends, strict=True)
        ]
        return list(self._tokenizer.batch_decode(completions, skip_special_tokens=True))
