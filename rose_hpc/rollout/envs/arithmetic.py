"""Arithmetic for the tool-use environment, exact and safe: nothing is executed, and every result is small. Pure.

    calculate("3 * (17 - 4.5)") → Fraction(75, 2)         as_text(Fraction(75, 2)) → "37.5"

Numbers, + - * / // % **, signs and parentheses, as Python reads them. Bounds on the length of the text and on every number
in between keep the work small whatever the policy writes: 9**9**9 is refused before it is computed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from rose_hpc.errors import RoseError

MAX_CHARS = 200
MAX_BITS = 256  # of a numerator or a denominator
MAX_EXPONENT = 64
DECIMALS = 10
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class NotArithmetic(RoseError):
    """This text has no value here."""


def calculate(text: str) -> Fraction:
    """The exact value. Raises NotArithmetic saying why there is none."""
    if len(text) > MAX_CHARS:
        raise NotArithmetic("the expression is too long", got=f"{len(text)} characters", expected=f"at most {MAX_CHARS}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotArithmetic("this is no arithmetic expression") from error
    except ZeroDivisionError as error:
        raise NotArithmetic("division by zero") from error


def as_text(value: Fraction) -> str:
    """An integer as it is; else a decimal fraction, rounded to DECIMALS places, without trailing zeros."""
    if value.denominator == 1:
        return str(value.numerator)
    whole, fraction = divmod(round(abs(value) * 10**DECIMALS), 10**DECIMALS)
    digits = f"{fraction:0{DECIMALS}d}".rstrip("0")
    return ("-" if value < 0 else "") + (f"{whole}.{digits}" if digits else str(whole))


def same_number(said: str, expected: Fraction) -> bool:
    """Whether a text is this number, rounded as `as_text` does. 7, 7.0 and 1,000 are read; words around it and expressions are not."""
    number = said.replace(",", "")
    return len(number) <= MAX_CHARS and bool(_NUMBER.fullmatch(number)) and as_text(Fraction(number)) == as_text(expected)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _small(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _small(Fraction(_BINARY[type(op)](_value(left), _value(right))))
    raise NotArithmetic("only numbers, + - * / // % ** and parentheses can be calculated")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise NotArithmetic(
            "an exponent must be a small integer", got=as_text(exponent), expected=f"between -{MAX_EXPONENT} and {MAX_EXPONENT}"
        )
    return _small(Fraction(base ** int(exponent)))


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotArithmetic("a number is too large", expected=f"at most {MAX_BITS} bits")
    return value
