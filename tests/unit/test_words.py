"""The English of the project stays near the field's, and retired words stay away.

The bounds are three times the rates of NeMo RL, TRL, torchtitan, prime-rl and tinker-cookbook
together (813,000 lines of sources, tests and docs), and at least 0.3 per 10,000 lines.
"""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_NOUNS = "the|a|an|its|each|one|those|this|all|any|that|every"
_UNITS = (
    "step|row|file|token|sequence|rank|run|stage|bucket|line|folder|worker|prompt|request|turn|"
    "part|group|engine|batch|machine|node|name|process|column|rollout|module|call|task|week|day|GPU"
)
# Pattern: occurrences allowed per 10,000 lines, and the plain form.
BOUNDS: dict[str, tuple[float, str]] = {
    rf"(?m):\s+Of ({_NOUNS})\b|^\s*\"\"\"Of ({_NOUNS})\b": (0.3, "a noun phrase"),
    r'"""What ': (0.3, "a verb, as in 'Returns', or a noun phrase"),
    r"(?m)^\s+[a-z_]+: (What|That|Whose|Behind|As) ": (0.3, "a noun phrase"),
    r'"""As `|: As `|: As of ': (0.3, "the same as in `f`"),
    r"\b[Bb]eside\b": (0.3, "next to, with, in addition to"),
    rf"\b(a|an|one|two|no|[0-9]+) [a-z\-]+s? (a|an) ({_UNITS})\b": (0.6, "one line per step"),
    r"\b[Ii]n place of\b": (0.3, "instead of"),
    r"\b(an|with|on) own\b|\bown ones?\b|\bof (one's|its|their|his|the user's) own\b"
    r"|\bof the user's\b": (0.57, "custom, separate, user-defined"),
    r"\b(go|goes|going|went|gone) on\b": (0.3, "continue, resume"),
    r"\banew\b|\bonce more\b": (0.3, "again"),
    r"\b(lie|lies|lay|lain)\b": (0.36, "is in, is stored in"),
    r"\b(stands?|stood)\b": (1.8, "is, appears"),
    r"\bto the (same )?bits?\b": (0.3, "bitwise identical"),
    r"\b(is|are|was|were) no [a-z]+\b": (6.84, "is not a"),
    r"\bmend(s|ed|ing)?\b": (0.3, "fix"),
    r"\bplaces?\b": (12.93, "index, position, location"),
    r"\bwhole\b": (10.68, "full, complete"),
    r"\balone\b": (4.38, "only"),
    r"\b(is|are|was|were|been) said\b|\bsa(id|ys?|ying) of\b": (0.3, "reported"),
    r"\b(is|are|was|were) told\b|\btold apart\b": (0.3, "named, distinguished"),
    r"\b(deals?|dealt)\b": (0.3, "shard, distribute"),
    r"\bheld\b(?!-out| out)": (1.65, "remote, kept, stored"),
    r"\bbehind\b": (3.18, "after, in"),
    r"\bbut for\b": (0.45, "except"),
    r"\blikewise\b|\bhence\b|\bthere(in|of)\b": (0.63, "also, so"),
    r"\b(takes|knows|lacks|gives|needs) not\b": (0.3, "does not"),
    r"\bhand(s|ed|ing)? (on|over)\b": (0.3, "pass, send"),
    r"\b(go_on|hand_over|where_(made|held)|held_[a-z]+|[a-z]+_said|taken_over|look_for_[a-z]+)\b": (
        0.3,
        "resume, send, remote_*",
    ),
    r"(?m)^\s*(found|own|given|wanted|known|said|there|told|asked) =": (
        0.51,
        "a name for what it holds",
    ),
}
RETIRED = {
    r"\bcarriers?\b|\bWeightLine\b|\bweight_line\b": "transport, WeightLink",
    r"\bforfeits?\b": "truncation_rewards",
    r"losses\.md|\breference documents?\b": "a source that the reader has",
}


@cache
def texts() -> dict[str, str]:
    """The Python and Markdown files of the repository, except this one."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=REPOSITORY, capture_output=True, check=True
    )
    names = set(listed.stdout.decode().split()) - {"tests/unit/test_words.py"}
    return {
        name: (REPOSITORY / name).read_text() for name in names if (REPOSITORY / name).is_file()
    }


@pytest.mark.parametrize("pattern", BOUNDS)
def test_a_phrase_is_about_as_frequent_as_in_the_field(pattern: str) -> None:
    bound, plain = BOUNDS[pattern]
    num_lines = sum(text.count("\n") for text in texts().values())
    counts = {name: len(re.findall(pattern, text)) for name, text in texts().items()}
    rate = 1e4 * sum(counts.values()) / num_lines
    worst = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    assert rate <= bound, f"write {plain}; most often in {worst}"


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_is_absent(word: str) -> None:
    sources = [name for name in texts() if not name.startswith("tests/")]
    lines = [name for name in sources if re.search(word, texts()[name])]
    assert lines == [], f"write {RETIRED[word]}"
