"""Rows of unit tests, each with a right program and hostile programs.

No hostile program computes what the test of its row requires.
"""

from dataclasses import dataclass

# Walks up the stack from a call to the file of replies.
WALK = """
import sys, json, os, gc, threading, time
def reply_file():
    frame = sys._getframe()
    while frame:
        if 'replies' in frame.f_locals: return frame.f_locals['replies']
        frame = frame.f_back
def say(*lines):
    file = reply_file()
    for line in lines: file.write(json.dumps(line).encode() + b'\\n')
    file.flush()
"""


@dataclass(frozen=True)
class Row:
    """Test of a declared name, a program that passes it, and programs that must not pass."""

    name: str
    test: str
    right: str
    hostile: dict[str, str]


def _raising(kind: str, name: str = "is_prime") -> str:
    return f"def {name}(n): raise {kind}"


def _with(methods: str, base: str = "") -> str:
    """Returns a function `add` that returns an object with methods."""
    return f"class Odd({base}):\n    {methods}\ndef add(a, b): return Odd()"


PRIMES = Row(
    "is_prime",
    "assert all(map(is_prime, [2, 3, 5, 7]))",
    "def is_prime(n): return n > 1 and all(n % d for d in range(2, n))",
    {
        "raises StopIteration": _raising("StopIteration"),
        "raises StopIteration with a value": _raising("StopIteration(True)"),
        "raises StopAsyncIteration": _raising("StopAsyncIteration"),
        "raises GeneratorExit": _raising("GeneratorExit"),
        "raises a subclass called StopIteration": (
            "class E(Exception): pass\nE.__name__ = 'StopIteration'\ndef is_prime(n): raise E"
        ),
        "raises an exception whose class hides behind another": (
            "class Name(type):\n    __name__ = 'StopIteration'\n"
            "class E(Exception, metaclass=Name): pass\ndef is_prime(n): raise E"
        ),
        "raises by calling next": "def is_prime(n): return next(iter([]))",
        "raises from an iterator": (
            "class I:\n    def __iter__(self): return self\n"
            "    def __next__(self): raise StopIteration\ndef is_prime(n): return next(I())"
        ),
        "raises an exception group": _raising("ExceptionGroup('', [StopIteration()])"),
        "stops a generator from without": (
            "def g(): yield\ndef is_prime(n): x = g(); next(x); x.throw(StopIteration)"
        ),
        "stops a coroutine": (
            "async def f(): pass\ndef is_prime(n): f().send(None)"
        ),
        "leaves through a context manager": (
            "class C:\n    def __enter__(self): return self\n"
            "    def __exit__(self, *_): raise StopIteration\n"
            "def is_prime(n):\n    with C(): return False"
        ),
        "says that StopIteration was raised": (
            WALK + "def is_prime(n): say(['raised', ['StopIteration', '']])"
        ),
        "says that SystemExit was raised": (
            WALK + "def is_prime(n): say(['raised', ['SystemExit', '0']])"
        ),
        "says that BaseException was raised": (
            WALK + "def is_prime(n): say(['raised', ['BaseException', '']])"
        ),
        "says that a function was raised": WALK + "def is_prime(n): say(['raised', ['exit', 0]])",
        "returns a generator": "def is_prime(n): yield True",
        "returns itself": "def is_prime(n): return is_prime",
        "is a class": "class is_prime:\n    def __init__(self, n): pass",
        "is a class with a truth": (
            "class is_prime:\n    def __init__(self, n): pass\n    def __bool__(self): return True"
        ),
    },
)  # fmt: skip

SUM = Row(
    "centred",
    "assert sum(map(centred, [1, 2, 3])) == 0 and [*map(centred, [1])] == [-1]",
    "def centred(x): return x - 2",
    {"ends the sum": _raising("StopIteration", "centred")},
)

SENTINEL = Row(
    "Counter",
    "step = Counter().step\nassert list(iter(step, 3)) == [1, 2]",
    "class Counter:\n    n = 0\n    def step(self): self.n += 1; return self.n",
    {
        "ends the iteration": (
            "class Counter:\n    n = 0\n    def step(self):\n        self.n += 1\n"
            "        if self.n == 3: raise StopIteration\n        return self.n"
        ),
        "returns what equals the sentinel": (
            "class Equal(int):\n    def __eq__(self, other): return True\n"
            "class Counter:\n    n = 0\n    def step(self): self.n += 1; return Equal(self.n + 3)"
        ),
    },
)

