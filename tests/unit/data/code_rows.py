"""One row of each published set of programming problems, in its original layout."""

import base64
import json
import pickle
import zlib
from typing import Any

SUM = "a, b = map(int, input().split())\nprint(a + b)\n"
TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for i, x in enumerate(nums):
            if target - x in seen:
                return [seen[target - x], i]
            seen[x] = i
"""
STARTER = (
    "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        "
)
MBPP = {
    "task_id": 2,
    "text": "Write a function to find the shared elements from the given two lists.",
    "code": "def similar_elements(test_tup1, test_tup2):\r\n  res = tuple(set(test_tup1) & "
    "set(test_tup2))\r\n  return (res) ",
    "test_list": [
        "assert set(similar_elements((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
        "assert set(similar_elements((1, 2, 3, 4),(5, 4, 3, 7))) == set((3, 4))",
    ],
    "test_setup_code": "",
    "challenge_test_list": ["assert set(similar_elements((1,),(2,))) == set()"],
}
SANITIZED = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 98,
    "prompt": "Write a function to multiply all the numbers in a list and divide with the length "
    "of the list.",
    "code": "def multiply_num(numbers):\n    total = 1\n    for x in numbers:\n"
    "        total *= x\n    return total/len(numbers)",
    "test_imports": ["import math"],
    "test_list": [
        "assert math.isclose(multiply_num((8, 2, 3, -1, 7)), -67.2, rel_tol=0.001)",
        "assert math.isclose(multiply_num((-10,-20,-30)), -2000.0, rel_tol=0.001)",
    ],
}
MBPP_PLUS = {
    **SANITIZED,
    "test": "import numpy as np\nfrom math import inf\n\n"
    "def is_floats(x) -> bool:\n    if isinstance(x, float):\n        return True\n"
    "    if isinstance(x, (list, tuple)):\n        return all(isinstance(i, float) for i in x)\n"
    "    if isinstance(x, np.ndarray):\n"
    "        return x.dtype == np.float64 or x.dtype == np.float32\n    return False\n\n\n"
    "def assertion(out, exp, atol):\n    if atol == 0 and is_floats(exp):\n        atol = 1e-6\n"
    "    if out != exp and atol != 0:\n"
    "        assert np.allclose(out, exp, rtol=1e-07, atol=atol)\n"
    "    else:\n        assert out == exp, f'out: {out}, exp: {exp}'\n\n\n"
    "inputs = [[[8, 2, 3, -1, 7]], [[-10, -20, -30]]]\nresults = [-67.2, -2000.0]\n"
    "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
    "    assertion(multiply_num(*inp), exp, 0)\n",
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\n\n"
    "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
    '    """ Check if in given list of numbers, are any two numbers closer to each other than\n'
    "    given threshold.\n    >>> has_close_elements([1.0, 2.0, 3.0], 0.5)\n    False\n"
    '    """\n',
    "canonical_solution": "    for idx, elem in enumerate(numbers):\n"
    "        for idx2, elem2 in enumerate(numbers):\n            if idx != idx2:\n"
    "                distance = abs(elem - elem2)\n                if distance < threshold:\n"
    "                    return True\n\n    return False\n",
    "test": "\n\nMETADATA = {\n    'author': 'jt',\n    'dataset': 'test'\n}\n\n\n"
    "def check(candidate):\n    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True\n"
    "    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.05) == False\n\n",
    "entry_point": "has_close_elements",
}
HUMAN_EVAL_HELPER = {
    "task_id": "HumanEval/32",
    "prompt": "import math\n\n\ndef poly(xs: list, x: float):\n"
    '    """ Evaluates polynomial with coefficients xs at point x. """\n'
    "    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])\n\n\n"
    'def find_zero(xs: list):\n    """ xs are coefficients of a polynomial. """\n',
    "canonical_solution": "    return -xs[0] / xs[1]\n",
    "test": "def check(candidate):\n    import math\n    for coeffs in ([1, 2], [-6, 3]):\n"
    "        solution = candidate(list(coeffs))\n"
    "        assert math.fabs(poly(coeffs, solution)) < 1e-4\n",
    "entry_point": "find_zero",
}
HUMAN_EVAL_PLUS = {
    **HUMAN_EVAL,
    "test": MBPP_PLUS["test"].partition("inputs =")[0]  # type: ignore[attr-defined]
    + "def check(candidate):\n    inputs = [[[1.0, 2.0, 3.9], 0.3], [[1.0, 1.1], 0.3]]\n"
    "    results = [False, True]\n    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
    "        assertion(candidate(*inp), exp, 0)\n",
}
APPS = {
    "problem_id": 0,
    "question": "Read two numbers and print their sum.\n\n-----Input-----\n\nTwo integers.\n",
    "solutions": json.dumps(["print 'Python 2'", SUM]),
    "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
    "difficulty": "introductory",
    "url": "https://codeforces.com/problemset/problem/1/A",
    "starter_code": "",
}
APPS_CALL = {
    **APPS,
    "question": "Given an array of integers, return indices of the two numbers that add up.",
    "solutions": json.dumps([TWO_SUM]),
    "input_output": json.dumps(
        {"fn_name": "twoSum", "inputs": [[[2, 7, 11, 15], 9]], "outputs": [[0, 1]]}
    ),
    "starter_code": STARTER,
}
TACO = {
    "question": "Double the number.",
    "starter_code": "def double(n):\n\t",
    "input_output": json.dumps({"fn_name": "double", "inputs": [[2], [5]], "outputs": [[4], [10]]}),
    "difficulty": "EASY",
    "raw_tags": "['Fundamentals']",
    "name": None,
    "source": "codewars",
    "tags": "[]",
    "skill_types": "[]",
    "url": "https://www.codewars.com/kata/1",
    "Expected Auxiliary Space": None,
    "time_limit": None,
    "date": None,
    "picture_num": None,
    "memory_limit": None,
    "Expected Time Complexity": None,
    "solutions": json.dumps(["def double(n):\n\treturn n * 2"]),
}
CODE_CONTESTS = {
    "name": "1575_A. Another Sorting Problem",
    "description": "Read two numbers and print their sum.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": ["3 4\n"], "output": ["7\n"]},
    "generated_tests": {"input": [], "output": []},
    "source": 2,
    "difficulty": 7,
    "solutions": {"language": [2, 3], "solution": ["int main() {}", SUM]},
    "incorrect_solutions": {"language": [], "solution": []},
    "input_file": "",
    "output_file": "",
}
KOD_CODE = {
    "version": "v1.0",
    "style": "instruct",
    "subset": "Prefill",
    "question_id": "Prefill_1_I",
    "question": "Write a Python class `Stack` and a function `reverse(text)`.",
    "solution": "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
    "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n"
    "        if not self.items:\n            raise IndexError('pop from an empty stack')\n"
    "        return self.items.pop()\n\n"
    "    def __len__(self):\n        return len(self.items)\n\n\n"
    "def reverse(text):\n    return text[::-1]",
    "test": "import pytest\nfrom solution import Stack, reverse\n\n"
    "def test_push():\n    stack = Stack()\n    stack.push(1)\n    assert len(stack) == 1\n"
    "    assert stack.pop() == 1\n\n"
    "def test_empty():\n    with pytest.raises(IndexError):\n        Stack().pop()\n\n"
    "@pytest.mark.parametrize('given, expected', [('ab', 'ba'), ('', '')])\n"
    "def test_reverse(given, expected):\n    assert reverse(given) == expected\n",
    "test_info": [
        {
            "docstring": "Reverses.",
            "function_declaration": "def reverse(text):",
            "function_name": "reverse",
            "parameter_list": "(text)",
        }
    ],
    "gpt_pass_sequence": [1, 1],
    "gpt_difficulty": "easy",
}
PRIME = {
    "source": "apps",
    "task_type": "verifiable_code",
    "in_source_id": "1",
    "prompt": "Solve the following coding problem using the programming language python:\n\nAdd.",
    "gold_standard_solution": f"```python\n{SUM}```",
    "verification_info": json.dumps(
        {
            "language": "python",
            "test_cases": [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}],
        }
    ),
    "metadata": json.dumps({"difficulty": "EASY"}),
    "problem_id": "vcp_1",
}
OPEN_R1 = {
    **PRIME,
    "verification_info": {
        "language": "python",
        "test_cases": [
            {"fn_name": None, "input": "1 2\n", "output": "3\n", "type": "stdin_stdout"}
        ],
    },
}
PRIME_CALL = {
    **PRIME,
    "gold_standard_solution": "```python\ndef double(n):\n    return n * 2\n```",
    "verification_info": json.dumps(
        {
            "language": "python",
            "test_cases": [
                {"type": "function_call", "fn_name": "double", "input": [2], "output": [4]}
            ],
        }
    ),
}
_PRIVATE = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([])))).decode()
LIVE_CODE_BENCH = {
    "question_title": "Sum",
    "question_content": "Read two numbers and print their sum.",
    "platform": "atcoder",
    "question_id": "abc301_a",
    "contest_id": "abc301",
    "contest_date": "2023-05-13T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": _PRIVATE,
    "metadata": "{}",
}
LIVE_CODE_BENCH_CALL = {
    **LIVE_CODE_BENCH,
    "question_content": "Return indices of the two numbers that add up.",
    "platform": "leetcode",
    "starter_code": STARTER,
    "public_test_cases": json.dumps(
        [{"input": "[2, 7, 11, 15]\n9", "output": "[0, 1]", "testtype": "functional"}]
    ),
    "private_test_cases": json.dumps(
        [{"input": "[3, 3]\n6", "output": "[0, 1]", "testtype": "functional"}]
    ),
    "metadata": json.dumps({"func_name": "twoSum"}),
}
DEEP_CODER = {
    "problem": "Read two numbers and print their sum.",
    "solutions": [f"```python\n{SUM}```"],
    "tests": json.dumps([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]),
}
DEEP_CODER_TACO = {**DEEP_CODER, "tests": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})}
DEEP_CODER_LCB = {
    "problem": "Return indices of the two numbers that add up.",
    "starter_code": STARTER,
    "tests": json.dumps(
        [
            {
                "input": "[2, 7, 11, 15]\n9",
                "output": "[0, 1]",
                "testtype": "functional",
                "metadata": {"func_name": "twoSum"},
            }
        ]
    ),
}

