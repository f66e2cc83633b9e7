"""Programs and unit tests in real sandboxes."""

import ast
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.config.single_turn import CodeTests
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.rewards.code import CodeScorer
from nemo_rl_core.environments.rewards.code_checker.plain import decode, encode
from nemo_rl_core.environments.rewards.programs import extract_program
from nemo_rl_core.environments.rewards.unit_tests import UnitTests
from nemo_rl_core.environments.sandbox import runner
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

Make = Callable[..., Rollout]
ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


@pytest.fixture(scope="module")
def scorer(namespaces: None) -> CodeScorer:
    made = make_scorer(CodeTests(cpu_seconds=1, wall_seconds=10, memory_mib=128))
    assert isinstance(made, CodeScorer)
    return made


@pytest.fixture
def score(scorer: CodeScorer, rollout: Make) -> Callable[..., float | RewardError]:
    def go(
        program: str, tests: list[Any], names: Sequence[str] = ("add",), **metadata: str
    ) -> float | RewardError:
        row = json.dumps({"tests": tests, "entry_point": list(names), **metadata})
        return scorer.score([rollout(program, metadata=row)])[0]

    return go


Score = Callable[..., float | RewardError]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nor\n```python\nx = 2\n```\n", "x = 2\n"),
        ("```python\nx = 1\n```\nruns as\n```bash\npython x.py\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = '''a ``` b'''\n```", "x = '''a ``` b'''\n"),
        ("```json\n{}\n```", "```json\n{}\n```"),
        ("", ""),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", "x = 1\n"),
        ("   ```python\n   x = 1\n   ```", "x = 1\n"),
        ("~~~{.python}\nx = 1\n~~~", "x = 1\n"),
        ("```python:x.py\nx = 1\n```\n```output\ny = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\n<think>\n```python\nx = 2\n```", ""),
        ("<think>```python\nx = 2\n```</think><answer>x = 1</answer>", "x = 1"),
        ("```python\ndef f(): pass\n```\n```python\nf()\n```", "def f(): pass\n"),
        ("```python\nx = f'<think>{y}</think>'\n```", "x = f'<think>{y}</think>'\n"),
    ],
)
def test_the_program_is_the_last_block_of_python(completion: str, program: str) -> None:
    assert extract_program(completion) == program


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("def add(a, b): return a - b", 0.0),
        ("def add(a, b): return 3", 0.5),
        ("def add(a, b: return", 0.0),
        ("", 0.0),
        ("1 / 0", 0.0),
        ("def add(a, b): return None", 0.0),
        ("add = 3", 0.0),
    ],
)
def test_the_reward_is_the_fraction_of_tests_passed(
    score: Score, program: str, reward: float
) -> None:
    assert score(program, ADD) == reward


def test_the_reward_can_be_all_or_nothing(namespaces: None, rollout: Make) -> None:
    scorer = make_scorer(CodeTests(reward="all"))
    metadata = json.dumps({"tests": ADD, "entry_point": "add"})
    half, full = "def add(a, b): return 3", "add = lambda a, b: a + b"
    rollouts = [rollout(text, metadata=metadata) for text in (half, full, half)]
    assert scorer.score(rollouts) == [0.0, 1.0, 0.0]


PLAIN = """
[None, True, 2**80, -1.5, float("inf"), 1j, "\\ud800\\n", b"\\x00", (1, [2]), {3}, frozenset({4}),
 {(1, 2): {"a": None}}]
"""


def test_plain_data_survives_the_round_trip(score: Score) -> None:
    tests = [
        f"value = {PLAIN.strip()}\nback = same(value)\nassert back == value\n"
        "assert repr(back) == repr(value)",
    ]
    assert score("def same(x): return x", tests, ["same"]) == 1.0