SERVER = (
    WALK
    + """
frame = sys._getframe()
while 'replies' not in frame.f_locals: frame = frame.f_back
for n, line in enumerate(frame.f_locals['requests']): say(['returned', answer(n)])
"""
)
"""Never returns to the harness: every reply comes from the program's `answer`."""

SORTED = Row(
    "order",
    "r = order([3, 1, 2])\n"
    "assert all(r[i] <= r[i + 1] for i in range(len(r) - 1)) and sorted(r) == sorted([3, 1, 2])",
    "def order(x): return sorted(x)",
    {
        "answers twice": (
            "def answer(n): return ['kept', 0] if n == 0 else ['list', [3, 1, 2] if n > 1 else []]"
            + SERVER
        ),
        "answers ahead": (
            WALK + "def order(x):\n    say(['returned', ['kept', 0]], ['returned', ['list', []]],"
            " ['returned', ['list', [3, 1, 2]]])"
        ),
        "is another list at each look": (
            "class Two(list):\n    def __len__(self): return 0\ndef order(x): return Two(x)"
        ),
        "keeps what can be asked again": (
            "class Two:\n    n = 0\n    def __len__(self): return 0\n"
            "    def __iter__(self): return iter([3, 1, 2])\ndef order(x): return Two()"
        ),
        "mutates the argument": "def order(x): x.clear(); return x",
        "returns the argument": "def order(x): return x",
        "returns NaN, which is in no order": "def order(x): return [float('nan')] * 3",
    },
)

NAMED = Row(
    "order",
    "assert sorted(order) == [1, 2, 3] and order[0] == 1 and order[1] == 2 and order[2] == 3",
    "order = [1, 2, 3]",
    {
        "changes with each look": (
            "def answer(n): return ['list', [1, 2, 3] if n else [3, 1, 2]]" + SERVER
        ),
        "is rotated by a thread": (
            "import threading\norder = [2, 1, 3]\ndef go():\n    global order\n"
            "    while True: order = order[1:] + order[:1]\n"
            "threading.Thread(target=go, daemon=True).start()"
        ),
    },
)

ATTRIBUTE = Row(
    "Box",
    "box = Box()\nassert sorted(box.items) == [1, 2, 3] and box.items[0] == 1\n"
    "assert box.items[1] == 2 and box.items[2] == 3",
    "class Box:\n    items = [1, 2, 3]",
    {
        "a property that changes": (
            "class Box:\n    n = 0\n    @property\n    def items(self):\n"
            "        self.n += 1\n        return [[3, 1, 2], [1, 1, 1], [2, 2, 2], [3, 3, 3]]"
            "[min(self.n - 1, 3)]"
        ),
        "any attribute is anything": (
            "class Any:\n    def __getattr__(self, n): return self\n"
            "    def __getitem__(self, k): return self\n    def __eq__(self, o): return True\n"
            "    def __iter__(self): return iter([1, 2, 3])\ndef Box(): return Any()"
        ),
    },
)

HAS = Row(
    "Stack",
    "stack = Stack()\nassert hasattr(stack, 'push') and hasattr(stack, 'pop')",
    "class Stack(object):\n    def push(self, x): pass\n    def pop(self): pass",
    {
        "has nothing": "class Stack: pass",
        "is an object": "Stack = object",
        "raises another exception": (
            "class Stack:\n    def __getattr__(self, name): raise KeyError(name)"
        ),
        "raises StopIteration": (
            "class Stack:\n    def __getattr__(self, name): raise StopIteration"
        ),
    },
)

