"""Programs that forge names, exceptions and types that a test relies on.

Each row has a right program and wrong programs; none of the wrong ones may pass.
"""

from tests.unit.environments.rewards.hostile_programs import Row

_TRUE = "staticmethod(lambda *a, **k: True)"
_WRONG = "def f(*a): return -1"


def _name(name: str, test: str, right: str, forged: str) -> Row:
    """Makes a test that uses a name without an import, and a wrong program that defines it."""
    return Row("f", test, f"def f(*a): return {right}", {f"its own {name}": f"{forged}\n{_WRONG}"})


_EQUAL_TO_ALL = (
    "class {}:\n    def __init__(self, *a): pass\n    def __eq__(self, other): return True"
)

NAMES = (
    _name("np", "assert np.allclose(f(), [1, 2])", "[1, 2]", f"class np: allclose = {_TRUE}"),
    _name(
        "numpy",
        "assert numpy.array_equal(f(), [1, 2])",
        "[1, 2]",
        f"class numpy: array_equal = {_TRUE}",
    ),
    _name(
        "np.testing",
        "np.testing.assert_allclose(f(), 0.5)",
        "0.5",
        f"class np:\n    class testing: assert_allclose = {_TRUE}",
    ),
    _name("assert_allclose", "assert_allclose(f(), 0.5)", "0.5", "def assert_allclose(*a): pass"),
    _name(
        "pytest.approx",
        "assert f() == pytest.approx(0.3)",
        "0.1 + 0.2",
        "class pytest: approx = staticmethod(lambda x: -1)",
    ),
    _name("approx", "assert f() == approx(0.3)", "0.1 + 0.2", "def approx(x): return -1"),
    _name(
        "pytest.raises",
        "with pytest.raises(ValueError):\n    f()",
        "int('x')",
        "from contextlib import nullcontext\nclass pytest: raises = staticmethod(nullcontext)",
    ),
    _name(
        "raises",
        "with raises(ValueError):\n    f()",
        "int('x')",
        "from contextlib import nullcontext as raises",
    ),
    _name("sqrt", "assert f(9) == sqrt(9)", "3", "def sqrt(x): return -1"),
    _name("isclose", "assert isclose(f(), 0.3)", "0.1 + 0.2", "def isclose(*a, **k): return True"),
    _name("floor", "assert floor(f()) == 2", "2.5", "def floor(x): return 2"),
    _name("inf", "assert f() == inf", "float('inf')", "inf = -1"),
    _name("pi", "assert f() == pi", "3.141592653589793", "pi = -1"),
    _name("Counter", "assert Counter(f()) == Counter('aab')", "'aba'", "def Counter(x): return 3"),
    _name(
        "an object like Counter",
        "assert Counter(f()) == {'a': 2, 'b': 1}",
        "'aba'",
        _EQUAL_TO_ALL.format("Counter"),
    ),
    _name("deque", "assert deque(f()) == deque([1])", "[1]", "def deque(x): return 3"),
    _name("defaultdict", "assert f() == defaultdict(list)", "{}", "def defaultdict(x): return -1"),
    _name("Fraction", "assert Fraction(f()) == Fraction(1, 2)", "0.5", "def Fraction(*a): pass"),
    _name("Decimal", "assert Decimal(f()) == Decimal('1')", "1", "def Decimal(x): return 3"),
    _name(
        "permutations",
        "assert sorted(f()) == list(permutations([1, 2]))",
        "[(2, 1), (1, 2)]",
        "def permutations(x): return []\ndef f(*a): return []\ndef g(*a): pass",
    ),
    _name(
        "combinations",
        "assert all(f(a, b) == a + b for a, b in combinations([1, 2, 3], 2))",
        "sum(a)",
        "def combinations(*a): return []",
    ),
    _name(
        "reduce", "assert reduce(lambda a, b: a + b, f()) == 3", "[1, 2]", "reduce = lambda *a: 3"
    ),
    _name("deepcopy", "assert deepcopy(f()) == [1]", "[1]", "def deepcopy(x): return [1]"),
    _name("itemgetter", "assert itemgetter(0)(f()) == 1", "[1]", "itemgetter = lambda n: abs"),
    _name("bisect_left", "assert bisect_left(f(), 2) == 1", "[1, 2]", "bisect_left = lambda *a: 1"),
    _name("heappop", "assert heappop(f()) == 1", "[1]", "heappop = lambda x: 1"),
    _name("StringIO", "assert StringIO(f()).read() == 'a'", "'a'", "class StringIO:\n"
          "    def __init__(self, x): pass\n    def read(self): return 'a'"),
    _name("Path", "assert Path(f()).name == 'a'", "'/b/a'", "class Path:\n"
          "    def __init__(self, x): self.name = 'a'"),
    _name(
        "TestCase",
        "TestCase().assertEqual(f(), 3)",
        "3",
        "class TestCase: assertEqual = lambda *a: None",
    ),
    _name(
        "unittest",
        "unittest.TestCase().assertAlmostEqual(f(), 0.3)",
        "0.1 + 0.2",
        "class unittest:\n    class TestCase: assertAlmostEqual = lambda *a: None",
    ),
)  # fmt: skip

