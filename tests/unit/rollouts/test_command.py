"""Recorded rollouts on the screen, also hostile ones."""

from nemo_rl_core.rollouts.__main__ import main
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.types import Completion, Prompt, Rollout

PROMPT = Prompt("p", "1+2=", (1, 2), "3", "t")
GOOD = Rollout(PROMPT, Completion((4, 5), (-0.5, -0.1), truncated=False), "3").scored(1.0)
TURNS = Rollout(
    PROMPT,
    Completion((4, 5, 6, 7), (-0.5, 0.0, 0.0, -0.1), True, (True, False, False, True)),
    "3\n4",
    reward=0.75,
    turn_rewards=(0.5, 0.25),
    messages=(("user", "1+2="), ("assistant", "3"), ("environment", "no"), ("assistant", "4")),
)
HOSTILE = Rollout(PROMPT, GOOD.completion, "\x1b[2J\n--- prompt p\u202e\x07\u2028x\r")


def test_steps_are_listed(tmp_path, capsys):
    records = RolloutRecords(tmp_path)
    records.save(1, [GOOD, GOOD.failed("why"), TURNS])
    records.save(20, [GOOD.failed("why")])
    assert main(["list", str(tmp_path)]) == 0
    _, first, last = capsys.readouterr().out.splitlines()
    # (1 + 0.75) / 2, (2 + 4) / 2 tokens, (1 + 2) / 2 turns
    assert first.split() == ["1", "3", "1", "0.875", "3.0", "1.50"]
    assert last.split()[:3] == ["20", "1", "1"]


def test_a_step_is_shown(tmp_path, capsys):
    RolloutRecords(tmp_path).save(3, [GOOD, TURNS, GOOD.failed("why")])
    assert main(["show", str(tmp_path), "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "sample 0: reward 0.75 (0.5 + 0.25), truncated\n" in out
    assert "user: 1+2=\nassistant: 3\nenvironment: no\nassistant: 4\n(answer: 3)\n" in out
    assert "--- 1 more (--limit 3)" in out
    assert main(["show", str(tmp_path), "--step", "3", "--failed"]) == 0
    assert capsys.readouterr().out.startswith("--- prompt p, group 0, sample 0: failed: why\n")


def test_hostile_text_is_inert(tmp_path, capsys):
    RolloutRecords(tmp_path).save(1, [HOSTILE, GOOD.failed(HOSTILE.text)])
    main(["show", str(tmp_path)])
    out = capsys.readouterr().out
    assert not set("\x1b\x07\r\u202e\u2028") & set(out)
    assert [line[:12] for line in out.splitlines()].count("--- prompt p") == 2
    assert "assistant: \\x1b[2J\\n--- prompt p\\u202e\\x07\\u2028x\\r\n" in out


def test_a_missing_step_is_explained(tmp_path, capsys):
    assert main(["show", str(tmp_path), "--step", "4"]) == 1
    assert "no rollouts of step 4" in capsys.readouterr().err
