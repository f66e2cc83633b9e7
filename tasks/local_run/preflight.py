"""Checks before a run starts: models, files, resources, rewards."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from nemo_rl_core.algorithms.declarations import ALGORITHMS
from nemo_rl_core.checkpoints.model_code import unpinned
from nemo_rl_core.config.data import DataConfig, FileData, HubData, MixtureData
from nemo_rl_core.config.defaults import rate_warning
from nemo_rl_core.config.environment import (
    ByTask,
    EnvironmentConfig,
    WeightedSum,
    single_environments,
)
from nemo_rl_core.config.evaluation import EvaluationConfig, PromotionConfig
from nemo_rl_core.config.functions import CustomFunction
from nemo_rl_core.config.generated_data import ReasoningGymData
from nemo_rl_core.config.generation import SamplingConfig, refuse_misplaced
from nemo_rl_core.config.judge import JudgeModel, LLMJudge
from nemo_rl_core.config.model import ModelConfig, ModelFromWheel, PretrainedModel, SmallModel
from nemo_rl_core.config.single_turn import (
    JsonSchemaMatch,
    RegexMatch,
    RewardModelScore,
    SingleEnvironmentConfig,
)
from nemo_rl_core.config.tracking import BudgetConfig
from nemo_rl_core.config.trainer import LoopConfig
from nemo_rl_core.config.training import (
    DTensorTraining,
    MegatronTraining,
    TrainingConfig,
    require_bitsandbytes,
    require_torchao,
)
from nemo_rl_core.config.warm_up import warm_up_warnings
from nemo_rl_core.converters.materialize import check_pretrained
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.data.datasets.files import read_split
from nemo_rl_core.data.lengths import refuse_long_rollouts
from nemo_rl_core.data.pretrained import context_length, read_model_json, sampling_length
from nemo_rl_core.data.row_kinds import kind_of_row
from nemo_rl_core.distributed.isolation import with_packages
from nemo_rl_core.distributed.virtual_cluster import resources_of_runs
from nemo_rl_core.environments.contents import located_model
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.needs import (
    check_targets,
    missing_columns,
    no_columns,
    refuse_incomplete_rows,
)
from nemo_rl_core.errors import ConfigError, DataError, NemoRLError
from nemo_rl_core.planning.model_parts import refuse_untrainable
from nemo_rl_core.store import remote
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry.model_flops import num_parameters
from nemo_rl_core.telemetry.tracker_checks import check_trackers
from nemo_rl_core.types import Prompt
from tasks.planning.gpu_hours import check_budget
from tasks.planning.gpu_plan import refuse_what_does_not_fit
from tasks.planning.recipe_checks import (
    MOST_BYTES_READ,
    bytes_of,
    check_size,
    reading_quietly,
    refuse_heads,
    refuse_layers,
    rows_to_check,
)
from tasks.recipes.common import PipelineRecipe, Recipe

_LOG = logging.getLogger(__name__)
_DATA_FILES = "a .jsonl, .csv, .parquet or .arrow file, or a folder of such"


def preflight(inputs: Mapping[str, Any]) -> None:
    """Checks a local run's recipe against this machine."""
    for value in inputs.values():
        if isinstance(value, Recipe):
            for warning in check_trackers(value.tracking):
                _LOG.warning("%s", warning)
            for experiment in value.experiments:
                _check_experiment(experiment, value.budget)


def _check_machine(experiment: PipelineRecipe) -> None:
    machine = resources_of_runs()
    num_gpus = experiment.cluster.num_gpus_with(experiment.dedicated_bundles)
    missing = machine.missing({"GPU": num_gpus})
    fix = _fewer_gpus(experiment, num_gpus - int(missing["GPU"])) if missing else None
    # One core is enough for any number of workers, which share it on a laptop.
    machine.check({"CPU": 1, "GPU": num_gpus}, fix=fix)


def _fewer_gpus(experiment: PipelineRecipe, short: int) -> str | None:
    """Returns the smallest change that saves `short` GPUs; None if no bundle is dedicated.

    Scoring models come first: their location does not change results.
    """
    bundles = experiment.dedicated_bundles
    scorers = [each for each in bundles if each.name != "generation"]
    for each in scorers:
        number = (each.number - short) // each.ranks_per_engine * each.ranks_per_engine
        if number > 0:
            return f"set {each.path} to {number}, or use a larger machine"
    for number in range(1, len(scorers) + 1):
        if sum(each.number for each in scorers[:number]) >= short:
            paths = [each.path.removesuffix(".own") for each in scorers[:number]]
            return f"leave {' and '.join(paths)} out, or use a larger machine"
    group_size = experiment.training.smallest_world_size
    number = (experiment.cluster.num_workers - short) // group_size * group_size
    if bundles and number > 0:
        return f"set cluster.num_workers to {number}, or use a larger machine"
    return None


