"""FLOPs and bytes of a program compiled for a TPU, counted from its text with its loops' turns.

XLA's own analysis counts a loop's body once, and a write in place as the whole array. Here a body counts by its trip
count, as its condition says it, a slice as what is sliced, a write in place as what is written, and what the compiler
keeps in the chip's own memory (a layout with `S(1)`) not at all. A kernel that XLA does not look into counts as it
declares.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "s4": 4, "u4": 4}  # others have them in their name: f32, s8, f8e4m3fn
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_ALIKE = ("bitcast", "reshape", "copy", "convert", "transpose")  # inside a fusion: what is read of them is theirs


@dataclass(frozen=True)
class Cost:
    """What one device does and moves in one run of a program.

    `turn_*` are of one turn of each loop whose end is not known beforehand, the others of all the rest.
    """

    flops: float = 0.0
    bytes: float = 0.0
    turn_flops: float = 0.0
    turn_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, turns: int) -> Cost:
        return Cost(*(turns * n for n in astuple(self)))

    def apart(self) -> Cost:
        """As that of a loop's body whose turns are not known."""
        return Cost(0.0, 0.0, self.flops + self.turn_flops, self.bytes + self.turn_bytes)


@dataclass(frozen=True)
class _Instruction:
    name: str
    kind: str  # its opcode
    type: str
    operands: tuple[str, ...]
    rest: str  # the whole line behind the operands

    def called(self, *names: str) -> list[str]:
        return [found[1] for name in names if (found := re.search(rf"\b{name}=%?([\w.-]+)", self.rest))]

    def numbers(self, name: str) -> list[int]:
        found = re.search(rf"\b{name}={{([\d,]*)}}", self.rest)
        return [int(n) for n in found[1].split(",") if n] if found else []


@dataclass
class _Computation:
    instructions: dict[str, _Instruction] = field(default_factory=dict)
    root: str = ""

    def parameters(self) -> list[str]:
        """Names in the order of the arguments."""
        found = [(_value(i), i.name) for i in self.instructions.values() if i.kind == "parameter"]
        return [name for _, name in sorted(found)]

    def users(self, name: str) -> Iterator[_Instruction]:
        return (i for i in self.instructions.values() if name in i.operands)


def cost(text: str) -> Cost:
    """The cost of one run of a compiled program, `compiled.as_text()`, on one device."""
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
            elif found := _parsed(line):
                here.instructions[found.name] = found
                here.root = found.name if line.lstrip().startswith("ROOT ") else here.root

    @functools.cache  # noqa: B019 (a program is dropped with its text)
    def of(self, name: str) -> Cost:
        """Of all that a computation runs."""
        total, here = Cost(), self.computations[name]
        for i in here.instructions.values():
            if i.kind == "while":
                turns = self._turns(i)
                body = sum((self.of(c) for c in i.called("body", "condition")), Cost())
                total += body.apart() if turns is None else body.times(turns)
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
        """The trip count of a loop whose counter is compared with a constant; None for another.

        That the counter begins at 0 is taken for granted, as that of `lax.scan` does. It grows by 2 where XLA has
        unrolled a product that gathers its operand on the way.
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
        """What a turn adds to the counter; 1 where that cannot be seen."""
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
        """Multiplications of a convolution, those with padding and with the holes of a dilation left out."""
        left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest).groups()
        a, b = (_shape(here.instructions[name].type) for name in i.operands[:2])
        y = _shape(i.type)
        total = float(y[out.index("b")] * y[out.index("f")] * b[right.index("i")])
        window = re.search(r"window={([^}]*)}", i.rest)
        given = dict(part.split("=") for part in window[1].split()) if window else {}

        def of_axis(name: str, axis: int, default: str) -> list[int]:
            parts = given.get(name, "x".join([default] * 9)).split("x")[axis]
            return [int(n) for n in parts.split("_")]

        for axis in range(len(out) - 2):
            d = str(axis)
            size, places, length = b[right.index(d)], y[out.index(d)], a[left.index(d)]
            (stride,), (low, *_) = of_axis("stride", axis, "1"), of_axis("pad", axis, "0")
            (apart,), (hole,) = of_axis("rhs_dilate", axis, "1"), of_axis("lhs_dilate", axis, "1")
            reach = range((length - 1) * hole + 1)
            total *= sum(
                (at := p * stride + w * apart - low) in reach and at % hole == 0
                for p in range(places)
                for w in range(size)
            )
        return total

    # ---- bytes ----

    def _bytes(self, here: _Computation, i: _Instruction) -> float:
        if i.kind in _FREE or i.kind.endswith("-done"):
            return 0.0
        if i.kind in ("slice-start", "dynamic-slice-start"):  # ((source, ...), what is sliced, ...)
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
            # An operand is read as far as it is looked at, by each parameter that it is.
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
        """How much of a value its users inside a fusion look at, 0 to 1."""
        value, seen = inside.instructions[name], 0.0
        for user in inside.users(name):
            if user.kind in ("dynamic-slice", "gather", "slice") and user.operands[0] == name:
                seen += _size(user) / _size(value)
            elif user.kind in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                continue  # in place
            elif user.name == inside.root or _ARRAY.fullmatch(user.type) is None:
                return 1.0
            elif _size(user) == _size(value) and (user.kind in _ALIKE or user.kind == "fusion"):
                seen += self._share(inside, user.name)  # a value for each of its own
            elif user.kind == "fusion":
                (called,) = user.called("calls")
                deeper = self.computations[called]
                places = [p for o, p in zip(user.operands, deeper.parameters(), strict=True) if o == name]
                seen += sum(self._share(deeper, p) for p in places)
            else:
                return 1.0
        return min(seen, 1.0)

    def _written(self, here: _Computation, name: str, outer: str) -> float:
        """Bytes that a value takes when it leaves: of a write in place what is new. `outer` is where it goes."""
        i = here.instructions[name]
        if i.kind == "tuple":
            parts = (found[0] for found in _ARRAY.finditer(outer))
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
    """Where the parenthesis that opens a text closes."""
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
    """Bytes of a value in the device's memory."""
    return sum(_array_bytes(*found) for found in _ARRAY.findall(kind))


def _whole(kind: str) -> float:
    """Bytes of a value wherever it lies."""
    return sum(_array_bytes(*found, everywhere=True) for found in _ARRAY.findall(kind))


def _value(i: _Instruction) -> int:
    """A constant's, or which parameter it is."""
    return int(i.rest.split(")")[0])


def _declared(i: _Instruction, name: str) -> float | None:
    found = re.search(rf'"cost_estimate":{{[^}}]*"{name}":"?(\d+)', i.rest)
    return float(found[1]) if found else None
