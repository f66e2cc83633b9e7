"""Scores a few rows with the environment of a recipe: right, wrong or sampled completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.environment import EnvironmentConfig, single_environments
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.distributed.isolation import with_packages
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.factory import make_remote_scorer, make_scorer
from nemo_rl_core.environments.interfaces import Scorer, score_rollouts, shorten
from nemo_rl_core.environments.multi_turn.replies import Reply, checked_replies
from nemo_rl_core.environments.needs import check_targets, refuse_incomplete_rows
from nemo_rl_core.errors import ConfigError, DataError, RewardError
from nemo_rl_core.types import Prompt, Rollout, Row, unscored
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.recipe_file import read_recipe, with_base

NO_ANSWER = "I do not know."
_NUM_OTHER_ROWS = 100
"""Number of rows to search for a wrong completion."""

_NEEDED = ("seed", "data", "environment", "environment_workers", "isolation")


@dataclass(frozen=True)
class TriedCompletion:
    """One completion and its result in the environment.

    Attributes:
        source: `solution` (the row's own completion), `reference` (its answer), `wrong` (the
            solution or the answer of another row), `none` (no answer) or `model`.
        outcome: The reward, or the reply of the environment, as text.
        error: Reason for a missing outcome.
    """

    row: int
    source: str
    completion: str
    outcome: str
    error: str | None = None


@dataclass(frozen=True)
class RewardTrial:
    """All completions that were tried."""

    environment: str
    tried: list[TriedCompletion]

    @property
    def num_failed(self) -> int:
        """Number of completions that could not be scored."""
        return sum(each.error is not None for each in self.tried)


def run_trial(
    recipe: str, *, num_rows: int, model: Path | None = None, max_new_tokens: int = 64
) -> RewardTrial:
    """Scores the first training rows of a recipe."""
    config = _config(recipe)
    isolated = with_packages(config.isolation).environment
    local_environment = None if isolated else config.environment
    check_targets(local_environment)
    _refuse_unscored_texts(config.environment)
    rows = _rows(config)
    prompts = [_prompt(row) for row in rows[:num_rows]]
    refuse_incomplete_rows(prompts, local_environment, name="train")
    workers = config.environment_workers
    scorer = (
        make_remote_scorer(config.environment, workers, isolation=isolated)
        if isolated and workers
        else make_scorer(config.environment)
    )
    try:
        completions = _completions(rows, num_rows, model, max_new_tokens)
        rollouts = [unscored(prompts[row], text) for row, _, text in completions]
        outcomes = _outcomes(scorer, rollouts)
    finally:
        scorer.close()
    tried = [
        TriedCompletion(row, source, text, *outcome)
        for (row, source, text), outcome in zip(completions, outcomes, strict=True)
    ]
    return RewardTrial(_named(config.environment), tried)


def _refuse_unscored_texts(environment: EnvironmentConfig) -> None:
    if isinstance(environment, AgentEnvironment) and environment.reward is None:
        raise ConfigError(
            "the agent computes the reward of its episode, so a text has none",
            expected="environment.reward, which scores the last turn of an episode",
            got="environment.kind agent without reward",
            fix="run the agent by itself with another model in OPENAI_BASE_URL to try it",
        )
    if any(isinstance(each, RewardModelScore) for each in single_environments(environment)):
        raise ConfigError(
            "a reward model reads the token ids of a rollout, and only texts are available here",
            expected="an environment that reads texts",
            got=f"environment.kind {environment.kind}",
            fix="score only the other rewards; rollouts of a run show those of the reward model",
        )


def table(trial: RewardTrial) -> str:
    """Returns the trial as text: one line per completion, then the errors."""
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
    by_source: dict[str, list[str]] = {}
    for each in trial.tried:
        if each.error is None:
            by_source.setdefault(each.source, []).append(each.outcome)
    right, wrong = by_source.get("reference", []), by_source.get("wrong", [])
    if right and right == wrong:
        return ["\nThe reference answers earn the same as the wrong completions."]
    lines = {(each.row, each.source): each.outcome for each in trial.tried if not each.error}
    return [
        f"\nRow {row}: its solution earns the same as no answer."
        for (row, source), outcome in lines.items()
        if source == "solution" and outcome == lines.get((row, "none"))
    ]


def _config(recipe: str) -> PipelineRecipe:
    path = Path(recipe)
    is_file = path.suffix in (".yaml", ".yml")
    values: dict[str, Any] = read_recipe(path) if is_file else {"recipe": recipe}
    merged = with_base(values)
    return PipelineRecipe.model_validate({key: merged[key] for key in _NEEDED if key in merged})


def _rows(config: PipelineRecipe) -> Sequence[Row]:
    rows, _ = load_rows(config.data, seed=config.seed)
    if not rows or not {"prompt", "answer"} <= rows[0].keys():
        raise DataError(
            "the recipe's data holds no prompts, so nothing can be scored",
            expected="rows with prompt, and answer where the reward needs it",
            got=f"the columns {', '.join(rows[0])}" if rows else "no rows",
            fix="correct the section data",
        )
    return rows


def _prompt(row: Row) -> Prompt:
    answer = row["answer"] or ""
    return Prompt(str(row["id"]), row["prompt"], (), answer, row["task"], row["metadata"])


def _completions(
    rows: Sequence[Row], num_rows: int, model: Path | None, max_new_tokens: int
) -> list[tuple[int, str, str]]:
    """Returns row, source and text of the completions to score."""
    chat = None
    if model is not None:
        from nemo_rl_core.evals.chat import Chat

        chat = Chat(model, max_new_tokens=max_new_tokens)
    completions = []
    for number, row in enumerate(rows[:num_rows]):
        answer, solution = row["answer"], row["completion"]
        if solution and solution != answer:
            completions.append((number, "solution", solution))
        if answer:
            completions.append((number, "reference", answer))
        others = [each for each in rows[:_NUM_OTHER_ROWS] if each["completion"] != solution]
        if others:  # rows of programs have the same answer
            other = min(others, key=lambda each: each["answer"] == answer)
            completions.append((number, "wrong", other["completion"]))
        completions.append((number, "none", NO_ANSWER))
        if chat is not None:
            completions.append((number, "model", chat.answer(row["prompt"])))
    return completions


def _outcomes(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[tuple[str, str | None]]:
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
