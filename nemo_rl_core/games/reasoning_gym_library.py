"""Import of reasoning-gym without a C compiler.

It imports pycosat, which has no wheel, for its zebra puzzles. The one function that it calls is
implemented with python-sat, which has wheels. The models of a formula do not depend on the solver,
and only puzzles with one model are used, so the puzzles are equal.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def load_reasoning_gym() -> Any:
    """Imports and returns the package `reasoning_gym`."""
    if "pycosat" not in sys.modules and find_spec("pycosat") is None:
        solver: Any = ModuleType("pycosat")
        solver.itersolve = models_of
        sys.modules["pycosat"] = solver
    import reasoning_gym

    return reasoning_gym


def models_of(clauses: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yields every model of a formula in conjunctive normal form, as `pycosat.itersolve`."""
    from pysat.solvers import Solver

    with Solver(name="minisat22", bootstrap_with=clauses) as solver:
        yield from solver.enum_models()
