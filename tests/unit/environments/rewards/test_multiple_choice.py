import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.single_turn import MultipleChoice
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.needs import refuse_incomplete_rows
from nemo_rl_core.environments.rewards.multiple_choice import chosen_letter
from nemo_rl_core.errors import DataError, RewardError
from nemo_rl_core.types import Rollout
from tests.graders.multiple_choice import CHOICE_ROWS, KNOWN_CHOICE_FAULTS, choice_verdicts

CHOOSE_B = [
    "B",
    "b",
    " B. ",
    "(B)",
    "B)",
    "[B]",
    "**B**",
    "B. Paris",
    "B: Paris",
    "b) paris",
    "B\nbecause Paris is the capital",
    "Answer: B",
    "answer: b",
    "ANSWER: B",
    "Answer:B",
    "Answer: (B)",
    "Answer: **B**",
    "**Answer:** B",
    "**Answer: B. Paris**",
    "Answer = B",
    "The answer is B.",
    "The answer is (B).",
    "The answer is (b) Paris.",
    "The answer is: B",
    "The answer is option B",
    "The correct answer is B because A is a city in Spain.",
    "The correct option is B) Paris",
    "The best choice would be B.",
    "The answer to this question is B",
    "Therefore, the final answer is $\\boxed{B}$.",
    "\\boxed{\\text{B}}",
    "\\boxed{(B)}",
    "\\boxed{B. Paris}",
    "<answer>B</answer>",
    "<answer> (b) </answer>",
    "I choose B.",
    "I would go with option B",
    "I'd pick (B) here",
    "Option B is correct.",
    "B is the correct answer.",
    "(A) is wrong, (C) is wrong too. The answer is B.",
    "The answer is not A. It is B.",
    "Not A, C or D. B",
    "Neither A nor C, so (B)",
    "A is incorrect; B",
    "<think>The answer is A.</think>B",
    "<think>Answer: C</think>\n\n(B) Paris",
    "The answer is A. Wait, no: the answer is B.",
    "\\boxed{A} ... I was wrong. The answer is B.",
    "The answer is A... let me see. \\boxed{B}",
    "A good guess would be B",
    "I think it must be B",
    "Let me think. It is (B), and only (B).",
    "Is the answer A? No. Answer: B",
    "The answer is not A. It is B, so B.\nAnswer: B",
    "The answer is a bit tricky. Answer: B",
]


@pytest.mark.parametrize("completion", CHOOSE_B)
def test_phrasings_of_b(completion: str) -> None:
    assert chosen_letter(completion, 4) == "B"


NOTHING = [
    "",
    " ",
    "Paris",
    "I do not know",
    "A or B",
    "(A) or (B)",
    "Answer: A or B",
    "Answer: A, B",
    "The answer is A and B.",
    "The answers are A and B",
    "\\boxed{A, B}",
    "A B C D",
    "(A) (B) (C) (D)",
    "Answer: E",
    "Not A.",
    "The answer is not B.",
    "<think>The answer is B.",
    "The answer is 42",
    "The answer is a number that nobody knows.",
    "Bananas",
    "An apple, because I'd like one",
    "I'm sure",
    "DNA",
    "\\boxed{}",
    "Answer:",
]


@pytest.mark.parametrize("completion", NOTHING)
def test_no_letter_and_several_letters_are_not_a_choice(completion: str) -> None:
    assert chosen_letter(completion, 4) is None


@pytest.mark.parametrize("letter", "ABCDEFGHIJ")
@pytest.mark.parametrize("form", ["{}", "({})", "Answer: {}", "\\boxed{{{}}}", "{}. A thing"])
def test_every_letter_in_the_usual_forms(letter: str, form: str) -> None:
    assert chosen_letter(form.format(letter), 10) == letter


def test_letters_beyond_the_choices_do_not_count() -> None:
    assert chosen_letter("(E) or (B)", 4) == "B"
    assert chosen_letter("(E) or (B)", 5) is None


@given(st.text(max_size=300), st.integers(2, 26))
def test_any_text_gives_a_choice_or_none(text: str, num_choices: int) -> None:
    letter = chosen_letter(text, num_choices)
    assert letter is None or letter in string.ascii_uppercase[:num_choices]


@given(st.text(max_size=100), st.sampled_from("ABCD"))
def test_a_last_line_with_the_answer_settles_it(text: str, letter: str) -> None:
    assert chosen_letter(f"{text}\n\nAnswer: ({letter}).", 4) == letter


def test_verdicts_of_the_table() -> None:
    assert {row for row, score in choice_verdicts() if score != row.score} == KNOWN_CHOICE_FAULTS
    assert all(row.score == 1 for row in KNOWN_CHOICE_FAULTS)
    assert sum(row.score for row in CHOICE_ROWS) >= 250
    assert sum(not row.score for row in CHOICE_ROWS) >= 140


@pytest.mark.parametrize(
    "piece",
    [
        "answer ",
        "(",
        "A, ",
        "\\boxed{",
        "is is ",
        "the answer is A or ",
        "A\n",
        "**",
        " ",
        "can't ",
    ],
)
def test_long_repetitive_text_is_read(piece: str) -> None:
    assert chosen_letter(piece * (100_000 // len(piece)) + "\n\nAnswer: B", 4) == "B"


def test_each_row_has_a_score_or_an_error(rollout: Callable[..., Rollout]) -> None:
    scorer = make_scorer(MultipleChoice())
    rollouts = [
        rollout("The answer is C.", answer="C"),
        rollout("The answer is C.", answer="(B)"),
        rollout("C", answer=" c "),
        rollout("C", answer="Paris"),
        rollout("E", answer="E"),
        rollout("A or C", answer="C"),
    ]
    outcomes = scorer.score(rollouts)
    assert [outcomes[i] for i in (0, 1, 2, 5)] == [1.0, 0.0, 1.0, 0.0]
    assert all(isinstance(outcomes[i], RewardError) for i in (3, 4))
    assert "a letter from A to D" in str(outcomes[4])
    prompts = [each.prompt for each in rollouts]
    with pytest.raises(DataError, match=r"2 of 6 rows .* not one of the choices"):
        refuse_incomplete_rows(prompts, MultipleChoice(), name="train")
    refuse_incomplete_rows(prompts[:3], MultipleChoice(), name="train")