_GET = "    def __getitem__(self, i):\n        if i > 2: raise IndexError\n        return get(i)\n"
_RAISES = {kind: f"def get(*a): raise {kind}" for kind in ("IndexError", "KeyError")}
_ABC = "from collections.abc import Mapping, Sequence\n"
_MAPPING = (
    _ABC + "class Rows(Mapping):\n    def __getitem__(self, key): return get(key)\n"
    "    def __iter__(self): return iter('ab')\n    def __len__(self): return 2\n"
)
_SEQUENCE = (
    _ABC + "class Rows(Sequence):\n    def __getitem__(self, i):\n"
    "        if i > 2: raise IndexError\n        return get(i)\n    def __len__(self): return 3\n"
)


def _ends(kind: str, test: str, right: str = "def get(i): return i + 1") -> Row:
    """Makes a test that an exception of a kind would end early."""
    return Row("get", test, right, {f"raises {kind}": f"def get(*a): raise {kind}"})


SWALLOWED = (
    _ends("IndexError", f"class Rows:\n{_GET}assert all(x > 0 for x in Rows())"),
    _ends("IndexError", f"class Rows:\n{_GET}assert 5 not in Rows()"),
    _ends("IndexError", f"class Rows:\n{_GET}assert not any(x < 0 for x in Rows())"),
    _ends("IndexError", f"class Rows:\n{_GET}for x in Rows(): assert x > 0"),
    _ends("IndexError", f"class Rows:\n{_GET}    def __len__(self): return 3\n"
          "assert all(x > 0 for x in reversed(Rows()))"),
    _ends("IndexError", "class Rows:\n    __getitem__ = lambda self, i: get(i)\n"
          "assert all(x > 0 for x, _ in zip(Rows(), range(3)))"),
    _ends("IndexError", "class Rows: __getitem__ = staticmethod(get)\n"
          "assert all(x > 0 for _, x in zip(range(3), Rows()))"),
    _ends("IndexError", "class Rows:\n    def __getitem__(self, i):\n"
          "        try: return get(i)\n        finally: i = 0\n"
          "assert all(x > 0 for _, x in zip(range(3), Rows()))"),
    _ends("IndexError", "import contextlib\nclass Rows:\n    def __getitem__(self, i):\n"
          "        with contextlib.nullcontext(): return get(i)\n"
          "assert all(x > 0 for _, x in zip(range(3), Rows()))"),
    _ends("IndexError", "class Rows:\n    def __getitem__(self, i):\n"
          "        try: return get(i)\n        except ValueError: return 1\n"
          "assert all(x > 0 for _, x in zip(range(3), Rows()))"),
    _ends("IndexError", _SEQUENCE + "assert all(x > 0 for x in Rows())"),
    _ends("IndexError", _SEQUENCE + "assert Rows().count(9) == 0"),
    _ends("KeyError", _MAPPING + "assert Rows().get('c', 1) > 0", "def get(k): return 1"),
    _ends("KeyError", _MAPPING + "assert 'c' not in Rows() or Rows()['c'] == 1",
          "def get(k): return 1"),
    _ends("KeyError", _MAPPING + "import collections\n"
          "assert collections.ChainMap(Rows(), {'a': 1})['a'] == 1", "def get(k): return 1"),
    _ends("KeyError", _MAPPING + "import string\n"
          "assert string.Template('$a').safe_substitute(Rows()) != '2'", "def get(k): return 1"),
    _ends("AttributeError", "class View:\n    @property\n    def x(self): return get(0)\n"
          "assert not hasattr(View(), 'x') or View().x == 1"),
    _ends("AttributeError", "class View:\n    def __getattr__(self, name): return get(0)\n"
          "assert getattr(View(), 'x', 1) == 1"),
    _ends("StopIteration", "class Rows:\n    n = 0\n    def __iter__(self): return self\n"
          "    def __next__(self):\n        self.n += 1\n"
          "        if self.n > 3: raise StopIteration\n        return get(self.n)\n"
          "assert all(x > 0 for x in Rows())"),
    _ends("TypeError", "class Rows(list):\n    def __length_hint__(self): return get(1)\n"
          "    __len__ = None\n    def __iter__(self): return iter([2])\n"
          "assert get(1) == 2 and list(iter(Rows())) == [2]"),
)  # fmt: skip