def _never(kind: str, content: Any) -> Any:
    raise AssertionError(f"{kind} is not plain data")


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_HASHABLE = st.recursive(_LEAVES | st.binary(), lambda x: st.tuples(x, x), max_leaves=5)
_PLAIN = st.recursive(
    _HASHABLE,
    lambda x: st.lists(x) | st.dictionaries(_HASHABLE, x) | st.sets(_HASHABLE) | st.tuples(x),
    max_leaves=10,
)


@given(_PLAIN)
def test_decoding_reverses_encoding(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, repr))), _never)
    assert (back, type(back)) == (value, type(value))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "test"),
    [
        # Objects stay with the program; their methods can be called.
        (
            "class Stack(list):\n    push = list.append\nclass Box:\n"
            "    def __init__(self): self.items = []\n    def put(self, x): self.items.append(x)",
            "box = Box()\nbox.put(1)\nbox.put(x=2)\nassert box.items == [1, 2]\n"
            "assert len(box.items) == 2 and box.items[0] == 1",
        ),
        ("LIMIT = 7", "assert LIMIT == 7"),
        ("n = 0\ndef up():\n    global n\n    n += 1", "up()\nassert n == 1\nup()\nassert n == 2"),
        ("class A:\n    _of = 3; _value = [4]", "assert A()._of == 3 and A()._value[0] == 4"),
        ("class A: items = []", "a = A()\na.items.append(1)\nassert a.items == [1]"),
        ("class A: pass", "assert not hasattr(A(), 'x') and getattr(A(), 'x', 3) == 3"),
        ("def bisect(x): return 2 * x", "assert bisect(2) == 4"),
        ("queue = []", "queue.append(3)\nassert queue == [3]"),
        ("def f(): return 4", "assert functools.reduce(max, [f(), 3]) == 4"),
        ("def f(): return iter([]).__next__()", "try:\n    f()\nexcept RuntimeError:\n    pass"),
        ("def f(x): raise ValueError('no')", "try:\n    f(1)\nexcept ValueError:\n    pass"),
        ("def f(g): return g(2)\ndef double(x): return 2 * x", "assert f(double) == 4"),
        ("def count(n): print('noise'); return n", "assert [count(i) for i in range(3)]"),
        ("def pi(): return 3.14159", "assert math.isclose(pi(), math.pi, rel_tol=1e-5)"),
        ("def add(a, b): return a + b", "def check(candidate):\n    assert candidate(1, 2) == 3\n\n"
         "check(add)"),
        ("def f(): return 1\nif __name__ == '__main__': input()", "assert f() == 1"),
        ("import sys\ndef f(): sys.stdout.write('x'); return 1", "assert f() == 1"),
    ],
)  # fmt: skip
def test_supported_tests_pass(score: Score, program: str, test: str) -> None:
    assert score(program, [test], _defined(program), setup="import math") == 1.0


def _defined(program: str) -> list[str]:
    """Returns the names that a program defines."""
    names = [
        node.id if isinstance(node, ast.Name) else node.name
        for top in ast.parse(program).body
        for node in [top, *getattr(top, "targets", [])]
        if isinstance(node, (ast.Name, ast.FunctionDef, ast.ClassDef))
    ]
    return list(dict.fromkeys(names))


