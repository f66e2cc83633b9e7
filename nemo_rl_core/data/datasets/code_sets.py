"""Readers of published programming problems, for the environment `code`.

The solution of a row, if it has one, is the completion. Rows that the environment cannot run are
refused: sets whose programs need packages (`big_code_bench`, `odex`), and rows without tests.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

Record = Mapping[str, Any]

_ASK = "Answer with a Python program in a ```python block."
_ASK_SCRIPT = (
    "Read the input from stdin and write the output to stdout. Answer with a Python program in a "
    "```python block."
)
_PYTHON_3 = 3
"""Number of Python 3 in the `language` column of CodeContests."""


def mbpp(record: Record) -> dict[str, Any]:
    """Reads a row of MBPP, or of MBPP+."""
    code, tests = _text(record, "code"), _listed(record, "test_list")
    imports = record.get("test_imports")
    setup = "\n".join(_sequence(imports)) or record.get("test_setup_code") or ""
    names = _defined_and_called(code, tests)
    if not names:
        raise ValueError("has tests that call nothing that its code defines")
    text = _text(record, "text" if record.get("text") else "prompt")
    prompt = f"{text}\n\nYour program should pass this test:\n\n{tests[0]}\n\n{_ASK}"
    # MBPP+ has one `test` with more inputs.
    challenges = map(str, _sequence(record.get("challenge_test_list")))
    pieces = [record["test"]] if record.get("test") else [*tests, *challenges]
    return _row(prompt, {"tests": pieces, "entry_point": names, "setup": setup}, code)


def human_eval(record: Record) -> dict[str, Any]:
    """Reads a row of HumanEval, or of HumanEval+; completions continue the prompt or repeat it."""
    prompt, name = _text(record, "prompt"), _text(record, "entry_point")
    test = f"{_text(record, 'test')}\n\ncheck({name})"
    metadata = {"tests": [test], "entry_point": [name], **_helpers(prompt, test, name)}
    solution = _text(record, "canonical_solution")
    return {
        "prompt": prompt,
        "completion": solution,
        "answer": solution,
        "metadata": {**metadata, "given": prompt},
    }


def apps(record: Record) -> dict[str, Any]:
    """Reads a row of APPS, or of TACO."""
    tests, name = _table_tests(_json(record, "input_output"))
    return _problem(record, "question", tests, name, _solutions(record.get("solutions")))


def code_contests(record: Record) -> dict[str, Any]:
    """Reads a row of CodeContests."""
    if record.get("input_file") or record.get("output_file"):
        raise ValueError("reads or writes a file, not stdin and stdout")
    tests: list[dict[str, Any]] = []
    for column in ("public_tests", "private_tests", "generated_tests"):
        cases = record.get(column) or {}
        inputs, expected = _sequence(cases.get("input")), _sequence(cases.get("output"))
        pairs = zip(inputs, expected, strict=True)
        tests += [{"stdin": one, "stdout": other} for one, other in pairs]
    solved = record.get("solutions") or {}
    languages, programs = _sequence(solved.get("language")), _sequence(solved.get("solution"))
    python = [
        program
        for language, program in zip(languages, programs, strict=True)
        if language in (_PYTHON_3, "PYTHON3")
    ]
    return _problem(record, "description", tests, None, python)


def kod_code(record: Record) -> dict[str, Any]:
    """Reads a row of KodCode, which has pytest tests."""
    test, solution = _text(record, "test"), _text(record, "solution")
    imported = re.findall(r"^[ \t]*from solution import ([\w, \t]+)$", test, re.MULTILINE)
    names = [name.strip() for line in imported for name in line.split(",")]
    if not names:
        raise ValueError("has a test without a line `from solution import ...`")
    functions = [info for info in _sequence(record.get("test_info")) if isinstance(info, Mapping)]
    parameters = {info.get("function_name"): info.get("parameter_list") or "" for info in functions}
    function_texts = ", ".join(
        f"`{name}{parameters.get(name, '')}`" for name in dict.fromkeys(names)
    )
    signatures = f"The program defines {function_texts}."
    setup, pieces = _split(test, names)
    metadata = {"tests": pieces, "entry_point": list(dict.fromkeys(names)), "setup": setup}
    return _row(f"{_text(record, 'question')}\n\n{signatures} {_ASK}", metadata, solution)


def prime_code(record: Record) -> dict[str, Any]:
    """Reads a row of PrimeIntellect's SYNTHETIC-1, or of open-r1's verifiable problems."""
    parsed = _json(record, "verification_info")
    solution = record.get("gold_standard_solution")
    if "ground_truth" in parsed:  # a mathematics row of SYNTHETIC-1
        prompt = _text(record, "prompt")
        return {"prompt": prompt, "answer": parsed["ground_truth"], "completion": solution}
    tests, name = _case_tests(_sequence(parsed.get("test_cases")))
    return _row(_text(record, "prompt"), _metadata(tests, name), solution or "")


def live_code_bench(record: Record) -> dict[str, Any]:
    """Reads a row of LiveCodeBench; pickled private tests are left out."""
    cases = [*_sequence(_json(record, "public_test_cases"))]
    # JSON, or a base64 pickle, which could run code.
    with suppress(ValueError):
        cases += _sequence(json.loads(record.get("private_test_cases") or "[]"))
    metadata = record.get("metadata") or "{}"
    name = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    tests, name = _case_tests(cases, name)
    return _problem(record, "question_content", tests, name, [])


def deep_coder(record: Record) -> dict[str, Any]:
    """Reads a row of DeepCoder, in any layout of its three parts."""
    parsed = _json(record, "tests")
    if isinstance(parsed, Mapping):
        tests, name = _table_tests(parsed)
    else:
        tests, name = _case_tests(parsed)
    return _problem(record, "problem", tests, name, _solutions(record.get("solutions")))


def needs_packages(record: Record) -> dict[str, Any]:
    """Refuses a row of a set whose programs need packages."""
    raise ValueError("has a program that needs packages (libs), which are not available here")


def _problem(
    record: Record,
    column: str,
    tests: list[dict[str, Any]],
    name: str | None,
    solutions: Sequence[str],
) -> dict[str, Any]:
    starter = (record.get("starter_code") or "").strip("\n")
    text = _text(record, column)
    if starter:
        text += f"\n\nUse this starter code:\n\n```python\n{starter}\n```"
    elif name:
        text += f"\n\nThe program defines the function {name}."
    program = next((solution for solution in solutions if _compiles(_unfenced(solution))), "")
    return _row(f"{text}\n\n{_ASK if name else _ASK_SCRIPT}", _metadata(tests, name), program)


def _row(prompt: str, metadata: dict[str, Any], program: str) -> dict[str, Any]:
    if not metadata["tests"]:
        raise ValueError("has no tests")
    is_plain = program and "```" not in program
    completion = f"```python\n{program.strip(chr(10))}\n```" if is_plain else program
    return {"prompt": prompt, "completion": completion, "answer": completion, "metadata": metadata}


def _metadata(tests: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    return {"tests": tests, **({"entry_point": name} if name else {})}


def _table_tests(table: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Reads tests of `{"inputs": [...], "outputs": [...]}` and the called function, if any."""
    name = table.get("fn_name") or None
    inputs, expected = _sequence(table.get("inputs")), _sequence(table.get("outputs"))
    pairs = list(zip(inputs, expected, strict=True))
    if name is None:
        return [{"stdin": _lines(one), "stdout": _lines(other)} for one, other in pairs], None
    return [_called(one if isinstance(one, list) else [one], other) for one, other in pairs], name