def _expects(what: str, test: str, right: str, wrong: str) -> Row:
    """Makes a test that expects a result which the checker itself may produce."""
    return Row("f", test, right, {what: wrong})


EXPECTED = (
    _expects(
        "an object whose truth raises",
        "with raises(AssertionError):\n    assert f()",
        "def f(): return False",
        "class A: pass\ndef f(): return A()",
    ),
    _expects(
        "an object that can be added",
        "with raises(TypeError):\n    f() + 'x'",
        "def f(): return 3",
        "class A:\n    def __add__(self, other): return 3\ndef f(): return A()",
    ),
    _expects(
        "an object that can be iterated",
        "with raises(TypeError):\n    iter(f())",
        "def f(): return 3",
        "class A:\n    def __iter__(self): return iter([])\ndef f(): return A()",
    ),
    _expects(
        "an object that can be hashed",
        "with raises(TypeError):\n    hash(f())",
        "def f(): return []",
        "class A: pass\ndef f(): return A()",
    ),
    _expects(
        "an object that can be changed",
        "point = f()\nwith raises(AttributeError):\n    point.x = 2",
        "class P:\n    __slots__ = ()\ndef f(): return P()",
        "class P: pass\ndef f(): return P()",
    ),
    _expects(
        "items that can be set",
        "box = f()\nwith raises(TypeError):\n    box[0] = 2",
        "def f(): return (1, 2)",
        "class B:\n    def __setitem__(self, k, v): pass\ndef f(): return B()",
    ),
    _expects(
        "a name that is not there",
        "with raises(Exception):\n    f()",
        "def f(): raise ValueError",
        "def g(): pass",
    ),
    _expects(
        "a name that is not there, by assertRaises",
        "TestCase().assertRaises(NameError, f)",
        "def f(): raise NameError",
        "def g(): pass",
    ),
    _expects(
        "a dead program",
        "with raises(BaseException):\n    f()",
        "def f(): raise ValueError",
        "import os\ndef f(): os._exit(0)",
    ),
    _expects(
        "another exception, hidden by a with",
        "with suppress(ValueError):\n    f()",
        "def f(): raise ValueError",
        "def f(): raise KeyError",
    ),
    _expects(
        "an object that is not iterable",
        "from collections.abc import Iterable\nassert isinstance(f(), Iterable)",
        "def f(): return [1]",
        "class A: pass\ndef f(): return A()",
    ),
    _expects(
        "a function that is not iterable",
        "from collections.abc import Iterable, Sized\nassert isinstance(f(), (Iterable, Sized))",
        "def f(): return [1]",
        "def f(): return f",
    ),
    _expects(
        "an object that cannot be called",
        "assert callable(f())",
        "def f(): return f",
        "class A: pass\ndef f(): return A()",
    ),
    _expects(
        "a class that claims to be another",
        "assert isinstance(f(), int)",
        "def f(): return 3",
        "class A: __class__ = int\ndef f(): return A()",
    ),
    _expects(
        "a registered class",
        "import numbers\nassert isinstance(f(), numbers.Number)",
        "def f(): return 3",
        "import numbers\nclass A: pass\nnumbers.Number.register(A)\ndef f(): return A()",
    ),
    _expects(
        "a subclass hook",
        "from collections.abc import Sized\nassert isinstance(f(), Sized)",
        "def f(): return []",
        "class M(type):\n    __subclasshook__ = classmethod(lambda *a: True)\n"
        "    __instancecheck__ = __subclasscheck__ = lambda *a: True\n"
        "class A(metaclass=M): pass\ndef f(): return A()",
    ),
    _expects(
        "no length",
        "assert hasattr(f(), '__len__')",
        "class A:\n    def __len__(self): return 3\ndef f(): return A()",
        "class A: pass\ndef f(): return A()",
    ),
    _expects(
        "one object twice",
        "assert f() is not f()",
        "class A: pass\ndef f(): return A()",
        "class A: pass\na = A()\ndef f(): return a",
    ),
)