FORGERIES = {
    "an early exit": "import os\nos._exit(0)",
    "an early exit in a call": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in a call": "import sys\ndef add(a, b): sys.exit(0)",
    "a printed verdict": "print('passed')\nprint('[0, true]\\n[1, true]')",
    "a verdict on every descriptor": (
        "import os\nfor n in range(64):\n    try: os.write(n, b'[0, true]\\n[1, true]\\n')\n"
        "    except OSError: pass\nos._exit(0)"
    ),
    "equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def add(a, b): return Any()"
    ),
    "an int that is equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Any(5)"
    ),
    "the checker's words": (
        "import json, os\ndef add(a, b):\n"
        "    for n in range(64):\n        try: os.write(n, b'[\"returned\", true]\\n' * 9)\n"
        "        except OSError: pass\n    return True"
    ),
    "rubbish": (
        "import os\ndef add(a, b):\n"
        "    for n in range(64):\n        try: os.write(n, b'[[[[[[' * 100000)\n"
        "        except OSError: pass\n"
    ),
    "builtins changed": (
        "import builtins\nclass AssertionError(Exception): pass\n"
        "builtins.AssertionError = AssertionError\nbuiltins.isinstance = lambda *a: True\n"
        "def add(a, b): return object()"
    ),
    "everything caught": (
        "import sys\nsys.excepthook = sys.settrace(lambda *a: None)\n"
        "def add(a, b):\n    try: raise BaseException\n    except BaseException: return None"
    ),
    "its harness replaced": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "    if 'program' in name: module._reply = lambda *a: ['returned', True]"
    ),
    "the caller's frame": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame.f_back:\n"
        "        frame = frame.f_back\n        for v in frame.f_locals.values():\n"
        "            if isinstance(v, int) and v not in (a, b): return v\n"
    ),
    "expected values read": "import pathlib\nseen = pathlib.Path('tests.json').read_text()",
    "an endless loop": "def add(a, b):\n    while True: pass",
    "an endless loop at once": "while True: pass",
    "a signal to all": "import os\ndef add(a, b): os.kill(-1, 9); os.kill(os.getppid(), 9)",
    "raises what passes": "def add(a, b): raise KeyboardInterrupt",
    "a result too long": "def add(a, b): return 'x' * (1 << 21)",
    "a result too deep": (
        "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x"
    ),
}


SLOW = {
    "an early exit",
    "sys.exit",
    "a printed verdict",
    "builtins changed",
    "expected values read",
    "an endless loop at once",
    "a result too deep",
    "raises what passes",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FORGERIES.keys() - SLOW))
def test_the_verdict_cannot_be_forged(score: Score, name: str) -> None:
    assert score(FORGERIES[name], ADD) == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(SLOW))
def test_the_verdict_cannot_be_forged_in_less_likely_ways(score: Score, name: str) -> None:
    assert score(FORGERIES[name], ADD) == 0.0


@pytest.mark.parametrize("tests", [ADD, [{"stdin": "", "stdout": "3"}]])
def test_a_sandbox_that_does_not_start_is_an_error_and_not_a_zero(
    score: Score, tests: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "_LAUNCHER", tmp_path / "missing.py")
    outcome = score("def add(a, b): return a + b\nprint(3)", tests)
    assert isinstance(outcome, RewardError)
    assert "no sandbox can be built" in str(outcome)


def test_a_dead_program_passes_no_test_that_expects_an_exception(score: Score) -> None:
    expects = "try:\n    f(-1)\n    assert False\nexcept Exception:\n    pass"
    catches_all = "try:\n    f(-1)\nexcept:\n    pass"
    tests = [expects, catches_all]
    assert score("def f(x): raise ValueError", tests, ["f"]) == 1.0
    assert score("import os\ndef f(x): os._exit(0)", tests, ["f"]) == 0.0


def test_tests_before_a_crash_count(score: Score) -> None:
    program = "import os\ndef add(a, b): return a + b if a == 1 else os._exit(0)"
    assert score(program, [*ADD, ADD[0]]) == pytest.approx(1 / 3)


@pytest.mark.thorough
def test_a_slow_program_fails_the_test(score: Score) -> None:
    # The large result keeps the test busy beyond its limit: the program's fault, not the row's.
    long = "def items(): return list(range(100_000))"
    slow = "assert all(x in items() for x in items())"
    assert score(long, [slow], ["items"]) == 0.0


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 1.0),
        ("print(3)", 0.5),
        ("import os\nos._exit(0)", 0.0),
        ("a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)", 0.0),
        ("print(input())\nprint(3)", 0.0),
        ("while True: print(3)", 0.0),
        pytest.param(
            "import time\nprint(3)\nprint(7, flush=True)\ntime.sleep(99)",
            0.0,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_scripts_are_scored_by_their_output(
    namespaces: None, rollout: Make, program: str, reward: float
) -> None:
    tests = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "3 4\n", "stdout": "7 \n\n"}]
    # Only the sleeping program should reach the deadline, even on a busy machine.
    wall_seconds = 2 if "sleep" in program else 60
    scorer = make_scorer(CodeTests(cpu_seconds=1, wall_seconds=wall_seconds))
    assert scorer.score([rollout(program, metadata=json.dumps({"tests": tests}))]) == [reward]