def _case_tests(
    cases: Sequence[Mapping[str, Any]], name: str | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Reads `[{"type": ..., "input": ..., "output": ...}]`, with the type names of several sets."""
    tests: list[dict[str, Any]] = []
    for case in cases:
        kind = case.get("testtype") or case.get("type") or "stdin"
        inputs, expected = case.get("input"), case.get("output")
        if kind in ("stdin", "stdin_stdout"):
            tests.append({"stdin": _lines(inputs), "stdout": _lines(expected)})
        elif kind == "functional":  # one line of JSON per argument
            name = (case.get("metadata") or {}).get("func_name") or name
            arguments = [json.loads(line) for line in str(inputs).splitlines() if line.strip()]
            tests.append({"arguments": arguments, "returns": json.loads(str(expected))})
        elif kind == "function_call":
            name = case.get("fn_name") or name
            values = json.loads(inputs) if isinstance(inputs, str) else inputs
            tests.append(_called(values if isinstance(values, list) else [values], expected))
        else:
            raise ValueError(f"has a test of the unknown type {kind!r}")
    if any("arguments" in test for test in tests) and not name:
        raise ValueError("has tests that call a function, but no function name")
    return tests, name


def _called(arguments: list[Any], expected: Any) -> dict[str, Any]:
    """Returns a call; these sets write its result directly, or in a list with one item."""
    is_wrapped = isinstance(expected, list) and len(expected) == 1
    return {
        "arguments": arguments,
        "returns": expected,
        **({"or_returns": expected} if is_wrapped else {}),
    }


def _split(test: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the code before each test and the `test_...` functions, or the full text as one."""
    try:
        tree = ast.parse(test)
    except SyntaxError as error:
        raise ValueError(f"has a test that is not Python: {error.msg}") from None
    pieces, setup = [], []
    for node in tree.body:
        decorated = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorated)])
        source = "\n".join(test.splitlines()[first - 1 : node.end_lineno])
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            pieces.append(source)
        elif isinstance(node, ast.ImportFrom) and node.module == "solution":
            continue
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
            setup.append(source)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        else:
            return "", [test]
    decorators = " ".join(piece.partition("def ")[0] for piece in pieces)
    uses = any(re.search(rf"\b{re.escape(name)}\b", decorators) for name in names)
    return ("", [test]) if uses or not pieces else ("\n".join(setup), pieces)


