"""FLOPs and bytes of a program compiled for a TPU, counted from its HLO text with the trip counts of its loops.

XLA's own analysis counts a loop body once, and an in-place update as the full array. Here a body is multiplied by the
trip count from its condition, a slice counts only the sliced elements, and an in-place update only the written ones.
Values in on-chip memory (layouts with `S(1)`) are free. An opaque kernel counts as its cost estimate declares.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "s4": 4, "u4": 4}  # other names contain their bits: f32, s8, f8e4m3fn
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
# Inside a fusion, reading part of such an instruction's result reads only that part of its operand.
_ALIKE = ("bitcast", "reshape", "copy", "convert", "transpose")


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one execution of a program on one device.

    `turn_*` are for one iteration of the loops with unknown trip counts; the other two are for everything else.
    """

    flops: float = 0.0
    bytes: float = 0.0
    turn_flops: float = 0.0
    turn_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, turns: int) -> Cost:
        return Cost(*(turns * n for n in astuple(self)))

    def per_turn(self) -> Cost:
        """The cost of a loop with this body and an unknown trip count."""
        return Cost(0.0, 0.0, self.flops + self.turn_flops, self.bytes + self.turn_bytes)


@dataclass(frozen=True)
class _Instruction:
    name: str
    kind: str  # its opcode
    type: str
    operands: tuple[str, ...]
    rest: str  # the rest of the line after the operands

    def called(self, *names: str) -> list[str]:
        return [match[1] for name in names if (match := re.search(rf"\b{name}=%?([\w.-]+)", self.rest))]

    def numbers(self, name: str) -> list[int]:
        match = re.search(rf"\b{name}={{([\d,]*)}}", self.rest)
        return [int(n) for n in match[1].split(",") if n] if match else []


@dataclass
class _Computation:
    instructions: dict[str, _Instruction] = field(default_factory=dict)
    root: str = ""

    def parameters(self) -> list[str]:
        """Names in the order of the arguments."""
        numbered = [(_value(i), i.name) for i in self.instructions.values() if i.kind == "parameter"]
        return [name for _, name in sorted(numbered)]

    def users(self, name: str) -> Iterator[_Instruction]:
        return (i for i in self.instructions.values() if name in i.operands)


def cost(text: str) -> Cost:
    """The cost of one execution of a compiled program on one device, from `compiled.as_text()`."""
    return _Program(text).of("")


