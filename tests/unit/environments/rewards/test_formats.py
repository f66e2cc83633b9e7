import pytest

from nemo_rl_core.config.single_turn import ExactMatch, JsonSchemaMatch, RegexMatch
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.errors import ConfigError, RewardError


@pytest.mark.parametrize(
    ("options", "completion", "score"),
    [
        ({}, " New  York\n", 0.0),
        ({}, " New York\n", 1.0),
        ({"white_space": "collapse"}, " New \n York", 1.0),
        ({"white_space": "collapse"}, "NewYork", 0.0),
        ({"white_space": "keep"}, "New York ", 0.0),
        ({"white_space": "keep"}, "New York", 1.0),
        ({}, "new york", 0.0),
        ({"ignore_case": True}, "NEW YORK", 1.0),
    ],
)
def test_exact_match_follows_its_options(rollout, options, completion, score):
    scorer = make_scorer(ExactMatch(**options))
    assert scorer.score([rollout(completion, answer="New York")]) == [score]


@pytest.mark.parametrize(
    ("config", "completion", "score"),
    [
        (RegexMatch(pattern=r"\d+"), " 46\n", 1.0),
        (RegexMatch(pattern=r"\d+"), "46 apples", 0.0),
        (RegexMatch(pattern=r"\d+", match="part"), "46 apples", 1.0),
        (RegexMatch(pattern="(?i)yes"), "YES", 1.0),
        (RegexMatch(pattern="<think>.*</think>.+"), "<think>a\nb</think>c", 0.0),
        (RegexMatch(pattern="(?s)<think>.*</think>.+"), "<think>a\nb</think>c", 1.0),
    ],
)
def test_a_regular_expression_matches_or_does_not(rollout, config, completion, score):
    assert make_scorer(config).score([rollout(completion)]) == [score]


def test_catastrophic_backtracking_fails_only_its_row(rollout):
    scorer = make_scorer(RegexMatch(pattern="(a|aa)+b?", match_timeout_seconds=0.2))
    outcomes = scorer.score([rollout("aab"), rollout("a" * 60 + "!"), rollout("c")])
    assert (outcomes[0], outcomes[2]) == (1.0, 0.0)
    assert isinstance(outcomes[1], RewardError)
    assert "TimeoutError" in outcomes[1].got


def test_an_invalid_regular_expression_is_refused():
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        make_scorer(RegexMatch(pattern="(unclosed"))


SCHEMA = (
    '{"type": "object", "required": ["answer"], "additionalProperties": false,'
    ' "properties": {"answer": {"type": "integer", "minimum": 0}}}'
)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ('{"answer": 46}', 1.0),
        (' {"answer": 46}\n', 1.0),
        ('{"answer": "46"}', 0.0),
        ('{"answer": -1}', 0.0),
        ('{"answer": 46, "more": 1}', 0.0),
        ('{"answer": 46} {"answer": 46}', 0.0),
        ('{"answer": -1, "answer": 46}', 0.0),
        ('{"answer": NaN}', 0.0),
        ("46", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_must_match_the_schema(rollout, completion, score):
    assert make_scorer(JsonSchemaMatch(json_schema=SCHEMA)).score([rollout(completion)]) == [score]


def test_json_is_taken_from_the_last_code_block(rollout):
    scorer = make_scorer(JsonSchemaMatch(json_schema=SCHEMA, where="code_block"))
    good, bad = '```json\n{"answer": 1}\n```', '```\n{"answer": "x"}\n```'
    completions = [f"So:\n{good}\nDone.", f"{bad}\n{good}", f"{good}\n{bad}", '{"answer": 1}']
    assert scorer.score([rollout(each) for each in completions]) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("schema", ["{]", '{"type": "whatever"}', '{"a": 1, "a": 2}'])
def test_an_invalid_schema_is_refused(schema):
    with pytest.raises(ConfigError, match="not a valid JSON Schema"):
        make_scorer(JsonSchemaMatch(json_schema=schema))


def test_a_remote_schema_is_never_fetched(rollout):
    # A request to port 9 would be refused, with another error message.
    scorer = make_scorer(JsonSchemaMatch(json_schema='{"$ref": "http://127.0.0.1:9/schema.json"}'))
    (outcome,) = scorer.score([rollout("{}")])
    assert isinstance(outcome, RewardError)
    assert "Unresolvable" in outcome.got