def _check_experiment(experiment: PipelineRecipe, budget: BudgetConfig) -> None:
    model = located_model(experiment.model)
    if model != experiment.model:
        experiment = experiment.replace(model=model)
    _refuse_missing(experiment)
    with_packages(experiment.isolation)  # refuses files that cannot be used
    _check_machine(experiment)
    experiment.training.data_parallel_size(experiment.cluster.num_workers)
    for model in experiment.models:
        if isinstance(model, PretrainedModel):
            _check_model(located_model(model), experiment.training)
    refuse_layers(experiment)
    refuse_heads(experiment)
    _require_packages(experiment)
    plan = refuse_what_does_not_fit(experiment)
    if plan is not None:
        check_budget(replace(plan, max_gpu_hours=budget.max_gpu_hours))
    _warn_of_the_rates(experiment)
    _warn_of_warm_ups(experiment)
    for data in (experiment.data, experiment.evaluation_data):
        if data is not None:
            _check_files(data)
            _check_before_fetching(experiment, data)
    experiment.refuse_contradictions()
    _check_promotion(experiment.promotion)
    if experiment.samples_rows:
        _check_sampling(experiment, "data", "generation")
        _check_tasks(experiment.environment, experiment.data)
        _check_rows(experiment, experiment.environment, experiment.data)
    _check_functions(experiment)
    for reward in experiment.rewards:
        _check_reward(experiment, reward)
    if experiment.evaluation is not None and _asks_questions(experiment):
        _check_evaluation(experiment, experiment.evaluation)
    check_size(experiment)


def _check_functions(experiment: PipelineRecipe) -> None:
    """Imports the losses and advantages that a recipe names, without calling them."""
    for name, section in experiment:
        fields = section if isinstance(section, LoopConfig) else ()
        if any(isinstance(each, CustomFunction) for _, each in fields):
            from nemo_rl_core.trainers.custom_functions import CustomFunctions  # imports torch

            CustomFunctions.of(name, section)


def _refuse_missing(experiment: PipelineRecipe) -> None:
    """Refuses missing data files; the error also names a missing model folder or reward."""
    files = list(dict.fromkeys(_missing_files(experiment.data, "data")))
    if experiment.evaluation_data is not None:
        files += _missing_files(experiment.evaluation_data, "evaluation.data")
    if not files:
        return
    problems = [*files, *_missing_model(experiment.model), *_missing_rewards(experiment)]
    count = "a data file does not exist" if len(problems) == 1 else "the recipe names missing files"
    keys = ", ".join(dict.fromkeys(line.partition(": ")[0] for line in problems))
    raise DataError(
        "\n  ".join([f"{count}:", *problems]),
        expected=_DATA_FILES,
        fix=f"correct {keys} in the recipe",
    )


def _missing_files(data: DataConfig, path: str) -> Iterator[str]:
    if isinstance(data, MixtureData):
        for index, source in enumerate(data.sources):
            yield from _missing_files(source.data, f"{path}.sources.{index}.data")
    if not isinstance(data, FileData):
        return
    # `evaluation.data` may name only validation rows, which are then used for both parts.
    is_named = data.train != data.validation or not path.startswith("evaluation.")
    train = data.train if is_named else None
    for key, name in (("train", train), ("validation", data.validation)):
        if name is not None and not remote.is_remote(name):
            file = Path(name).expanduser()
            if not file.exists():
                yield f"{path}.{key}: no file {file.absolute()}"


def _missing_model(model: ModelConfig) -> Iterator[str]:
    if isinstance(model, PretrainedModel) and model.name.startswith((".", "/", "~")):
        folder = Path(model.name).expanduser()
        if not folder.is_dir():
            yield f"model.name: no folder {folder.absolute()}"


def _missing_rewards(experiment: PipelineRecipe) -> Iterator[str]:
    if experiment.isolation.environment is not None:
        return
    scored = {path: reward for _, reward, path in experiment.samplings}
    for path, reward in scored.items():
        try:
            check_targets(reward)
        except NemoRLError as error:
            yield f"{path}: {error.in_one_line}"


