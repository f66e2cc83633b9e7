r"""Extracts the final answer of a completion as plain LaTeX.

The answer is searched after the thinking: the last `<answer>`, else the last boxes, else the text
after "the answer is".
"""

import re
import unicodedata
from typing import Final

from nemo_rl_core.functional.boxes import last_boxes

_LONGEST = 10_000
"""Maximum number of characters that are searched for an answer."""
_TAGS = r"(?:think|thinking|thought|thoughts|reasoning|reason|analysis|scratchpad)"
_THINKING = re.compile(
    rf"<{_TAGS}>|\[THINK\]|◁think▷|<\|channel\|>\s?(?:analysis|commentary)", re.IGNORECASE
)
_THOUGHT = re.compile(
    rf"</{_TAGS}>|\[/THINK\]|◁/think▷|<\|channel\|>\s?final\b[^<]{{0,20}}<\|message\|>",
    re.IGNORECASE,
)
_ANSWER_TAG = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_END = re.compile(r"</answer>", re.IGNORECASE)
_ANSWER = re.compile(
    r"(?:\banswers?\b\W{0,3}?\s*(?:\bis\b|\bare\b|[:=])|####|答案\s*(?:是|为|為)?)[\s:*_]*",
    re.IGNORECASE,
)
_CONTINUES = re.compile(r"[\w^]|\s*(?:,|and|or|,\s*and)\s*[$\\]")
_SENTENCES = re.compile(r"(?<=[.!?])\s|\n|;")
_END_OF_SENTENCE = re.compile(
    r"[.!?](?=[\s*_\"'`)]|$)(?!\s*\d)|\n|,\s(?!(?:and|or)\s)(?=[a-z]{2,}\s)"
    r"|\s(?=(?:since|because|which|where)\b)"
)

_CHARACTERS: Final = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **{"×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": r"\div ", "∕": "/", "⁄": "/"},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm "},
    **{"∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "°": r"^\circ "},
    **{"~": " ", "’": "'"},
    **dict.fromkeys("“”„", '"'),
    **{"。": ". ", "：": ":", "，": ",", "（": "(", "）": ")"},
}
_TABLE = str.maketrans(_CHARACTERS)
_RAISED = {
    raised: plain for plain, raised in zip("0123456789+-()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", strict=True)
}
_NUMBER = r"(?<![\w.,])\d[\d,]*(?:\\!\d{3}|\{,\}\d{3})*(?:\.\d+)?"
_MONEY = {r"\\\$": "dollars", "€": "euros", "£": "sterling", "¥": "yen", "₹": "rupees"}
_TIMES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLE = re.compile(rf"(?<![\w./,])(\d+)(?:\.(\d+))? ({'|'.join(_TIMES)})\b")
_NEGATION = (
    r"(?:\bnot|n't|\bnever|\bcannot|\brul(?:e|es|ed|ing) out|\bexclud\w+|\beliminat\w+"
    r"|\banything but|\bat (?:least|most)|\b(?:more|less|fewer|greater|larger|smaller) than"
    r"|\bbetween\W+\S+\W+and)"
)
_RULED_OUT = re.compile(
    rf"{_NEGATION}\W+(?:(?!so\b|then\b|thus\b|hence\b|but\b|is\b|it\b|must\b)[A-Za-z']+\W+){{0,3}}"
    r"\d[\d.,/]*\D*$"
    r"|\d\s+(?:is|are|was|would be)\s+(?:not\b|too\b|wrong|incorrect|false|impossible)\D*$"
    r"|\d\s+or\s+(?:more|less|fewer|greater)\b\D*$",
    re.IGNORECASE,
)
_RAISED_RUN = re.compile(f"[{''.join(_RAISED)}]+")
_FRACTION = re.compile(r"(\d{1,9}\s?)?([¼-¾⅐-⅞])")
_REPLACED: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*(\d+|[a-z]\b)", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]{1,50})\)", r"\\sqrt{\1}"),
        *((rf"{sign}\s*({_NUMBER})(?![\w.])", rf"\1 {name}") for sign, name in _MONEY.items()),
        *((rf"({_NUMBER})\s*{sign}", rf"\1 {name}") for sign, name in _MONEY.items()),
        (rf"(?:{'|'.join(_MONEY)})\s*", ""),
        (r"(?<=\d)(?:\\[,!;: ]|\{,\})+(?=\d{3}(?!\d))", ""),  # thousands
        (r"(?<=\d),\\!(?=\d{3})", ","),
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1\\times 10^{\2}"),
        (r"\\left\s*\.|\\right\s*\.", ""),
        (r"\\varnothing\b", r"\\emptyset"),
        # Markup: code, bold, italic.
        (r"```\w*|`", ""),
        (r"(?<![\w*\\])(\*{1,3}|__)(?=\S)([^*\n]{1,200}?)(?<=\S)\1(?![\w*])", r"\2"),
    )
)
_MIXED = re.compile(r"(?<![\w.,/^])(?<!\^\{)(\d{1,6})[ -](\d{1,4})/(\d{1,4})(?![\d/.]\d|\w)")


