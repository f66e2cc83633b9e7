"""Evaluates arithmetic by walking the syntax tree, without Python's `eval`."""

import ast
import operator
from collections.abc import Callable

_MOST_CHARACTERS = 500
_MOST_BITS = 4096
"""Maximum size of a result, checked before a power is computed."""

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Returns the value of an expression of numbers, `+ - * / // % **` and parentheses.

    Raises ValueError if it is another expression, or its result is too large or does not exist.

    Example:
        >>> calculate("3 * (4 + 5)"), calculate("2^10"), calculate("1 / 4")
        ('27', '1024', '0.25')
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {_MOST_CHARACTERS} characters")
    # People write powers with `^`, which is exclusive or in Python.
    text = expression.strip().replace("^", "**").replace("\N{MULTIPLICATION SIGN}", "*")
    try:
        value = _value(ast.parse(text.replace("\N{MINUS SIGN}", "-"), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("this is not an arithmetic expression") from error
    except ArithmeticError as error:
        raise ValueError(str(error)) from error
    return repr(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=bool() | complex()):
            raise ValueError("an expression can only contain real numbers")
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            return _small(_BINARY[type(sign)](_value(left), _value(right)))
    raise ValueError(
        f"{ast.unparse(node)[:40]!r} is neither a number nor an operation of + - * / // % ** ( )"
    )


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and base.bit_length() * abs(exponent) > _MOST_BITS:
        raise ValueError("the result is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return _small(result)


def _small(result: float) -> float:
    if isinstance(result, int) and result.bit_length() > _MOST_BITS:
        raise ValueError("the result is too large")
    return result