def _helpers(prompt: str, test: str, name: str) -> dict[str, str]:
    """Returns the prompt's helpers as setup of a test that calls one of them.

    Otherwise the test would call the helpers that the program defines.
    """
    with suppress(SyntaxError):
        others = [n for n in ast.parse(prompt).body if getattr(n, "name", "") != name]
        helpers = {node.name for node in others if isinstance(node, ast.FunctionDef)}
        if helpers & {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}:
            return {"setup": "\n".join(map(ast.unparse, others))}
    return {}


def _defined_and_called(code: str, tests: Sequence[str]) -> list[str]:
    try:
        body = ast.parse(code).body
        read = [n.id for t in tests for n in ast.walk(ast.parse(t)) if isinstance(n, ast.Name)]
    except SyntaxError as error:
        raise ValueError(f"has code or tests that are not Python 3: {error.msg}") from None
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = {node.name for node in body if isinstance(node, kinds)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return [name for name in dict.fromkeys(read) if name in defined]


def _solutions(value: Any) -> list[str]:
    parsed: Any = value
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        parsed = json.loads(value)
    return [str(text) for text in ([parsed] if isinstance(parsed, str) else _sequence(parsed))]


def _unfenced(program: str) -> str:
    parsed = re.search(r"```(?:python)?\n(.*?)```", program, re.DOTALL)
    return parsed[1] if parsed else program


def _compiles(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _text(record: Record, column: str) -> str:
    value = record.get(column)
    if not isinstance(value, str) or not value:
        raise ValueError(f"has no text in {column}")
    return value


def _json(record: Record, column: str) -> Any:
    value = record.get(column)
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        parsed = None
    if not parsed:
        raise ValueError(f"has no tests in {column}")
    return parsed


def _listed(record: Record, column: str) -> list[str]:
    parsed = [str(item) for item in _sequence(record.get(column))]
    if not parsed:
        raise ValueError(f"has no tests in {column}")
    return parsed


def _sequence(value: Any) -> list[Any]:
    return [] if value is None else list(value)