@pytest.mark.parametrize(
    "metadata",
    [
        "{}",
        '{"tests": []}',
        '{"tests": "assert True"}',
        '{"tests": [1]}',
        '{"tests": ["assert True", {"stdin": "", "stdout": ""}]}',
        '{"tests": [{"stdin": "1"}]}',
        '{"tests": ["assert True"], "setup": 3}',
        '{"tests": ["assert True"], "entry_point": 3}',
        '{"tests": ["assert True"], "entry_point": ["a b"]}',
    ],
)
def test_a_row_without_tests_is_an_error(metadata: str) -> None:
    with pytest.raises(RewardError, match=r"no unit tests|names that its program defines"):
        UnitTests.of(metadata)


@pytest.mark.parametrize(
    ("test", "error"),
    [
        ("from os.nothing import *\nassert add(1, 2)", "ModuleNotFoundError"),
        ("assert add(" + "-" * 100_000 + "1)", "MemoryError|RecursionError"),
        ("from antigravity import *\nassert add(geohash)", "it uses geohash"),
    ],
)
def test_an_unreadable_row_is_refused_with_its_error(test: str, error: str) -> None:
    tests = UnitTests.of(json.dumps({"tests": [test], "entry_point": "add"}))
    with pytest.raises(RewardError, match=error):
        tests.check_names()


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def test_add(capsys):\n    assert add(1, 2)", "takes capsys, a fixture of pytest"),
        ("class B(add):\n    pass\nassert B()", "derived from the program's add"),
        ("open('x', 'w').write('1')\nassert add('x')", "does not see its files"),
        (
            "from unittest.mock import patch\nwith patch('time.time'):\n    add()",
            "patches time.time",
        ),
        ("import pytest\n@pytest.fixture\ndef x(): pass\nadd()", "x is a fixture of pytest"),
    ],
)
def test_unsupported_tests_are_refused_when_rows_are_read(test: str, message: str) -> None:
    tests = UnitTests.of(json.dumps({"tests": [test], "entry_point": "add"}))
    with pytest.raises(RewardError, match=message):
        tests.check_names()


def test_nulls_count_as_missing() -> None:
    row = {"tests": [{"stdin": "1", "stdout": "2", "id": None}], "setup": None, "given": None}
    assert UnitTests.of(json.dumps(row)).exchanges[0].stdout == "2"


def test_the_size_of_the_output_can_be_set(namespaces: None, rollout: Make) -> None:
    row = json.dumps({"tests": [{"stdin": "", "stdout": "a" * 3000}]})
    rollouts = [rollout("print('a' * 3000)", metadata=row)]
    assert make_scorer(CodeTests()).score(rollouts) == [1.0]
    assert make_scorer(CodeTests(output_kib=2)).score(rollouts) == [0.0]