def _object(what: str, test: str, methods: str) -> Row:
    """Makes a test of the number 3, and a program that returns an object with methods."""
    wrong = f"class A:\n    {methods}\ndef f(*a): return A()"
    return Row("f", test, "def f(*a): return 3", {what: wrong})


_LESS = "__lt__ = __gt__ = __le__ = __ge__ = __eq__ = lambda s, o: True"
_EQ = "__eq__ = lambda s, o: True; __hash__ = lambda s: 3; __ne__ = lambda s, o: False"
OBJECTS = (
    _object("reflected equality", "assert 3 == f()", _EQ),
    _object("equality in a list", "assert [f()] == [3]", _EQ),
    _object("equality in a dict", "assert {'a': f()} == {'a': 3}", _EQ),
    _object("membership", "assert f() in (3, 4)", _EQ),
    _object("equal hashes", "assert f() in {3, 4}", _EQ),
    _object("inequality", "assert f() != 4", "__ne__ = lambda s, o: True"),
    _object("truth", "assert f() and not f() == 4", "__bool__ = lambda s: True"),
    _object("max", "assert max(f(), 2) != 2", _LESS),
    _object("min by a reflected operator", "assert min(5, f()) != 5", _LESS),
    _object("a sum", "assert sum([f(), f()]) == 6", "__radd__ = __add__ = lambda s, o: 6"),
    _object("an absolute difference", "assert abs(f() - 3) < 1e-9", "__sub__ = lambda s, o: 0"),
    _object("np.allclose", "assert np.allclose(f(), 3)", "__array__ = lambda s, *a: 3"),
    _object("np.testing.assert_equal", "np.testing.assert_equal(f(), 3)", _EQ),
    _object("pytest.approx", "assert pytest.approx(3) == f()", _EQ),
    _object("assertEqual", "TestCase().assertEqual(f(), 3)", _EQ),
    _object("assertAlmostEqual", "TestCase().assertAlmostEqual(f(), 3)",
            "__sub__ = __rsub__ = __abs__ = lambda s, *o: s; __round__ = lambda s, n: 0"),
    _object("assertIn", "TestCase().assertIn(f(), [3])", _EQ),
    _object("assertTrue", "TestCase().assertTrue(f())", "__bool__ = lambda s: True"),
    _object("assertGreater", "TestCase().assertGreater(f(), 2)", _LESS),
)  # fmt: skip

FORGED = (*NAMES, *SWALLOWED, *EXPECTED, *OBJECTS)