def _check_model(model: ModelConfig, training: TrainingConfig) -> None:
    assert isinstance(model, PretrainedModel)
    name, folder = model.name, Path(model.name).expanduser()
    check_pretrained(name, trust_remote_code=model.trust_remote_code)
    if not folder.is_dir():
        if model.trust_remote_code and model.revision is None and not remote.is_remote(name):
            raise unpinned(name)
        return
    refuse_untrainable(read_model_json(folder), called=f"the model {name!r}")
    if isinstance(training, MegatronTraining):
        from nemo_rl_core.backends.training.megatron.families import (
            family_of,
            is_for_bridge,
            refuse_indivisible,
            refuse_model_code,
        )

        if model.trust_remote_code:
            refuse_model_code(folder)
        if not is_for_bridge(folder):
            refuse_indivisible(*family_of(folder), training)


def _check_promotion(promotion: PromotionConfig | None) -> None:
    if promotion is not None and promotion.name is not None:
        store = Store.default()
        Aliases(store).refuse_folder(str(store.artifacts))


def _asks_questions(experiment: PipelineRecipe) -> bool:
    """Whether an evaluation may ask questions: files of conversations, texts or pairs have none."""
    data = experiment.question_data
    if not isinstance(data, FileData):
        return not experiment.compares_pairs
    with reading_quietly():
        rows = read_split(data.replace(max_rows=1), data.validation or data.train).rows
    return not rows or "prompts" in kind_of_row(rows[0])


def _check_evaluation(experiment: PipelineRecipe, evaluation: EvaluationConfig) -> None:
    _check_sampling(
        experiment,
        "evaluation.data" if evaluation.data else "data",
        "evaluation.generation" if evaluation.generation else "generation",
    )
    environment = experiment.evaluation_environment
    _check_tasks(environment, experiment.question_data)
    _check_rows(experiment, environment, experiment.question_data)
    environments = (
        [task.environment for task in environment.tasks]
        if isinstance(environment, ByTask)
        else [environment]
    )
    for each in environments:
        if isinstance(each, RewardModelScore | WeightedSum):
            raise ConfigError(
                f"the environment {each.kind!r} gives scores, which do not tell right from wrong",
                expected="an environment whose reward is 1 for a right completion, to evaluate "
                "with",
                got="no evaluation.environment",
                fix="set, for example, evaluation: {environment: {kind: exact}}",
            )


def _require_packages(experiment: PipelineRecipe) -> None:
    if isinstance(experiment.training, DTensorTraining):
        require_torchao(experiment.training.float8)
        if experiment.training.weights != "full":
            require_bitsandbytes(f"training.weights: {experiment.training.weights}")
    for section in ALGORITHMS:
        if getattr(getattr(experiment, section, None), "moments", "float32") == "8bit":
            require_bitsandbytes(f"{section}.moments: 8bit")


def _warn_of_the_rates(experiment: PipelineRecipe) -> None:
    folder = Path(experiment.model.name).expanduser()
    if not isinstance(experiment.model, PretrainedModel) or not folder.is_dir():
        return
    uses_lora = getattr(experiment.training, "lora", None) is not None
    for section, algorithm in ALGORITHMS.items():
        config = getattr(experiment, section, None)
        if config is not None:
            text = rate_warning(
                section,
                config.learning_rate,
                algorithm=algorithm,
                num_parameters=num_parameters(folder),
                uses_lora=uses_lora,
            )
            if text:
                _LOG.warning("%s", text)


def _warn_of_warm_ups(experiment: PipelineRecipe) -> None:
    for section in ALGORITHMS:
        if (config := getattr(experiment, section, None)) is not None:
            for text in warm_up_warnings(section, config):
                _LOG.warning("%s", text)


def _check_reward(experiment: PipelineRecipe, reward: EnvironmentConfig) -> None:
    if experiment.isolation.environment is None:  # else its actors import it
        check_targets(reward)
    for environment in single_environments(reward):
        _check_environment(environment)


def _check_environment(environment: SingleEnvironmentConfig) -> None:
    if isinstance(environment, LLMJudge) and isinstance(environment.judge, JudgeModel):
        check_pretrained(environment.judge.model)
    elif isinstance(environment, RegexMatch | JsonSchemaMatch | LLMJudge):
        make_scorer(environment)  # checks patterns, schemas and keys; requests nothing
    if isinstance(environment, RewardModelScore) and environment.model is None:
        raise ConfigError(
            "the environment 'reward_model' does not say which reward model scores",
            expected="environment.model: a folder of the workflow reward_model, or a hub name",
            got="no model",
            fix="name one; only grpo_reward of post_train uses the reward model of the run",
        )