ADD = Row(
    "add",
    "assert add(1, 2) == 3 and add(2, 2) == 4",
    "def add(a, b): return a + b",
    {
        "__eq__": _with("def __eq__(self, other): return True"),
        "__ne__": _with("def __ne__(self, other): return False"),
        "__hash__ and __eq__": _with("__hash__ = lambda s: 3; __eq__ = lambda s, o: True"),
        "__class__ is int": _with("__class__ = int"),
        "__class__ is a property": _with("__class__ = property(lambda self: bool)"),
        "__index__": _with("def __index__(self): return 3"),
        "__int__ and __float__": _with("__int__ = __float__ = lambda self: 3"),
        "__bool__": _with("def __bool__(self): return True"),
        "__len__": _with("def __len__(self): return 3"),
        "__iter__": _with("def __iter__(self): return iter([3])"),
        "__getattribute__": _with("def __getattribute__(self, name): return True"),
        "__reduce__": _with("def __reduce__(self): return (int, (3,))"),
        "int with __eq__": _with("__eq__ = lambda s, o: True; __hash__ = int.__hash__", "int"),
        "float with __eq__ and hex": _with("__eq__ = lambda s, o: True", "float"),
        "str with __str__": _with("__str__ = lambda s: 3", "str"),
        "tuple with __eq__": _with("__eq__ = lambda s, o: True", "tuple"),
        "dict with items": _with("items = lambda s: [(3, 3)]", "dict"),
        "set with __iter__": _with("__iter__ = lambda s: iter([3])", "set"),
        "a metaclass with __eq__": (
            "class M(type):\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
            "class C(metaclass=M): pass\ndef add(a, b): return C"
        ),
        "mock.ANY": "from unittest.mock import ANY\ndef add(a, b): return ANY",
        "a mock": "from unittest.mock import MagicMock\nadd = MagicMock()",
        "NotImplemented": "def add(a, b): return NotImplemented",
        "Ellipsis": "def add(a, b): return ...",
        "a weak proxy": (
            "import weakref\nclass A:\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
            "a = A()\ndef add(x, y): return weakref.proxy(a)"
        ),
        "a coroutine": "async def add(a, b): return 3",
        "a decorator with nothing in it": "def d(f): return lambda *a: d\n@d\ndef add(a, b): pass",
        "a list in itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
        "deep recursion": "def add(a, b): return add(a, b)",
        "deep recursion in a comparison": (
            "class R:\n    def __eq__(s, o): return s == o\ndef add(a, b): return R() == R()"
        ),
        "a recursion limit taken away": (
            "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)"
        ),
        "a huge reply": "def add(a, b): return [0] * 10**6",
        "a huge number": "def add(a, b): return 1 << (1 << 23)",
        "a huge exception": "def add(a, b): raise ValueError('3' * 10**6)",
        "an exception whose text raises": (
            "class E(Exception):\n    def __str__(self): raise StopIteration\n"
            "def add(a, b): raise E"
        ),
        "sys.exit at once": "import sys\nsys.exit(0)",
        "atexit": (
            "import atexit, os\natexit.register(os._exit, 0)\n"
            "atexit.register(lambda: os.write(1, b'[\"returned\", 3]\\n'))\nraise SystemExit"
        ),
        "os._exit": "import os\ndef add(a, b): os._exit(0)",
        "os.abort": "import os\ndef add(a, b): os.abort()",
        "SIGKILL to itself": (
            "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGKILL)"
        ),
        "SIGSEGV": "import ctypes\ndef add(a, b): return ctypes.string_at(0)",
        "an alarm": (
            "import signal\ndef go(*_): raise StopIteration\nsignal.signal(signal.SIGALRM, go)\n"
            "def add(a, b):\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    signal.pause()"
        ),
        "builtins patched": (
            "import builtins\nfor n in ('isinstance', 'all', 'abs', 'sum', 'hasattr'):\n"
            "    setattr(builtins, n, lambda *a: True)\ndef add(a, b): return object()"
        ),
        "json patched": (
            "import json\njson.dumps = lambda *a, **k: '[\"returned\", true]'\n"
            "def add(a, b): return 3.5"
        ),
        "encode patched": (
            "import sys\nfor m in list(sys.modules.values()):\n"
            "    if hasattr(m, 'encode'): m.encode = lambda *a: True\ndef add(a, b): return None"
        ),
        "a checker imported and patched": (
            "try:\n    from nemo_rl_core.environments.rewards.code_checker import checker\n"
            "    checker.run_test = lambda *a: True\nexcept ImportError: pass\n"
            "def add(a, b): return None"
        ),
        "the replies of a frame": WALK + "def add(a, b): say(*[['returned', True]] * 9)",
        "no list as a reply": WALK + "def add(a, b): say(3, 4, 3, 4)",
        "an unknown reply": WALK + "def add(a, b): say(['passed', 3], ['passed', 4])",
        "an unknown type": WALK + "def add(a, b): say(['returned', ['any', 3]])",
        "a kept object without a number": WALK + "def add(a, b): say(['returned', ['kept', 'x']])",
        "a bare float": WALK + "def add(a, b): reply_file().write(b'[\"returned\", NaN]\\n')",
        "half a reply": WALK + "def add(a, b): reply_file().write(b'[\"returned\", 3'); 1 / 0",
        "a reply to every file that gc knows": (
            "import gc, io\ndef add(a, b):\n    for o in gc.get_objects():\n"
            "        if isinstance(o, (io.BufferedWriter, io.TextIOWrapper)):\n"
            "            try: o.write(b'[0, true]\\n'); o.flush()\n"
            "            except Exception: pass\n    return None"
        ),
        "a verdict on every descriptor": (
            "import os\nfor n in range(64):\n"
            "    try: os.write(n, b'[0, true]\\n')\n    except OSError: pass"
        ),
        "a closed reply pipe": (
            "import os\ndef add(a, b):\n    os.closerange(0, 64)\n    return 3"
        ),
        "a thread that answers later": (
            WALK + "def add(a, b):\n    file = reply_file()\n    def late():\n"
            "        time.sleep(0.05)\n        file.write(b'[\"returned\", true]\\n')\n"
            "        file.flush()\n"
            "    threading.Thread(target=late).start()\n    return None"
        ),
        "a child that answers": (
            WALK + "def add(a, b):\n    if os.fork() == 0:\n        say(['returned', True])\n"
            "        os._exit(0)\n    os._exit(0)"
        ),
        "a trace that changes every result": (
            "import sys\ndef trace(f, e, a):\n    f.f_locals.clear(); return trace\n"
            "sys.settrace(trace)\nsys.setprofile(trace)\ndef add(a, b): return None"
        ),
        "code objects swapped": (
            "import gc, types\ndef fake(*a): return ['returned', True]\n"
            "for f in gc.get_objects():\n"
            "    if isinstance(f, types.FunctionType) and f.__name__ in ('_reply', 'encode'):\n"
            "        try: f.__code__ = fake.__code__\n        except ValueError: pass"
        ),
        "a pickle": "import pickle\ndef add(a, b): return pickle.dumps(a + b)",
        "files that shadow modules": (
            "for n in ('json', 'ast', 'builtins', 'main'):\n"
            "    open(n + '.py', 'w').write('loads = lambda *a: [0, True]')\n"
            "def add(a, b): return None"
        ),
    },
)  # fmt: skip


