"""Retired words are absent: each idea has one name, the field's."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RETIRED = {
    r"\bby turns\b": "synchronous",
    r"\bcarriers?\b|\bWeightLine\b|\bweight_line\b": "transport, WeightLink",
    r"\bdoubts?\b": "differences",
    r"\bDialogues?\b": "episode",
    r"\bforfeits?\b": "truncation_rewards",
    r"\bhears?\b|\bhear_\w+": "add_completion, add_observation",
    r"\binfra\b|\bkeeping/": "store, telemetry, checkpoints, maintenance",
    r"\bJob\b": "RunSpec",
    r"\bMade\(": "StageResult",
    r"\bputs? up with\b": "tolerates",
    r"\bremarks?\b": "warnings",
    r"\bsampling ahead\b|\bsamples ahead\b": "asynchronous",
    r"\bshort_forms\b": "pretrained",
    r"\bto be judged\b|\bis judged\b|\bjudged\(|_judged\b": "scored, valid, graded",
    r"losses\.md|\breference documents?\b": "a source that the reader has",
}
"""By pattern, with what stands in its place."""

ALLOWED = {
    "docs/architecture.md",  # names the rooms of an earlier commit
    "nemo_rl_core/documented_names.py",  # names of NeMo RL's documents
    "nemo_rl_core/environments/rewards/llm_judge.py",  # the prompt of a model that does judge
}


def sources() -> list[Path]:
    folders = ("nemo_rl_core", "tasks", "workflows", "docs")
    found = [
        path
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yaml") and "__pycache__" not in path.parts
    ]
    return [*found, REPOSITORY / "README.md"]


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_absent(word: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path in sources()
        if str(path.relative_to(REPOSITORY)) not in ALLOWED
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(word, line)
    ]
    assert found == [], f"say {RETIRED[word]}"
