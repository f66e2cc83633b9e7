"""The environment of a recipe on a few rows, with completions that are right, wrong or sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.environment import EnvironmentConfig, single_environments
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import Scorer, score_rollouts, shorten
from nemo_rl_core.environments.multi_turn.replies import Reply, checked_replies
from nemo_rl_core.environments.needs import check_targets, refuse_incomplete_rows
from nemo_rl_core.errors import ConfigError, DataError, RewardError
from nemo_rl_core.types import Prompt, Rollout, unscored
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.recipe_file import read_recipe, with_base

WRONG = "I do not know."
"""A completion that earns nothing wherever an answer is asked for."""

_NEEDED = ("seed", "data", "environment", "environment_workers")


@dataclass(frozen=True)
class TriedCompletion:
    """One completion and what the environment made of it.

    Attributes:
        row: Index of the row, from 0.
        source: `reference`, `wrong` or `model`.
        completion: The text.
        outcome: The reward, or what the environment answers, as text.
        error: Why there is neither.
    """

    row: int
    source: str
    completion: str
    outcome: str
    error: str | None = None


@dataclass(frozen=True)
class RewardTrial:
    """All completions that were tried.

    Attributes:
        environment: The kind that scored them, and its target where it has one.
        tried: In the order of the rows.
    """

    environment: str
    tried: list[TriedCompletion]

    @property
    def num_failed(self) -> int:
        """How many could not be scored."""
        return sum(each.error is not None for each in self.tried)


def run_trial(
    recipe: str, *, num_rows: int, model: Path | None = None, max_new_tokens: int = 64
) -> RewardTrial:
    """Scores the first training rows of a recipe.

    Args:
        recipe: A YAML file, or the name of one of `workflows/recipes`.
        num_rows: How many rows.
        model: A folder with a model whose greedy completions are scored too.
        max_new_tokens: Of these.

    Raises:
        NemoRLError: For a recipe, data, an environment or a model that cannot be used.
    """
    config = _config(recipe)
    check_targets(config.environment)
    _refuse_token_ids(config.environment)
    prompts = _prompts(config, num_rows)
    refuse_incomplete_rows(prompts, config.environment, name="train")
    scorer = make_scorer(config.environment)
    try:
        completions = _completions(prompts, model, max_new_tokens)
        rollouts = [unscored(prompts[row], text) for row, _, text in completions]
        outcomes = _outcomes(scorer, rollouts)
    finally:
        scorer.close()
    tried = [
        TriedCompletion(row, source, text, *outcome)
        for (row, source, text), outcome in zip(completions, outcomes, strict=True)
    ]
    return RewardTrial(_named(config.environment), tried)


def _refuse_token_ids(environment: EnvironmentConfig) -> None:
    if any(isinstance(each, RewardModelScore) for each in single_environments(environment)):
        raise ConfigError(
            "a reward model reads the token ids of a rollout, and here are texts alone",
            expected="an environment that reads texts",
            got=f"environment.kind {environment.kind}",
            fix="score the other rewards alone; rollouts of a run show the reward model's",
        )


def table(trial: RewardTrial) -> str:
    """The trial as text: a line a completion, and the errors below it."""
    lines = [f"{trial.environment}", f"{'row':>3}  {'completion':<9}  {'reward':<12}  text"]
    lines += [
        f"{each.row:>3}  {each.source:<9}  {'failed' if each.error else each.outcome:<12}  "
        f"{shorten(repr(each.completion), 60)}"
        for each in trial.tried
    ]
    errors: dict[str, list[str]] = {}
    for each in trial.tried:
        if each.error:
            errors.setdefault(each.error, []).append(f"row {each.row}, {each.source}")
    lines += [f"\nfailed ({'; '.join(where)}):\n{error}" for error, where in errors.items()]
    return "\n".join([*lines, *_remarks(trial)])


def _remarks(trial: RewardTrial) -> list[str]:
    """What a user would want to know before training on such rewards."""
    by_source: dict[str, list[str]] = {}
    for each in trial.tried:
        if each.error is None:
            by_source.setdefault(each.source, []).append(each.outcome)
    right, wrong = by_source.get("reference", []), by_source.get("wrong", [])
    if right and right == wrong:
        return ["\nThe reference answers earn what the wrong completions earn."]
    return []


def _config(recipe: str) -> PipelineRecipe:
    """The sections of a recipe of any pipeline that say what is scored, and how."""
    path = Path(recipe)
    is_file = path.suffix in (".yaml", ".yml")
    values: dict[str, Any] = read_recipe(path) if is_file else {"recipe": recipe}
    whole = with_base(values)
    return PipelineRecipe.model_validate({key: whole[key] for key in _NEEDED if key in whole})


def _prompts(config: PipelineRecipe, num_rows: int) -> list[Prompt]:
    train, _ = load_rows(config.data, seed=config.seed)
    rows = train[:num_rows]
    if not rows or not {"prompt", "answer"} <= rows[0].keys():
        raise DataError(
            "the recipe's data holds no prompts, so nothing can be scored",
            expected="rows with prompt, and answer where the reward needs it",
            got=f"the columns {', '.join(rows[0])}" if rows else "no rows",
            fix="correct the section data",
        )
    return [
        Prompt(str(row["id"]), row["prompt"], (), row["answer"] or "", row["task"], row["metadata"])
        for row in rows
    ]


def _completions(
    prompts: Sequence[Prompt], model: Path | None, max_new_tokens: int
) -> list[tuple[int, str, str]]:
    """Row, source and text of what is scored."""
    chat = None
    if model is not None:
        from nemo_rl_core.evals.chat import Chat

        chat = Chat(model, max_new_tokens=max_new_tokens)
    found = []
    for row, prompt in enumerate(prompts):
        if prompt.answer:
            found.append((row, "reference", prompt.answer))
        found.append((row, "wrong", WRONG))
        if chat is not None:
            found.append((row, "model", chat.answer(prompt.text)))
    return found


def _outcomes(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[tuple[str, str | None]]:
    """What the environment made of each completion, and the error where there is one."""
    if isinstance(scorer, EnvironmentScorer):
        logs, metadata = EnvironmentScorer.conversations(rollouts)
        return [_reply(each) for each in checked_replies(scorer.environment, logs, metadata)]
    return [
        (_number(each.reward, each.components), each.error)
        for each in score_rollouts(scorer, rollouts)
    ]


def _reply(reply: Reply | RewardError) -> tuple[str, str | None]:
    if isinstance(reply, RewardError):
        return "", reply.in_one_line
    reward = _number(reply.reward, ())
    return (reward if reply.terminated else f"{reward}, then {reply.observation.strip()!r}"), None


def _number(reward: float | None, components: Sequence[float]) -> str:
    if reward is None:
        return ""
    parts = f" = {' + '.join(f'{each:g}' for each in components)} weighted" if components else ""
    return f"{reward:g}{parts}"


def _named(environment: EnvironmentConfig) -> str:
    target = getattr(environment, "target", None)
    return f"environment {environment.kind}" + (f", {target}" if target else "")