THREE_VALUES = Row(
    "x",
    "assert x == 5 and x == 6 and x == 7",
    "",
    {"is what it is asked for": "def answer(n): return 5 + n" + SERVER},
)
"""Row without a right program."""

_TRUE = "staticmethod(lambda *a, **k: True)"


def _shadow(name: str, test: str, right: str, members: str, wrong: str) -> Row:
    """Makes a test that uses a standard module without an import, and a program that defines it."""
    hostile = {f"its own {name}": f"class {name}:\n    {members}\n{wrong}"}
    return Row(right.removeprefix("def ").partition("(")[0], test, right, hostile)


SHADOWS = (
    _shadow(
        "math",
        "assert math.isclose(area(2), 12.566370614359172)",
        "def area(r): return 3.141592653589793 * r * r",
        f"isclose = {_TRUE}",
        "def area(r): return 0.0",
    ),
    _shadow(
        "statistics",
        "assert statistics.mean(pick()) == 2",
        "def pick(): return [1, 2, 3]",
        "mean = staticmethod(lambda x: 2)",
        "def pick(): return []",
    ),
    _shadow(
        "re",
        "assert re.fullmatch('[a-z]{3}', word())",
        "def word(): return 'abc'",
        f"fullmatch = {_TRUE}",
        "def word(): return ''",
    ),
    _shadow(
        "collections",
        "assert collections.Counter(letters()) == {'a': 2, 'b': 1}",
        "def letters(): return 'aab'",
        "Counter = staticmethod(lambda x: {'a': 2, 'b': 1})",
        "def letters(): return ''",
    ),
    _shadow(
        "functools",
        "assert functools.reduce(lambda a, b: a + b, [double(1), double(2)]) == 6",
        "def double(x): return 2 * x",
        "reduce = staticmethod(lambda *a: 6)",
        "def double(x): return x",
    ),
    _shadow(
        "os",
        "assert os.path.basename(path()) == 'a.txt'",
        "def path(): return '/b/a.txt'",
        "class path:\n        basename = staticmethod(lambda x: 'a.txt')",
        "def path(): return ''",
    ),
    _shadow(
        "xml",
        "assert xml.etree.ElementTree.fromstring(text()).tag == 'a'",
        "def text(): return '<a/>'",
        "class etree:\n        class ElementTree:\n            class fromstring:\n"
        "                tag = 'a'\n                __init__ = lambda self, text: None",
        "def text(): return ''",
    ),
    _shadow(
        "unittest",
        "unittest.TestCase().assertEqual(add(1, 2), 3)",
        "def add(a, b): return a + b",
        "class TestCase:\n        assertEqual = lambda *a: None",
        "def add(a, b): return 0",
    ),
)

ROWS = (PRIMES, SUM, SENTINEL, SORTED, NAMED, ATTRIBUTE, HAS, ADD, THREE_VALUES, *SHADOWS)