ROWS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "mbpp": ("mbpp", MBPP, None),
    "mbpp sanitized": ("mbpp", SANITIZED, None),
    "mbpp plus": ("mbpp", MBPP_PLUS, None),
    "human eval": ("human_eval", HUMAN_EVAL, None),
    "human eval with a helper": ("human_eval", HUMAN_EVAL_HELPER, None),
    "human eval plus": ("human_eval", HUMAN_EVAL_PLUS, None),
    "apps": ("apps", APPS, None),
    "apps with calls": ("apps", APPS_CALL, None),
    "taco": ("apps", TACO, None),
    "code contests": ("code_contests", CODE_CONTESTS, None),
    "kod code": ("kod_code", KOD_CODE, None),
    "prime": ("prime_code", PRIME, None),
    "open r1": ("prime_code", OPEN_R1, None),
    "prime with calls": ("prime_code", PRIME_CALL, None),
    "live code bench": ("live_code_bench", LIVE_CODE_BENCH, SUM),
    "live code bench with calls": ("live_code_bench", LIVE_CODE_BENCH_CALL, TWO_SUM),
    "deep coder": ("deep_coder", DEEP_CODER, None),
    "deep coder of taco": ("deep_coder", DEEP_CODER_TACO, None),
    "deep coder of live code bench": ("deep_coder", DEEP_CODER_LCB, TWO_SUM),
}
"""Format, row, and a correct program if the row has none."""
