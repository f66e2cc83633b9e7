"""The page of models: names such as `production`, verdicts between them, and exported models."""

from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.evals.comparison import Comparison
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow
from nemo_rl_core.history.search import latest_artifacts, latest_evaluation
from nemo_rl_core.store.aliases import Alias, Aliases
from nemo_rl_core.ui.compared import confidence_of_each, paired
from nemo_rl_core.ui.pages.parameters import history_of
from nemo_rl_core.ui.results import Figure, brief_results
from nemo_rl_core.ui.templating import render, render_message

_MODELS_SHOWN, _DECISIONS_SHOWN, _NAMES_COMPARED = 20, 20, 8


@dataclass(frozen=True)
class _Model:
    """A model with its latest evaluation; `artifact` is None for one that is not recorded."""

    label: str
    artifact: ArtifactRow | None
    evaluation: ArtifactRow | None
    figure: Figure | None


@dataclass(frozen=True)
class _Verdict:
    """A comparison of two names; `compared` is None without a common evaluation."""

    before: str
    after: str
    evaluations: tuple[str, str] | None
    compared: Comparison | None
    reason: str = ""


def models(request: Request) -> Response:
    """Shows names with their moves and verdicts, decisions, and exported models."""
    if request.app.state.source.is_empty():
        text = "This store has no models yet. Run a workflow first."
        return render_message(request, "Models", text, section="models", command="make grpo")
    history = history_of(request)
    refused = ""
    aliases: list[Alias] = []
    try:
        every = Aliases(history.store)
        aliases = [every.get(name) for name in every.names()]
    except (OSError, NemoRLError) as error:
        refused = f"The names cannot be read: {error}"
    named = [(alias, _model(history, alias.current.model)) for alias in aliases]
    decisions = latest_artifacts(history, "promotion", limit=_DECISIONS_SHOWN)
    exported = latest_artifacts(history, "model", limit=_MODELS_SHOWN)
    return render(
        request,
        "models.html",
        section="models",
        refused=refused,
        named=named,
        verdicts=_verdicts([(alias.name, model) for alias, model in named]),
        decisions=[(one, brief_results(Path(one.path))) for one in decisions],
        exported=[_model(history, one.id) for one in exported],
    )


def _model(history: History, label: str) -> _Model:
    name = label if history.has_artifact(label) else Path(label).name
    if not history.has_artifact(name):
        return _Model(label, None, None, None)
    one = history.artifact(name)
    evaluation = latest_evaluation(history, one)
    figures = brief_results(Path(evaluation.path)).figures if evaluation else []
    return _Model(label, one, evaluation, figures[0] if figures else None)


def _verdicts(named: list[tuple[str, _Model]]) -> list[_Verdict]:
    """Compares each name with those after it."""
    verdicts = []
    num_compared = min(len(named), _NAMES_COMPARED)
    confidence = confidence_of_each(num_compared * (num_compared - 1) // 2)
    for index, (before, old) in enumerate(named[:_NAMES_COMPARED]):
        for after, new in named[index + 1 : _NAMES_COMPARED]:
            if old.evaluation is None or new.evaluation is None:
                missing = before if old.evaluation is None else after
                reason = f"no evaluation of {missing} is recorded"
                verdicts.append(_Verdict(before, after, None, None, reason))
                continue
            pair = (old.evaluation, new.evaluation)
            compared = paired(*pair, confidence=confidence)
            ids = (pair[0].id, pair[1].id)
            if isinstance(compared, str):
                verdicts.append(_Verdict(before, after, ids, None, compared))
            else:
                verdicts.append(_Verdict(before, after, ids, compared))
    return verdicts
