"""Scores completions that choose one of several lettered answers."""

import re
import string
from collections.abc import Iterable, Iterator, Sequence

from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.environments.rewards.final_answers import after_thinking
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Prompt, Rollout

_CHARACTERS = str.maketrans(
    dict(
        zip(
            "’‘“”。．，：；？！（）、【】→",
            [*"''", *'""', ". ", ". ", *",:;?!(),\n::"],
            strict=True,
        )
    )
)
_DECORATION = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|rm|bf)\b|[*`$]|(?<![^\W_])_{1,3}|_{1,3}(?![^\W_])"
    r"|^[ \t]{0,8}(?:#{1,6}|[-•>])[ \t]",
    re.MULTILINE,
)
_NEXT_TO_CHINESE = re.compile(r"(?<=[一-鿿])(?=[A-Za-z])|(?<=[A-Za-z])(?=[一-鿿])")
_RETRACTION = re.compile(
    r"(?:\A|[.!?…—]|\n|\s-)\s{0,3}(?:(?:oh|hmm+|but|no|oops|sorry|ah)\b[,.!]?\s{1,3}){0,3}"
    r"(?:(?:wait|hold on|oops|sorry|actually|(?<!\n[A-Z][.:] )no)\s{0,2}[,.!:…—]"
    r"|on second thoughts?\b|let me (?:re(?:consider|think|do)|correct)\b"
    r"|I (?:was (?:wrong|mistaken)|made an? (?:mistake|error)|take that back|misread)\b"
    r"|that(?:'s| is| was) (?:wrong|incorrect|not (?:right|correct))\b|moment,)"
    r"|\b(?:no,? wait|wait,? no|scratch that|strike that|correction:)|等等|不对",
    re.IGNORECASE,
)
# Every repetition is bounded, so that a megabyte of brackets does not take quadratic time.
_NOT = (
    r"(?:\b(?:not|\w{2,6}n't|cannot|never|neither|nor|wrong|incorrect|false|untrue|invalid|impossible"
    r"|unlikely|exclud\w{1,3}|eliminat\w{1,3}|rul(?:e|es|ed|ing) (?:it )?out|ruled|reject\w{0,3}"
    r"|discard\w{0,3}|no way|by no means|nobody|no one|hardly"
    r"|dismiss\w{0,3}|cross\w{0,3} out|except|(?:anything|everything|all|nothing) but|other than"
    r"|rather than|instead of|opposed to|avoid\w{0,3}|fail\w{0,3}|contradict\w{0,3}|mistaken?"
    r"|dou[b]t (?:that|it|whether)|least likely|worst|opposite|(?:is|are) out"
    r"|nicht|falsch|kein\w{0,2}|weder|noch|nie)\b|不|错误|排除|并非)"
)
_NEGATED = re.compile(_NOT, re.IGNORECASE)
_VERB = (
    r"(?:is|are|was|were|has|have|can|could|would|should|does|do|did|will|may|might|must|cannot"
    r"|\w{2,6}n't|says?|gives?|looks?|seems?|ist|sind|是|fails?)\b"
)
_NOUN = r"(?:answer|option|choice|letter|alternative|statement|Antwort|选项)"
_ARTICLE = (
    r"(?!(?-i:A)[ ]{1,3}(?!(?:or|and|because|as|since|for|with|which|but|if|unless|when|only|not"
    r"|nor|rather|instead|in|on|then|here|und|oder|" + _VERB + r")\b)(?-i:[a-z])|(?-i:I)[ ][a-z])"
)
_ONE = (
    r"[\s(\[{\"']{0,6}"
    + _ARTICLE
    + r"(?P<first>[A-Za-z])(?!\w|'\w|[+#-]|\s?[=^<>](?!/|\|))[)\]}\"']{0,6}"
)
_NEXT = (
    r"(?:[ ]{0,2}\(?(?:[,/&+]|\bor\b|\band\b|\bund\b|\boder\b|或|和)"
    r"(?:[ ]|[,/]|\bor\b|\band\b){0,3}"
    rf"(?:(?:maybe|perhaps|possibly|also|even|both|else|{_NOUN})[, ]{{1,2}}){{0,2}}"
    rf"|(?<![)\]}}])[ ]{{1,2}}(?![(\[{{]))"
    rf"(?:\\boxed\{{)?[(\[{{]?{_ARTICLE}(?-i:[A-Z])(?!\w|'\w|[+#-]|[.):][ ])[)\]}}]?"
)
_SUBJECT = rf"{_ONE}(?P<more>(?:{_NEXT}){{0,9}})"
_LIST = rf"{_ONE}(?P<more>(?:{_NEXT}(?![ ]{{1,3}}{_VERB})){{0,9}})"
_SINGLE = rf"(?<![\w'])(?<!\band )(?<!\bor )(?<!\band)(?<!\bor){_ONE}(?P<more>)"
_SURELY = (
    r"(?:\s{0,3}(?:either|both|probably|likely|most likely|definitely|clearly|certainly|indeed|thus"
    rf"|therefore|simply|then|the|{_NOUN})\b){{0,3}}[\s:]{{0,6}}"
)
_IS = r"(?:\bis\b|\bare\b|\bbe\b|\bwas\b|\bist\b|\blautet\b|\bes\b|\best\b|是|为|為|選|选|[:=])"
_GOOD = r"(?:correct|right|best|proper|true|accurate|appropriate|richtige?|korrekte?)"
_END = (
    r"(?=\s{0,3}(?:[.,;!)<]|\Z|\n"
    r"|(?:because|since|as|here|and(?!\s[A-Z]\s(?:are|were)\b)|weil|da)\b))"
)


def _patterns(*patterns: str) -> list[re.Pattern[str]]:
    return [re.compile(pattern, re.IGNORECASE) for pattern in patterns]


_MARKS = _patterns(
    rf"\\f?boxed\s{{0,3}}\{{[\s({{]{{0,4}}{_SURELY}{_LIST}", rf"<{_NOUN}>{_SURELY}{_LIST}"
)
_LINES = _patterns(
    rf"(?:\A|\n)[ \t]{{0,8}}(?:{_NOUN}\b)?{_LIST}[.,:;!]{{0,2}}[ \t]{{0,8}}(?=\n|\Z)"
)
_PHRASES = _patterns(
    # "The correct answer to the question is (B)", "Answer: B", "the answer would be option B".
    r"(?:\b(?:answers?|solution|Antwort|Lösung|respuesta|réponse)\b|答案)"
    rf"[^.:=\n]{{0,80}}?{_IS}{_SURELY}{_LIST}",
    rf"\b(?:{_GOOD}|final|my|only)\s(?:{_NOUN}s?|one)\b[^.:=\n]{{0,80}}?{_IS}{_SURELY}{_LIST}",
    rf"\b(?:ans|final|key|conclusion)\s?:{_SURELY}{_LIST}",
    rf"(?:\b(?:option|choice|letter)\b|选项)\s{{0,3}}{_IS}{_SURELY}{_LIST}",
)
_DENIALS = _patterns(
    rf"(?:\banswers?\b|\bAntwort\b|答案)[^.:=\n]{{0,40}}?{_NOT}(?:\s(?:be|is|the))?{_SURELY}{_LIST}"
)
_REMARKS = _patterns(
    r"(?:\b(?:choose|chose|pick|select|go with|going with|opt for|settle on|wähle|nehme)\b|选择?)"
    rf"{_SURELY}{_LIST}",
    rf"{_SINGLE}\s{{1,3}}(?:is|must be|ist|是)\s{{1,3}}(?:the\s|die\s)?"
    rf"(?:(?:only\s)?{_GOOD}\s(?:{_NOUN}|one)|answer)\b{_END}",
    # "So B.", "Therefore, it must be (B)", "It's B", "I think B".
    r"(?:\b(?:so|therefore|thus|hence|consequently|leaves|leaving|leaves us with|I think|I believe"
    r"|I'd (?:say|guess)|most likely|(?:which is|matches|corresponds to|agree with)"
    r" (?:option|choice)"
    r"|I would say|I guess|definitely|probably|also|daher|it's|it is|it must be|must be|should be"
    r"|has to be|guess is|guess would be|would be|es ist)\b|所以|因此|而是)"
    rf"[,:]?(?:\s(?:it is|it's|it must be|that|we have|with|us with|only|just))?"
    rf"{_SURELY}{_LIST}{_END}",
    rf"(?<!thing )(?<!\ball )\bbut\s(?:rather\s)?{_LIST}{_END}",
    rf"\bonly\s(?:{_NOUN}\s)?{_LIST}\s(?:satisf\w{{2,3}}|works?|fits?|match(?:es)?|meets?|remains"
    rf"|holds|makes sense|is {_GOOD}|is (?:left|possible|valid|consistent))\b"
    r"(?!\s(?:if|when|for)\b)",
)
_VERDICTS = _patterns(
    rf"{_SINGLE}\s{{1,3}}(?:is|must be|ist|是)?\s{{0,3}}(?:the\s(?:most\s)?)?"
    rf"(?:{_GOOD}|richtig|korrekt|正确的?){_END}",
)
_SMALL_ENDS = re.compile(r"\s{0,6}\Z|[ \t]{0,6}\n|[)\]}\"'<.,;:!?\\]")
_CLAUSE = re.compile(r"[.;:!?\n,—→⇒]|\b(?:so|therefore|thus|hence|but|because|since|while)\b", re.I)
_SENTENCE = re.compile(r"[.;!?\n]|(?<!\bif )\b(?:so|therefore|thus|hence)\b", re.I)
_NOT_MINE = re.compile(
    r"\b(?:many|people|students|others|someone|somebody|everyone|often|tempting|naive\w{0,2}"
    r"|at first|says|claims|claimed|initial\w{0,2}|originally|previously|considered|could|might|may"
    r"|whether|trap|distractor|didn't"
    r"|(?:some|most|they) (?:might|may|say|think|would|choose|pick|of|readers|models)"
    r"|(?:other|another|alternative)\s(?:\w{1,20}\s)?(?:answers?|options?|choices?)"
    r"|(?:common|popular) (?:mistake|wrong|error|answer|choice|misconception|guess))\b",
    re.I,
)
_SUPPOSED = re.compile(r"\b(?:if|unless|suppose|assume|imagine|falls|wenn)\b|如果|假设", re.I)
_DOUBTED = re.compile(
    r"\s{0,3}\?|[)\]}\"']{0,3}[,]?[ ]{1,3}(?:if|unless|when|only (?:if|when|for|in)|provided"
    r"|otherwise|wenn)\b|[^.\n]{0,20}\balso (?:possible|correct|right|plausible)\b"
    rf"|, which (?:is|was) {_NOT}"
    rf"|[ ](?:is|are|has)[ ]an?\b|\s{{1,3}}(?={_VERB})[^.;,\n]{{0,40}}?{_NOT}",
    re.I,
)
_ALSO = re.compile(
    r"[^.;:\n]{0,80}?\b(?:or|and)\s(?:option\s)?([A-Z])\s(?:for|if|when|otherwise)\b"
)
_LETTERS = rf"(?:{_NOUN}s?\s)?{_LIST}"
_EXCLUDED = _patterns(
    rf"{_NOT}[ ]{{1,3}}(?:be\s|is\s|the\s|answer\s){{0,3}}(?:both\s|either\s)?{_LETTERS}"
    rf"(?:\s(?:nor|or|and)\s(?:[A-Z]\b))?",
    rf"(?<![\w']){_SUBJECT}\s{{1,3}}(?={_VERB})[^.;,\n]{{0,30}}?{_NOT}",
    rf"(?<![\w']){_SUBJECT}\s{{0,3}}{_NOT}",
)
_BRACKETS = re.compile(r"[(\[]\s{0,3}([A-Z])\s{0,3}[)\]]|^[ \t]{0,8}([A-Z])\)", re.MULTILINE)
_SEPARATE = re.compile(r"\s{0,3}(?:[.,;:!<A-Z0-9$\\]|\Z)")
_LEADING = re.compile(
    rf"\s{{0,9}}(?:{_NOUN}\s)?(?!I,){_LIST}\s?(?:[.:,\n]|(?<=\))|\s{{0,9}}\Z|\s[-–—]\s)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?<![\w'])\(?([A-Z])[.):]\s")
_LETTER_ONLY = re.compile(
    rf"(?:\A|(?<!vs)[.;!\n])\s{{0,3}}(?:{_NOUN}\s)?{_LIST}\s{{0,3}}(?=[.;!\n]|\Z)", re.I
)
_LONGEST = 8_000
"""Number of characters that are searched at the beginning and at the end of a text."""
_LONGEST_UNMARKED = 300
"""Maximum length of a text in which an unmarked letter counts."""


def chosen_letter(completion: str, num_choices: int) -> str | None:
    """Returns the capital letter that a completion settles on after its thinking, or None.

    Text before a retraction ("No, wait") does not count, nor do letters that are ruled out ("can't
    be A"), hypothetical ("if you choose A") or attributed to others ("many pick A"). The first of
    these kinds that occurs decides:

    1. The last marked answer: a box, a tag, "Answer: (b)", "the answer is B", a line of one letter.
    2. The last statement such as "I choose B", "so B", "only B works".
    3. "B is correct", if only one letter is called correct.
    4. In a short text, or at its beginning: one letter in brackets, as a label ("B. Paris") or as a
       sentence; or the only letter that is not ruled out.

    Several letters together ("A or B") do not count as a choice.

    Example:
        >>> chosen_letter("The answer can't be A. It is B.", 4), chosen_letter("A or B", 4)
        ('B', None)
    """
    allowed = set(string.ascii_uppercase[:num_choices])
    text = _plain(completion)
    letter = (
        _marked(text, allowed)
        or _last(_statements(text, _REMARKS))
        or set[str]().union(*(letters for _, letters in _statements(text, _VERDICTS)))
        or _unmarked(text, allowed)
    )
    return letter.pop() if len(letter) == 1 and letter <= allowed else None


def _plain(completion: str) -> str:
    text = after_thinking(completion).translate(_CHARACTERS)
    if len(text) > 2 * _LONGEST:
        text = text[:_LONGEST] + "\n\n" + text[-_LONGEST:]
    text = _NEXT_TO_CHINESE.sub(" ", _DECORATION.sub("", text))
    retractions = list(_RETRACTION.finditer(text))
    return text[retractions[-1].end() :].lstrip(" \n,.:;!-—…") if retractions else text


def _marked(text: str, allowed: set[str]) -> set[str]:
    lines = [each for each in _statements(text, _LINES) if each[1] <= allowed]
    if len({frozenset(letters) for _, letters in lines}) > 1:  # headings
        lines = []
    marked = [*lines, *_statements(text, _MARKS), *_statements(text, _PHRASES)]
    for match in _matches(text, _DENIALS):
        denied = _letters(match)
        marked = [each for each in marked if each[0] > match.start() or not each[1] <= denied]
    return _last(marked)


def _last(statements: Iterable[tuple[int, set[str]]]) -> set[str]:
    return max(statements, key=lambda each: each[0], default=(0, set[str]()))[1]


def _matches(text: str, patterns: Iterable[re.Pattern[str]]) -> Iterator[re.Match[str]]:
    for pattern in patterns:
        yield from (match for match in pattern.finditer(text) if _letters(match))


def _letters(match: re.Match[str]) -> set[str]:
    """Returns the letters of a list; none if a small letter is a word ("the answer is a man")."""
    if match["first"].islower() and not _SMALL_ENDS.match(match.string, match.end("first")):
        return set()
    return {match["first"].upper(), *re.findall(r"\b[A-Z]\b", match["more"])}


def _statements(text: str, patterns: Sequence[re.Pattern[str]]) -> Iterator[tuple[int, set[str]]]:
    """Yields the position of each statement's first letter, and all its letters."""
    for match in _matches(text, patterns):
        before = text[max(0, match.start() - 100) : match.start()]
        matched = text[match.start() : match.start("first")].rstrip(" :=([{\"'")
        clause = _CLAUSE.split(matched)[-1]
        if not _CLAUSE.match(matched):
            clause = _CLAUSE.split(before)[-1] + clause
        letters = _letters(match)
        if _NEGATED.search(clause):
            continue
        if patterns not in (_MARKS, _LINES):
            supposed = _SENTENCE.split(before)[-1] + matched
            rest = text[match.end() : match.end() + 100]
            if _NOT_MINE.search(clause) or _SUPPOSED.search(supposed) or _DOUBTED.match(rest):
                continue
            if also := _ALSO.match(rest):
                letters.add(also[1])
        yield match.start("first"), letters


def _unmarked(text: str, allowed: set[str]) -> set[str]:
    is_short = len(text) <= _LONGEST_UNMARKED
    excluded = list(_matches(text[:_LONGEST_UNMARKED], _EXCLUDED)) if is_short else []
    rest = text
    for match in excluded:
        rest = rest.replace(match[0], " ")
    if is_short:
        matches = list(_BRACKETS.finditer(rest))
        letters = {match[1] or match[2] for match in matches} & allowed
        if letters and any(_SEPARATE.match(rest, match.end()) for match in matches):
            return letters
    leading = _LEADING.match(rest)
    if leading and (letters := _letters(leading)) & allowed:
        following = chr(ord(min(letters)) + 1)
        return set() if following in _LABEL.findall(text) else letters
    if not is_short:
        return set()
    if bare := allowed.intersection(
        letter for match in _matches(rest, [_LETTER_ONLY]) for letter in _letters(match)
    ):
        return bare
    for match in excluded:
        is_denied = _NEGATED.search(text[max(0, match.start() - 20) : match.start()])
        if len(left := allowed - _letters(match)) == 1 and len(allowed) > 2 and not is_denied:
            return left
    return set()


class MultipleChoiceScorer(Scorer):
    """Scores 1.0 if the completion chooses the letter of the answer, else 0.0.

    A completion that chooses no letter, or contradicts itself, scores 0. A row whose answer is not
    one of the letters is an error.
    """

    def __init__(self, *, num_choices: int) -> None:
        self._num_choices = num_choices

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout."""
        return [self._outcome(rollout) for rollout in rollouts]

    def missing_columns(self, prompt: Prompt) -> Sequence[str]:
        """Returns `answer` if the row has none; raises if it is not one of the choices."""
        if prompt.answer:
            self._letter(prompt)
        return () if prompt.answer else ("answer",)

    def _outcome(self, rollout: Rollout) -> float | RewardError:
        try:
            letter = self._letter(rollout.prompt)
        except RewardError as error:
            return error
        return float(chosen_letter(rollout.text, self._num_choices) == letter)

    def _letter(self, prompt: Prompt) -> str:
        answer = prompt.answer.strip().strip("().").upper()
        if len(answer) != 1 or answer not in string.ascii_uppercase[: self._num_choices]:
            raise RewardError(
                f"the answer of prompt {prompt.id!r} is not one of the choices",
                expected=f"a letter from A to {string.ascii_uppercase[self._num_choices - 1]}",
                got=repr(prompt.answer)[:100],
                fix="correct the row, or set environment.num_choices",
            )
        return answer
