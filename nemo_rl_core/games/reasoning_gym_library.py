"""reasoning-gym, on machines without a C compiler too.

It imports pycosat, which has no wheel, for its zebra puzzles. The one function that it calls is
made of python-sat here, which has wheels. All models of a formula are the same set with any solver,
and a puzzle is taken only where there is one model, so that the puzzles are the same.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def load_reasoning_gym() -> Any:
    """The package `reasoning_gym`, imported."""
    if "pycosat" not in sys.modules and find_spec("pycosat") is None:
        solver: Any = ModuleType("pycosat")
        solver.itersolve = models_of
        sys.modules["pycosat"] = solver
    import reasoning_gym

    return reasoning_gym


def models_of(clauses: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Every model of a formula in conjunctive normal form, as `pycosat.itersolve`.

    Args:
        clauses: Lists of variables from 1; a negated one is negative.
    """
    from pysat.solvers import Solver

    with Solver(name="minisat22", bootstrap_with=clauses) as solver:
        yield from solver.enum_models()