class _Program:
    def __init__(self, text: str):
        self.computations: dict[str, _Computation] = {}
        here = _Computation()
        for line in text.splitlines():
            if opened := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
                here = self.computations[opened[2]] = _Computation()
                if opened[1]:
                    self.computations[""] = here
            elif instruction := _parsed(line):
                here.instructions[instruction.name] = instruction
                here.root = instruction.name if line.lstrip().startswith("ROOT ") else here.root

    @functools.cache  # noqa: B019 (the cache keeps programs alive, but they are few)
    def of(self, name: str) -> Cost:
        """The cost of a computation, including those that it calls."""
        total, here = Cost(), self.computations[name]
        for i in here.instructions.values():
            if i.kind == "while":
                turns = self._turns(i)
                body = sum((self.of(c) for c in i.called("body", "condition")), Cost())
                total += body.per_turn() if turns is None else body.times(turns)
            elif i.kind in ("call", "async-start"):
                total += sum((self.of(c) for c in i.called("to_apply", "calls")), Cost())
            elif i.kind == "conditional":
                branches = re.findall(r"(?:true|false)_computation=%?([\w.-]+)", i.rest)
                listed = re.search(r"branch_computations={([^}]*)}", i.rest)
                branches += re.findall(r"%?([\w.-]+)", listed[1]) if listed else []
                total += max((self.of(c) for c in branches), key=lambda c: c.bytes, default=Cost())
            else:
                total += Cost(self._flops(here, i), self._bytes(here, i))
        return total

    def _turns(self, loop: _Instruction) -> int | None:
        """The trip count of a loop that compares its counter with a constant; None for other loops.

        This assumes that the counter starts at 0, as it does in `lax.scan`. It grows by 2 where XLA has unrolled a
        collective matrix product, which gathers its operand while it multiplies.
        """
        if stated := re.search(r'"?known_trip_count"?:{"?n"?:"?(\d+)', loop.rest):
            return int(stated[1])
        (name,) = loop.called("condition")
        condition = self.computations[name]
        last = condition.instructions[condition.root]
        if last.kind != "compare" or "direction=LT" not in last.rest:
            return None
        counter, end = (condition.instructions[name] for name in last.operands)
        return -(-_value(end) // self._step(loop, counter)) if end.kind == "constant" else None

    def _step(self, loop: _Instruction, counter: _Instruction) -> int:
        """The increment of the counter per iteration; 1 if it cannot be determined."""
        (name,) = loop.called("body")
        body = self.computations[name]
        if counter.kind != "get-tuple-element":
            return 1
        place = int(re.search(r"index=(\d+)", counter.rest)[1])
        grown = body.instructions[body.instructions[body.root].operands[place]]
        added = [x for x in map(body.instructions.get, grown.operands) if x and x.kind == "constant"]
        return _value(added[0]) if grown.kind == "add" and added else 1

    # ---- FLOPs ----

    def _flops(self, here: _Computation, i: _Instruction) -> float:
        if i.kind == "fusion":
            (name,) = i.called("calls")
            inside = self.computations[name]
            return sum(self._flops(inside, x) for x in inside.instructions.values())
        if i.kind == "custom-call":
            return _declared(i, "flops") or 0.0
        if i.kind == "dot":
            left = _shape(here.instructions[i.operands[0]].type)
            return 2.0 * _size(i) * math.prod(left[d] for d in i.numbers("lhs_contracting_dims"))
        if i.kind == "convolution":
            return 2.0 * self._products(here, i)
        return 0.0

    def _products(self, here: _Computation, i: _Instruction) -> float:
        """Multiplications of a convolution, without those by padding or by the zeros of a dilation."""
        left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest).groups()
        a, b = (_shape(here.instructions[name].type) for name in i.operands[:2])
        y = _shape(i.type)
        total = float(y[out.index("b")] * y[out.index("f")] * b[right.index("i")])
        window = re.search(r"window={([^}]*)}", i.rest)
        options = dict(part.split("=") for part in window[1].split()) if window else {}

        def window_field(name: str, axis: int, default: str) -> list[int]:
            parts = options.get(name, "x".join([default] * 9)).split("x")[axis]
            return [int(n) for n in parts.split("_")]

        for axis in range(len(out) - 2):
            d = str(axis)
            size, places, length = b[right.index(d)], y[out.index(d)], a[left.index(d)]
            (stride,), (low, *_) = window_field("stride", axis, "1"), window_field("pad", axis, "0")
            (rhs_dilate,), (lhs_dilate,) = window_field("rhs_dilate", axis, "1"), window_field("lhs_dilate", axis, "1")
            dilated = range((length - 1) * lhs_dilate + 1)
            total *= sum(
                (at := p * stride + w * rhs_dilate - low) in dilated and at % lhs_dilate == 0
                for p in range(places)
                for w in range(size)
            )
        return total

    # ---- bytes ----

    def _bytes(self, here: _Computation, i: _Instruction) -> float:
        if i.kind in _FREE or i.kind.endswith("-done"):
            return 0.0
        if i.kind in ("slice-start", "dynamic-slice-start"):  # type: ((source, ...), slice, ...)
            end = _closing(i.type[1:]) + 2
            sliced = _ARRAY.search(i.type, end)[0]
            return _hbm(sliced) + min(_whole(sliced), _hbm(i.type[:end]))
        if i.kind.endswith("-start"):
            return _hbm(i.type)
        if '"AllocateBuffer"' in i.rest:
            return 0.0
        if i.kind == "custom-call" and (declared := _declared(i, "bytes_accessed")) is not None:
            return declared
        if i.kind == "fusion":
            (name,) = i.called("calls")
            inside = self.computations[name]
            pairs = zip(i.operands, inside.parameters(), strict=True)
            # Of an operand, only the share that the fusion uses is read, once per parameter.
            read = (_hbm(here.instructions[o].type) * self._share(inside, p) for o, p in pairs)
            return sum(read) + self._written(inside, inside.root, i.type)
        written = self._written(here, i.name, i.type)
        if i.kind in ("dynamic-update-slice", "scatter"):
            return 2 * written
        sliced = i.kind in ("dynamic-slice", "gather", "slice")
        return written + sum(
            min(_hbm(here.instructions[o].type), _whole(i.type) if sliced else math.inf) for o in set(i.operands)
        )

    def _share(self, inside: _Computation, name: str) -> float:
        """The share of a value, from 0 to 1, that its users inside a fusion read."""
        value, seen = inside.instructions[name], 0.0
        for user in inside.users(name):
            if user.kind in ("dynamic-slice", "gather", "slice") and user.operands[0] == name:
                seen += _size(user) / _size(value)
            elif user.kind in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                continue  # in place
            elif user.name == inside.root or _ARRAY.fullmatch(user.type) is None:
                return 1.0
            elif _size(user) == _size(value) and (user.kind in _ALIKE or user.kind == "fusion"):
                seen += self._share(inside, user.name)  # it reads one value per value of its result
            elif user.kind == "fusion":
                (called,) = user.called("calls")
                deeper = self.computations[called]
                places = [p for o, p in zip(user.operands, deeper.parameters(), strict=True) if o == name]
                seen += sum(self._share(deeper, p) for p in places)
            else:
                return 1.0
        return min(seen, 1.0)

    def _written(self, here: _Computation, name: str, outer: str) -> float:
        """Bytes written for a result; of an in-place update, only the new elements. `outer`: type of the result."""
        i = here.instructions[name]
        if i.kind == "tuple":
            parts = (array[0] for array in _ARRAY.finditer(outer))
            return sum(self._written(here, o, part) for o, part in zip(i.operands, parts, strict=True))
        if not _hbm(outer):
            return 0.0
        if i.kind == "dynamic-update-slice":
            return _whole(here.instructions[i.operands[1]].type)
        if i.kind == "scatter":
            return _whole(here.instructions[i.operands[-1]].type)
        if i.kind in _ALIKE and i.operands[0] in here.instructions:
            source = here.instructions[i.operands[0]]
            if source.kind in ("dynamic-update-slice", "scatter"):
                return self._written(here, source.name, outer)
        return _hbm(outer)