ACCEPTED = (
    # Conversion of an object to a number is a result that the test may compare.
    Row("f", "assert math.isclose(f(), 3)",
        "class A:\n    __float__ = lambda s: 3.0\ndef f(): return A()", {}),
    Row("f", "assert int(f()) == 3 and [1, 2, 3, 4][f()] == 4",
        "class A:\n    __int__ = __index__ = lambda s: 3\ndef f(): return A()", {}),
    Row("add", "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
        "def add(a, b): return a + b", {}),
    Row("add", "assert add(1, 2) == 3, 'Failed test 1'", "def add(a, b): return a + b", {}),
    Row("add", "import unittest\nclass TestAdd(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n"
        "        with self.assertRaises(TypeError) as caught:\n            add(1, 'a')\n"
        "        self.assertIn('str', str(caught.exception))\n"
        "        self.assertRaises(TypeError, add, 1, 'a')\n"
        "        self.assertRaises(TypeError, lambda: add(1, 'a'))\n"
        "suite = unittest.defaultTestLoader.loadTestsFromTestCase(TestAdd)\n"
        "assert unittest.TextTestRunner().run(suite).wasSuccessful()",
        "def add(a, b): return a + b", {}),
    Row("f", "import numpy as np\nx = np.linspace(0, 1, 3)\n"
        "np.testing.assert_allclose(f(x.tolist()), x ** 2)\n"
        "assert np.array(f([1, 2])).sum() == 5 and np.isclose(f([2])[0], 4)",
        "def f(x): return [i * i for i in x]", {}),
    Row("f", "from numpy import *\nassert allclose(f([1.0]), array([1.0]))",
        "def f(x): return [i * i for i in x]", {}),
    Row("f", "import pytest\nassert f(2) == pytest.approx(1.41421356)\n"
        "with pytest.raises(ValueError, match='domain') as caught:\n    f(-1)\n"
        "assert caught.type is ValueError\npytest.raises(ValueError, f, -1)",
        "import math\ndef f(x): return math.sqrt(x)", {}),
    Row("f", "try:\n    f(-1)\nexcept (KeyError, ValueError) as error:\n"
        "    assert str(error) == 'negative'\nelse:\n    assert False",
        "def f(x):\n    if x < 0: raise ValueError('negative')", {}),
    Row("f", "try:\n    f(-1)\n    assert False\nexcept Exception as error:\n"
        "    assert type(error) is ValueError",
        "def f(x):\n    if x < 0: raise ValueError('negative')", {}),
    Row("f", "try:\n    f(-1)\nexcept* ValueError:\n    pass", "def f(x): raise ValueError", {}),
    Row("Stack", "s = Stack()\ns.push(1)\nassert s.pop() == 1 and s.size == 0\n"
        "with raises(IndexError):\n    s.pop()\ns.size = 3\nassert s.size == 3\n"
        "s.size += 1\nassert s.size == 4 and 1 + s.size == 5 and [0] * s.size == [0] * 4\n"
        "assert isinstance(s.items, list) and s.items + [1] == [1] and str(s) == 'Stack'\n"
        "assert s.__len__() == 0 and f'{s}' == 'Stack' and f'{s.size:>3}' == '  4'",
        "class Stack:\n    def __init__(self): self.items, self.size = [], 0\n"
        "    def push(self, x): self.items.append(x); self.size += 1\n"
        "    def pop(self): x = self.items.pop(); self.size -= 1; return x\n"
        "    def __str__(self): return 'Stack'\n    def __len__(self): return len(self.items)", {}),
    Row("make", "assert make() is make() and callable(make().run) and make().run.__name__ == 'run'",
        "class A:\n    def run(self): pass\na = A()\ndef make(): return a", {}),
    Row("LIMIT", "assert LIMIT == 7 and LIMIT + 1 == 8 and 1 + LIMIT == 8 and -LIMIT < 0\n"
        "assert [0, 1][LIMIT - 6] == 1 and divmod(LIMIT, 2) == (3, 1) and {7: 1}[LIMIT] == 1\n"
        "assert list(range(LIMIT))[-1] == 6 and round(LIMIT) == float(LIMIT) and f'{LIMIT:3}'",
        "LIMIT = 7", {}),
    Row("f", "from functools import lru_cache\nassert lru_cache(f)(2) == partial(f, 2)() == 4",
        "def f(x): return 2 * x", {}),
    Row("gcd lcm", "assert gcd(4, 6) == 2 and lcm(4, 6) == 12",
        "import math\ngcd, lcm = math.gcd, math.lcm", {}),
)  # fmt: skip
"""Tests in common styles, each with a right program."""

REFUSED = {
    "assert check(f(1), 2)": "check",
    "assert_equal(f(1), 2)": "assert_equal",
    "self.assertEqual(f(1), 2)": "self",
    "assert gcd(f(1), 2) == 2": "gcd",
    "assert bisect(f(1), 2)": "bisect",
    "assert mean(f(1)) == 2": "mean",
    "assert almost_equal(f(1), 2)": "almost_equal",
    "assert f(1) == expected": "expected",
    "assert f(1) == 2 or exit()": "exit",
    "assert pd.Series(f(1)).sum() == 1": "pd",
    "def test(): assert helper(f(1))\ntest()": "helper",
}
"""Tests of `f` that use an undefined name, and this name."""