def answering_text(completion: str) -> str:
    """Returns the normalized end of a completion after its thinking, for the other functions."""
    return normalized(after_thinking(completion)[-_LONGEST:])


def final_answer(text: str) -> str:
    r"""Returns the answer of a completion, or all text after the thinking if nothing marks it.

    `text` is a result of `answering_text`. Several boxes of one sentence are separated by commas.

    Example:
        >>> final_answer(r"<think>\boxed{9}?</think> It is $x=\boxed{1}$ or $x=\boxed{2}$.")
        '1,2'
        >>> final_answer("The answer is 7, because 3 + 4 = 7.")
        '7'
    """
    text = after_thinking(text)
    if tags := list(_ANSWER_TAG.finditer(text)):
        inner = text[tags[-1].end() :]
        end = _ANSWER_END.search(inner)
        text = inner[: end.start()] if end else inner
    if (boxed := last_boxes(text, is_cut=True)) is not None:
        text = boxed
    if marks := list(_ANSWER.finditer(text)):
        rest = text[marks[-1].end() :]
        text = _first_sentence(rest)
        if is_ruled_out(text):
            text = _first_sentence(rest[len(text) :].lstrip(" ,.;")) or text
    return text.strip()


def is_ruled_out(answer: str) -> bool:
    """Whether the last sentence with a number rules the number out, or gives only a bound.

    Example:
        >>> is_ruled_out("It cannot be 7."), is_ruled_out("x is not 3, so x = 7.")
        (True, False)
    """
    sentences = [each for each in _SENTENCES.split(answer[-_LONGEST:]) if re.search(r"\d", each)]
    return bool(sentences and _RULED_OUT.search(sentences[-1][-200:]))


def is_marked(text: str) -> bool:
    """Whether something marks the answer: a tag, a box, or words such as "the answer is"."""
    text = after_thinking(text)
    has_box = last_boxes(text, is_cut=True) is not None
    return has_box or any(each.search(text) for each in (_ANSWER_TAG, _ANSWER))


def after_thinking(text: str) -> str:
    """Returns the text after the last thinking block; empty if thinking did not end."""
    ends = list(_THOUGHT.finditer(text))
    rest = text[ends[-1].end() :].removesuffix("<|return|>") if ends else text
    return "" if _THINKING.search(rest) else rest


def normalized(text: str) -> str:
    r"""Replaces mathematical characters, markup, currencies and mixed numbers by plain LaTeX.

    Example:
        >>> normalized("**2 2/3** of \\$9 is x² − ½ million")
        '8/3 of 9 dollars is x^{2} - 1/2 million'
    """
    text = _FRACTION.sub(_improper_of_one, text)
    text = _RAISED_RUN.sub(lambda run: f"^{{{''.join(_RAISED[c] for c in run[0])}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_TABLE))
    text = re.sub(r"[ \t]{2,}", " ", text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return _MULTIPLE.sub(_product, _MIXED.sub(_improper, text))


def _product(match: re.Match[str]) -> str:
    decimals = match[2] or ""
    zeros = _TIMES[match[3]] - len(decimals)
    return match[0] if zeros < 0 else str(int(f"{match[1]}{decimals}{'0' * zeros}"))


def _improper_of_one(match: re.Match[str]) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", match[2]).split("\N{FRACTION SLASH}")
    return f"{int(match[1] or 0) * int(denominator) + int(numerator)}/{denominator}"


def _improper(match: re.Match[str]) -> str:
    full, numerator, denominator = map(int, match.groups())
    if not numerator < denominator:
        return match[0]
    return f"{full * denominator + numerator}/{denominator}"


def _first_sentence(text: str) -> str:
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and (end := text.find(closing, len(opening))) > 0:
            inner = text[len(opening) : end]
            if not _CONTINUES.match(text[end + len(closing) :][:20]):
                return inner
    end_of_sentence = _END_OF_SENTENCE.search(text)
    return text[: end_of_sentence.start()] if end_of_sentence else text