def _parsed(line: str) -> _Instruction | None:
    opened = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = ", line)
    if not opened:
        return None
    rest = line[opened.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    type, rest = rest[:end], rest[end:].strip()
    kind, _, rest = rest.partition("(")
    inner = rest[: _closing("(" + rest) - 1]
    operands = tuple(re.findall(r"%([\w.-]+)", inner)) if "%" in inner else ()
    return _Instruction(opened[1], kind, type, operands, rest if not operands else rest[len(inner) :])


def _closing(text: str) -> int:
    """The index at which the opening parenthesis of a text is closed."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return at
    return len(text) - 1


def _shape(kind: str) -> list[int]:
    return [int(n) for n in _ARRAY.search(kind)[2].split(",") if n]


def _size(i: _Instruction) -> int:
    return math.prod(_shape(i.type))


def _array_bytes(kind: str, sizes: str, layout: str, everywhere: bool = False) -> float:
    if re.search(r"S\([1-9]", layout) and not everywhere:
        return 0.0
    bits = _BITS.get(kind) or int((re.search(r"\d+", kind) or ["0"])[0])
    return bits / 8 * math.prod(int(n) for n in sizes.split(",") if n)


def _hbm(kind: str) -> float:
    """Bytes of the arrays of a type that are in HBM."""
    return sum(_array_bytes(*array) for array in _ARRAY.findall(kind))


def _whole(kind: str) -> float:
    """Bytes of the arrays of a type, in any memory."""
    return sum(_array_bytes(*array, everywhere=True) for array in _ARRAY.findall(kind))


def _value(i: _Instruction) -> int:
    """The value of a constant, or the number of a parameter."""
    return int(i.rest.split(")")[0])


def _declared(i: _Instruction, name: str) -> float | None:
    match = re.search(rf'"cost_estimate":{{[^}}]*"{name}":"?(\d+)', i.rest)
    return float(match[1]) if match else None
