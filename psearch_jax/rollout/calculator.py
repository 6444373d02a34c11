"""The calculator: arithmetic, comparisons and dates, which is what questions about several facts need."""

from __future__ import annotations

import ast
import datetime
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from dateutil import parser

from psearch_jax.rollout.tools import Arguments, Tool, failure
from psearch_jax.types import first_line

MAX_CHARACTERS, MAX_DIGITS = 300, 30  # of an expression, and of a number in it or in its result
_EARLIEST = datetime.datetime(1, 1, 1)
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def evaluate(expression: str) -> str:
    """The value of an expression: `1954 - 1921`, `max(3, 5)`, `days("4 September 1908", "1 July 1999")`.

    Raises:
      ValueError, SyntaxError, ArithmeticError, TypeError: it is none, or has no finite value.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters, accepted: {MAX_CHARACTERS}")
    return _written(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_number(_value(left)), _number(_value(right))))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, args))
    raise ValueError(f"{ast.unparse(node)[:40]!r} found, accepted: + - * / // %, comparisons, {', '.join(_FUNCTIONS)}")


def _number(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"{value[:40]!r} found, accepted: a number")
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return value


def _date(text: Any) -> datetime.datetime:
    return parser.parse(str(text), default=_EARLIEST)


def _days(first: Any, second: Any) -> int:
    return abs((_date(second) - _date(first)).days)


def _years(first: Any, second: Any) -> int:
    """Complete years between two dates."""
    early, late = sorted((_date(first), _date(second)))
    return late.year - early.year - ((late.month, late.day) < (early.month, early.day))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "days": _days,
    "years": _years,
}


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("no finite value")
        return f"{value:.10g}"
    return str(value)


def _batch(calls: Sequence[Arguments]) -> list[str]:
    return [_evaluated(str(arguments["expression"])) for arguments in calls]


def _evaluated(expression: str) -> str:
    try:
        return evaluate(expression)
    except (ValueError, SyntaxError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        return failure(first_line(error))


CALCULATOR = Tool(
    "calculator",
    "Computes an expression with numbers, comparisons and dates.",
    {
        "type": "object",
        "properties": {
            "expression": {
                "type": "string",
                "description": 'For example 1954 - 1921, 3 < 5, or years("4 September 1908", "1 July 1999").',
            }
        },
        "required": ["expression"],
        "additionalProperties": False,
    },
    _batch,
)
