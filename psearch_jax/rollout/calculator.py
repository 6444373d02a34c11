"""The calculator: arithmetic, comparisons and dates, which is what questions about several facts need."""

from __future__ import annotations

import ast
import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any

from dateutil import parser

from psearch_jax.rollout.tools import Arguments, Tool, failure
from psearch_jax.types import first_line

MAX_CHARACTERS, MAX_DIGITS = 300, 30  # of an expression, and of a result
_EARLIEST = datetime.datetime(1, 1, 1)
# What simpleeval can compute but a calculator need not: powers and methods of texts may take all memory.
_REFUSED_OPERATORS = (ast.Pow, ast.LShift, ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert)
_REFUSED_NODES = (ast.Attribute, ast.Subscript, ast.JoinedStr, ast.FormattedValue, ast.BoolOp, ast.IfExp)


def evaluate(expression: str) -> str:
    """The value of an expression: `1954 - 1921`, `max(3, 5)`, `days("4 September 1908", "1 July 1999")`.

    Raises:
      Exception: it is none, or has no finite value; of the parser, of simpleeval, or of a function.
    """
    from simpleeval import DEFAULT_OPERATORS, SimpleEval

    expression = expression.strip()
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters, accepted: {MAX_CHARACTERS}")
    accepted = {kind: f for kind, f in DEFAULT_OPERATORS.items() if kind not in _REFUSED_OPERATORS}
    operators = {kind: f if issubclass(kind, ast.cmpop) else _numeric(f) for kind, f in accepted.items()}
    evaluator = SimpleEval(operators=operators, functions=_FUNCTIONS, names={})
    for kind in _REFUSED_NODES:
        evaluator.nodes.pop(kind)
    value = evaluator.eval(expression, previously_parsed=ast.parse(expression, mode="eval").body)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)) or not math.isfinite(value) or abs(value) >= 10**MAX_DIGITS:
        raise ValueError(f"no number of at most {MAX_DIGITS} digits")
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _numeric(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that refuses texts."""

    def apply(*values: Any) -> Any:
        if any(isinstance(value, str) for value in values):
            raise ValueError("a text found in arithmetic, accepted: numbers")
        return function(*values)

    return apply


def _date(text: Any) -> datetime.datetime:
    return parser.parse(str(text), default=_EARLIEST)


def _days(first: Any, second: Any) -> int:
    return abs((_date(second) - _date(first)).days)


def _years(first: Any, second: Any) -> int:
    """Complete years between two dates."""
    early, late = sorted((_date(first), _date(second)))
    return late.year - early.year - ((late.month, late.day) < (early.month, early.day))


_FUNCTIONS = {"abs": abs, "min": min, "max": max, "round": round, "days": _days, "years": _years}


def _batch(calls: Sequence[Arguments]) -> list[str]:
    return [_evaluated(str(arguments["expression"])) for arguments in calls]


def _evaluated(expression: str) -> str:
    try:
        return evaluate(expression)
    except Exception as error:
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