def _check_tasks(environment: EnvironmentConfig, data: DataConfig) -> None:
    """Hub rows are not fetched for this check; such runs stop at their first rollouts."""
    if not isinstance(environment, ByTask) or _is_fetched(data):
        return
    scored_tasks = {each.task for each in environment.tasks}
    data_tasks = {str(row["task"]) for rows in rows_to_check(data) for row in rows}
    if data_tasks - scored_tasks:
        raise ConfigError(
            "the data has tasks that no environment scores",
            expected=f"only {', '.join(sorted(scored_tasks))}",
            got=", ".join(sorted(data_tasks - scored_tasks)),
            fix="name them in environment.tasks, or leave their rows out of the data",
        )


def _check_rows(
    experiment: PipelineRecipe, environment: EnvironmentConfig, data: DataConfig
) -> None:
    """Checks that rows of files have the columns for their score.

    Large files, and rows of the hub, are checked before the first stage that scores them;
    `prepare_data` reports problems of the rows themselves.
    """
    if experiment.isolation.environment is not None or not isinstance(data, FileData):
        return
    if missing_columns(environment) is no_columns:
        return
    if _size(data) > MOST_BYTES_READ:
        return
    for name, rows in zip(("train", "validation"), rows_to_check(data), strict=True):
        prompts = [
            Prompt(str(row["id"]), row["prompt"], (), row["answer"], row["task"], row["metadata"])
            for row in rows
            if all(isinstance(row.get(key), str) for key in ("prompt", "answer", "metadata"))
        ]
        if len(prompts) == len(rows):
            refuse_incomplete_rows(prompts, environment, name=name)


def _size(data: FileData) -> int:
    names = [name for name in (data.train, data.validation) if name]
    listed = [remote.listing(name) for name in names if remote.is_remote(name)]
    stored = sum(each.size for objects in listed for each in objects)
    return stored + bytes_of([name for name in names if not remote.is_remote(name)])


def _is_fetched(data: DataConfig) -> bool:
    if isinstance(data, MixtureData):
        return any(_is_fetched(source.data) for source in data.sources)
    return isinstance(data, HubData)


def _check_sampling(experiment: PipelineRecipe, data_section: str, sampling_section: str) -> None:
    data: DataConfig = attrgetter(data_section)(experiment)
    generation: SamplingConfig = attrgetter(sampling_section)(experiment)
    refuse_misplaced(experiment.cluster, generation)
    model = experiment.model
    limit = context = None
    if isinstance(model, SmallModel):
        limit = context = model.max_position_embeddings
    elif isinstance(model, PretrainedModel) and Path(model.name).expanduser().is_dir():
        folder = Path(model.name).expanduser()
        limit, context = sampling_length(folder), context_length(folder)
    refuse_long_rollouts(
        data.max_prompt_tokens,
        experiment.rollouts.room(generation),
        settings=f"{data_section}.max_prompt_tokens + {sampling_section}.max_new_tokens (or "
        "rollouts.max_rollout_tokens)",
        limit=limit,
        context=context,
    )


def _check_before_fetching(experiment: PipelineRecipe, data: DataConfig) -> None:
    """Generates rows once before a model is fetched, since fetching takes minutes.

    Otherwise `prepare_data` refuses them after `prepare_model`, whose tokenizer it needs. It still
    checks what needs a tokenizer, such as the length of prompts.
    """
    parts = [each.data for each in data.sources] if isinstance(data, MixtureData) else [data]
    if any(map(_fetches, experiment.models)):
        for part in parts:
            if isinstance(part, ReasoningGymData):
                load_rows(part, seed=experiment.seed)


def _fetches(model: ModelConfig) -> bool:
    if isinstance(model, PretrainedModel):
        return not Path(model.name).expanduser().is_dir()
    return isinstance(model, ModelFromWheel)


def _check_files(data: DataConfig) -> None:
    if isinstance(data, MixtureData):
        for source in data.sources:
            _check_files(source.data)
    if not isinstance(data, FileData):
        return
    for name in (data.train, data.validation):
        if name is not None and remote.is_remote(name):
            remote.listing(name)
