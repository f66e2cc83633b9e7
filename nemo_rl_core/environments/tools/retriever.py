"""Retrieves the passages of a file that match a question best."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_core.errors import DataError

_K1, _B = 1.5, 0.75
_WORD = re.compile(r"\w+")


class Retriever:
    """BM25 over passages in memory (Robertson and Zaragoza 2009), with Lucene's non-negative idf.

    The score of a passage `d` is a sum over the words `q` of the question, with repetitions:
    `sum_q idf(q) * f(q, d) * (k1 + 1) / (f(q, d) + k1 * (1 - b + b * |d| / average |d|))` with
    `idf(q) = ln(1 + (n - n(q) + 0.5) / (n(q) + 0.5))`, `k1 = 1.5` and `b = 0.75`.
    """

    def __init__(self, passages: Sequence[str], *, num_passages: int = 3) -> None:
        self._passages, self._num_passages = list(passages), num_passages
        self._counts = [Counter(_words(passage)) for passage in passages]
        self._lengths = [counts.total() for counts in self._counts]
        self._average = max(sum(self._lengths) / len(passages), 1.0)
        self._containing = Counter(word for counts in self._counts for word in counts)

    @classmethod
    def from_file(cls, path: Path, *, num_passages: int) -> "Retriever":
        """Reads a jsonl file whose rows have `text`, or a text file with one passage per line."""
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            if path.suffix == ".jsonl":
                lines = [str(json.loads(line)["text"]) for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        if not lines:
            raise _unreadable(path, "an empty file")
        return cls(lines, num_passages=num_passages)

    def scores(self, question: str) -> list[float]:
        """Returns the score of each passage, in order."""
        return [self._score(_words(question), index) for index in range(len(self._passages))]

    def __call__(self, question: str) -> str:
        """Returns the best passages that contain a word of the question, best first.

        Ties keep the order of the file. Without any such passage it raises ValueError.
        """
        scores = self.scores(question)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._num_passages]
        passages = [self._passages[index] for index in best if scores[index] > 0]
        if not passages:
            raise ValueError("no passage contains any of these words")
        return "\n".join(passages)

    def _score(self, question: Sequence[str], index: int) -> float:
        counts = self._counts[index]
        norm = _K1 * (1 - _B + _B * self._lengths[index] / self._average)
        return sum(
            self._idf(word) * counts[word] * (_K1 + 1) / (counts[word] + norm)
            for word in question
            if word in counts
        )

    def _idf(self, word: str) -> float:
        count = self._containing[word]
        return math.log(1 + (len(self._passages) - count + 0.5) / (count + 0.5))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _unreadable(path: Path, got: str) -> DataError:
    return DataError(
        f"the retriever has no passages in {path.name!r}",
        expected='a jsonl file whose rows have "text", or a text file with one passage per line',
        got=got[:200],
        fix="correct the tool's path",
    )
