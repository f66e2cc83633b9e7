"""Every form of user code has the same digest in every process, until it is edited.

Each form is tried where users write code: in a script, in a cell of a notebook, in a module.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

IMPORTS = """
import abc, collections, dataclasses, enum, functools, re, typing
from os import environ
import numpy as np
import torch
from pydantic import BaseModel, field_validator
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
FORMS = {}
"""
FORMS = {
    "a function": "def form(c): return {n}",
    "a lambda": "form = lambda c: {n}",
    "a closure": "def outer(n):\n    return lambda c: n\nform = outer({n})",
    "a partial": "def scaled(n, c): return n\nform = functools.partial(scaled, {n})",
    "an async function": "async def form(c): return {n}",
    "a generator": "def form(c): yield {n}",
    "a decorated function": (
        "def plus(f):\n    @functools.wraps(f)\n    def inner(*a): return f(*a) + {n}\n"
        "    return inner\n@plus\ndef form(c): return 0"
    ),
    "a cached function": "@functools.lru_cache\ndef form(c): return {n}",
    "a dispatched function": (
        "@functools.singledispatch\ndef form(c): return 0\n"
        "@form.register\ndef _(c: int): return {n}"
    ),
    "a callable object": (
        "class Reward:\n    def __call__(self, c): return self.n\nform = Reward()\nform.n = {n}"
    ),
    "a class": "class form:\n    def __call__(self, c): return {n}",
    "a bound method": "class Judge:\n    def score(self, c): return {n}\nform = Judge().score",
    "a class method": (
        "class Judge:\n    @classmethod\n    def score(cls, c): return {n}\nform = Judge.score"
    ),
    "a static method": (
        "class Judge:\n    @staticmethod\n    def score(c): return {n}\nform = Judge.score"
    ),
    "a property": (
        "class Judge:\n    @property\n    def n(self): return {n}\n"
        "    def __call__(self, c): return self.n\nform = Judge()"
    ),
    "a cached property": (
        "class Judge:\n    @functools.cached_property\n    def n(self): return {n}\n"
        "    def __call__(self, c): return self.n\nform = Judge()"
    ),
    "class-level state": (
        "class Judge:\n    weights = {{'a': [{n}]}}\n"
        "    def __call__(self, c): return self.weights['a'][0]\nform = Judge()"
    ),
    "a nested class": (
        "class Outer:\n    class Inner:\n        def __call__(self, c): return {n}\n"
        "form = Outer.Inner()"
    ),
    "a subclass with super": (
        "class Base:\n    def __call__(self, c): return {n}\n"
        "class Sub(Base):\n    def __call__(self, c): return super().__call__(c)\nform = Sub()"
    ),
    "a class with slots": (
        "class Judge:\n    __slots__ = ('n',)\n    def __call__(self, c): return self.n\n"
        "form = Judge()\nform.n = {n}"
    ),
    "a class of an ABC": (
        "class Base(abc.ABC):\n    @abc.abstractmethod\n    def score(self, c): ...\n"
        "class form(Base):\n    def score(self, c): return {n}"
    ),
    "a scorer": "class Own(Scorer):\n    def score(self, rollouts): return [{n}]\nform = Own()",
    "a policy": "class form(PolicyInterface):\n    def train(self, data, loss_fn): return {n}",
    "an engine": (
        "class form(GenerationInterface):\n    def generate(self, data, greedy=False): return {n}"
    ),
    "an environment": "class Own:\n    def step(self, logs, metadata): return {n}\nform = Own()",
    "a protocol": (
        "class Says(typing.Protocol):\n    def __call__(self, c): ...\n"
        "class Own(Says):\n    def __call__(self, c): return {n}\nform = Own()"
    ),
    "a generic class": (
        "T = typing.TypeVar('T')\nclass Own(typing.Generic[T]):\n"
        "    def __call__(self, c): return {n}\nform = Own()"
    ),
    "a dataclass": (
        "@dataclasses.dataclass\nclass Own:\n    n: float = 0\n"
        "    texts: list = dataclasses.field(default_factory=list)\n"
        "    def __call__(self, c): return self.n\nform = Own({n})"
    ),
    "a frozen dataclass with slots": (
        "@dataclasses.dataclass(frozen=True, slots=True)\nclass Own:\n    n: float = 0\n"
        "    def __call__(self, c): return self.n\nform = Own({n})"
    ),
    "a method of a dataclass": (
        "@dataclasses.dataclass\nclass Own:\n    n: float = 0\n"
        "    def __call__(self, c): return {n}\nform = Own()"
    ),
    "a pydantic model": (
        "class Own(BaseModel):\n    n: float = {n}\n    def __call__(self, c): return self.n\n"
        "form = Own"
    ),
    "a validator of a pydantic model": (
        "class Own(BaseModel):\n    n: float = 0\n    @field_validator('n')\n    @classmethod\n"
        "    def check(cls, n): return n + {n}\n    def __call__(self, c): return self.n\n"
        "form = Own()"
    ),
    "a named tuple": (
        "class Own(typing.NamedTuple):\n    n: float = 0\n"
        "    def __call__(self, c): return {n}\nform = Own()"
    ),
    "a subclass of dict": (
        "class Own(dict):\n    def __call__(self, c): return self['n'] + {n}\nform = Own(n=1)"
    ),
    "the content of a subclass of dict": (
        "class Own(dict):\n    def __call__(self, c): return self['n']\nform = Own(n={n})"
    ),
    "a subclass of str": (
        "class Own(str):\n    def __call__(self, c): return {n}\nform = Own('text')"
    ),
    "a member of an enum": (
        "class Level(enum.Enum):\n    HIGH = {n}\ndef form(c): return Level.HIGH.value"
    ),
    "a default dict": (
        "TABLE = collections.defaultdict(lambda: {n})\ndef form(c): return TABLE[c]"
    ),
    "a counter": "TABLE = collections.Counter({{'a': {n}}})\ndef form(c): return TABLE[c]",
    "an array": "ARRAY = np.array([{n}, 0.5])\ndef form(c): return float(ARRAY[0])",
    "a tensor": "TENSOR = torch.tensor([{n}], dtype=torch.bfloat16)\ndef form(c): return TENSOR",
    "weights of a module": (
        "LAYER = torch.nn.Linear(1, 1)\nwith torch.no_grad():\n"
        "    for each in LAYER.parameters(): each.fill_({n})\ndef form(c): return LAYER"
    ),
    "a pattern": "WORD = re.compile('a{{{n:.0f}}}')\ndef form(c): return WORD.match(c)",
    "a set": "WORDS = {{'a', 'b', 'c', '{n}'}}\ndef form(c): return c in WORDS",
    "the environment": "def form(c): return environ.get('NONE', {n})",
    "a helper at any depth": (
        "def low(c): return {n}\ndef middle(c): return low(c)\ndef form(c): return middle(c)"
    ),
}

PRINT = """
import json
from nemo_rl_core.store.object_source import object_source
sources = {name: object_source(form) for name, form in FORMS.items()}
print("RESULT", json.dumps({name: [each.digest, *each.unknown] for name, each in sources.items()}))
"""


def source(value: float) -> str:
    """Returns all forms in one text, with a number in names that would collide."""
    parts = [IMPORTS]
    for number, (name, text) in enumerate(FORMS.items()):
        renamed = re.sub(
            r"\b(form|Own|Judge|Base|Sub|Reward|TABLE|Level)\b", rf"\g<1>{number}", text
        )
        parts += [renamed.format(n=value), f"FORMS[{name!r}] = form{number}"]
    return "\n".join(parts)


def digests(where: str, folder: Path, value: float, seed: int) -> dict[str, list[str]]:
    """Returns digest and incomparable types of each form in a new process."""
    environment = {"PYTHONPATH": f"{REPOSITORY}:{folder}", "PYTHONHASHSEED": str(seed)}
    environment = {**os.environ, **environment}
    if where == "notebook":
        v4: Any = nbformat.v4
        notebook = v4.new_notebook(cells=[*map(v4.new_code_cell, (source(value), PRINT))])
        nbclient.NotebookClient(notebook, kernel_name="python3").execute(env=environment)
        printed = "".join(each.get("text", "") for each in notebook.cells[1].outputs)
    else:
        module = "from forms_of_a_user import FORMS\n"
        (folder / "forms_of_a_user.py").write_text(source(value))
        program = (source(value) if where == "script" else module) + PRINT
        (folder / "main.py").write_text(program)
        done = subprocess.run(
            [sys.executable, str(folder / "main.py")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    (line,) = [each for each in printed.splitlines() if each.startswith("RESULT ")]
    digests_of_forms: dict[str, list[str]] = json.loads(line.removeprefix("RESULT "))
    return digests_of_forms


@pytest.mark.parametrize(
    "where", ["script", "module", pytest.param("notebook", marks=pytest.mark.slow)]
)
def test_every_form_keeps_its_digest_until_it_is_edited(where: str, tmp_path: Path) -> None:
    first = digests(where, tmp_path, 1.0, seed=1)
    assert list(first) == list(FORMS)
    assert {name: found[1:] for name, found in first.items() if found[1:]} == {}
    again = digests(where, tmp_path, 1.0, seed=2)
    assert {name for name in FORMS if again[name] != first[name]} == set()
    edited = digests(where, tmp_path, 2.0, seed=1)
    assert {name for name in FORMS if edited[name] == first[name]} == set()