@pytest.mark.parametrize(
    ("test", "setup", "message"),
    [
        ("assert add(", "", "SyntaxError"),
        ("assert add(1, 2) == 3", "import numpyy", "imports numpyy, which is not"),
        ("assert add(1, 2) == 3", "try:\n    import numpyy\nfinally:\n    pass", "ModuleNotFound"),
        ("assert add(1, 2) == 3", "1 / 0", "ZeroDivisionError"),
        ("assert add(open('/dev/null'), 2)", "", "TextIOWrapper cannot be sent"),
        ("1 / 0", "", "it uses none of the names that the row declares: add"),
        ("1 / 0\nadd()", "", "ZeroDivisionError: division by zero, before its first request"),
        ("assert add", "raise SystemExit", "SystemExit"),
        ("assert number.add(1, 2)\nadd()", "number = 1", "AttributeError"),
        ("raise KeyboardInterrupt\nadd(1, 2)", "", "KeyboardInterrupt"),
        ("try:\n    add(open('/dev/null'))\nexcept:\n    pass", "", "it passes, before"),
        # HumanEval's tests without the call at their end.
        ("def check(candidate):\n    assert candidate(1, 2) == 3", "", "none of the names"),
        ("def check(candidate):\n    assert candidate(1, 2) == 3\nadd", "", "it passes, before"),
        ("assert callable(add)", "", "it passes, before"),
        ("import os; os._exit(0)\nadd()", "", "it ends its process"),
        pytest.param(
            "while True: pass\nadd()", "", "or reaches the limits", marks=pytest.mark.thorough
        ),
    ],
)
def test_a_broken_row_is_an_error_and_not_a_zero(
    score: Score, test: str, setup: str, message: str
) -> None:
    outcome = score("def add(a, b): return a + b", [test], setup=setup)
    assert isinstance(outcome, RewardError)
    assert message in str(outcome)


@pytest.mark.parametrize(
    "program",
    [
        "",
        pytest.param("while True: pass", marks=pytest.mark.thorough),
        pytest.param("def add(a, b): return [0] * 50_000", marks=pytest.mark.thorough),
    ],
)
def test_a_broken_row_is_broken_for_every_program(score: Score, program: str) -> None:
    # With some of the programs, the first test keeps the checker busy until it is killed.
    busy = "x = add(1, 2)\nassert x == 3 or all(y in x for y in range(len(x)) for z in x)"
    for test in ("1 / 0", "import os; os._exit(0)"):
        outcome = score(program, [busy, test])
        assert isinstance(outcome, RewardError)
        assert "test 1: " in str(outcome)


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 1 / 0",
        "if add(1, 2) != 3: import os; os._exit(0)",
        "assert add(1, 2) == 3; raise KeyboardInterrupt",
    ],
)
def test_a_test_that_fails_after_a_request_is_not_broken(score: Score, test: str) -> None:
    # It ends after a reply, so another reply could change the result.
    assert score("def add(a, b): return 7", [test, *ADD]) == 0.0


@pytest.mark.thorough
def test_the_reports_of_many_tests_are_not_truncated(namespaces: None, rollout: Make) -> None:
    patient = make_scorer(CodeTests(cpu_seconds=300, wall_seconds=500))
    row = json.dumps({"tests": ["assert add(1, 2) == 3"] * 6000, "entry_point": "add"})
    assert patient.score([rollout("def add(a, b): return a + b", metadata=row)]) == [1.0]


@pytest.mark.thorough
def test_a_row_of_many_tests_that_reach_the_limits_together_is_not_broken(score: Score) -> None:
    tests = ["x = sum(range(2_000_000))\nassert add(x, 2) == x + 2"] * 200
    outcome = score("def add(a, b): return a + b", tests)
    assert isinstance(outcome, float)
    assert outcome < 1


def test_one_broken_row_does_not_fail_the_others(scorer: CodeScorer, rollout: Make) -> None:
    good = json.dumps({"tests": ADD, "entry_point": "add"})
    outcomes = scorer.score(
        [
            rollout("def add(a, b): return a + b", metadata=good),
            rollout("def add(a, b): return a + b"),
            rollout("def add(a, b): return 3", metadata=good),
        ]
    )
    assert (outcomes[0], outcomes[2]) == (1.0, 0.5)
    assert isinstance(outcomes[1], RewardError)


def test_no_rollouts_need_no_sandbox(scorer: CodeScorer) -> None:
    assert scorer.score([]) == []
