"""Commands that print recorded rollouts, including hostile text."""

from click.testing import CliRunner, Result

from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.types import Completion, Prompt, Rollout
from workflows.cli import group

PROMPT = Prompt("p", "1+2=", (1, 2), "3", "t")
GOOD = Rollout(PROMPT, Completion((4, 5), (-0.5, -0.1), truncated=False), "3").scored(1.0)
TURNS = Rollout(
    PROMPT,
    Completion((4, 5, 6, 7), (-0.5, 0.0, 0.0, -0.1), True, (True, False, False, True)),
    "3\n4",
    reward=0.75,
    turn_rewards=(0.5, 0.25),
    messages=(
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "3"},
        {"role": "environment", "content": "no"},
        {
            "role": "assistant",
            "reasoning_content": "so",
            "content": "4",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
        },
    ),
)
HOSTILE = Rollout(PROMPT, GOOD.completion, "\x1b[2J\n--- prompt p\u202e\x07\u2028x\r")


def read(*arguments: object) -> Result:
    return CliRunner().invoke(group, ["rollouts", *map(str, arguments)])


def test_steps_are_listed(tmp_path):
    records = RolloutRecords(tmp_path)
    records.save(1, [GOOD, GOOD.failed("why"), TURNS])
    records.save(20, [GOOD.failed("why")])
    result = read("list", tmp_path)
    assert result.exit_code == 0
    _, first, last = result.stdout.splitlines()
    # (1 + 0.75) / 2, (2 + 4) / 2 tokens, (1 + 2) / 2 turns
    assert first.split() == ["1", "3", "1", "0.875", "3.0", "1.50"]
    assert last.split()[:3] == ["20", "1", "1"]


def test_a_step_is_shown(tmp_path):
    RolloutRecords(tmp_path).save(3, [GOOD, TURNS, GOOD.failed("why")])
    result = read("show", tmp_path, "--limit", "2")
    assert result.exit_code == 0
    assert "sample 0: reward 0.75 (0.5 + 0.25), truncated\n" in result.stdout
    last = r'so\n4\n{"name": "add", "arguments": {}}'
    lines = f"user: 1+2=\nassistant: 3\nenvironment: no\nassistant: {last}\n(answer: 3)\n"
    assert lines in result.stdout
    assert "--- 1 more (--limit 3)" in result.stdout
    result = read("show", tmp_path, "--step", "3", "--failed")
    assert result.exit_code == 0
    assert result.stdout.startswith("--- prompt p, group 0, sample 0: failed: why\n")


def test_hostile_text_is_inert(tmp_path):
    RolloutRecords(tmp_path).save(1, [HOSTILE, GOOD.failed(HOSTILE.text)])
    # click's `output` would normalize line ends; these are the bytes of the terminal.
    out = read("show", tmp_path).stdout_bytes.decode()
    assert not set("\x1b\x07\r\u202e\u2028") & set(out)
    assert [line[:12] for line in out.splitlines()].count("--- prompt p") == 2
    assert "assistant: \\x1b[2J\\n--- prompt p\\u202e\\x07\\u2028x\\r\n" in out


def test_a_missing_step_is_explained(tmp_path):
    RolloutRecords(tmp_path).save(3, [GOOD])
    result = read("show", tmp_path, "--step", "4")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no rollouts of step 4" in result.stderr


def test_a_missing_or_misspelt_subcommand_is_refused(tmp_path):
    assert read().exit_code == 2
    assert read("shw", tmp_path).exit_code == 2
