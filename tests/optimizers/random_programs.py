"""User-defined optimizers for tests: random programs over every operation (hypothesis), and a nested one."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from tpuemb_torch.config.hlo_types import DIRECTIONS, F32, LITERAL_FIELDS, PRED, S32, S64
from tpuemb_torch.protos import hlo_pb2, xla_data_pb2

#: Operations whose float32 result is one correct rounding, by the types of operands (all the same) and result.
EXACT_UNARY = "abs ceil floor negate round-nearest-afz round-nearest-even sign".split()
EXACT_BINARY = "add divide maximum minimum multiply remainder subtract".split()
INTEGER_UNARY = "abs negate not sign".split()
INTEGER_BINARY = "add and divide maximum minimum multiply or power remainder subtract xor".split()
#: Operations that libraries approximate (also the root: torch's on vectors may be an ulp off).
APPROXIMATE = (
    "cbrt cosine exponential exponential-minus-one log log-plus-one logistic power rsqrt sine sqrt tanh".split()
)

_FLOATS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.5, -3.0, 1e30, float("inf"), float("nan")]) | st.floats(width=32)
_CONSTANTS = {F32: _FLOATS, PRED: st.booleans(), S32: st.integers(-(2**31), 2**31 - 1), S64: st.integers(-9, 9)}

#: Tuples in tuples and calls in calls: w - lr*g, and a slot that becomes the gradient.
NESTED = """
HloModule nested
scale {
  x = f32[] parameter(0)
  by = f32[] parameter(1)
  ROOT scaled = f32[] multiply(x, by)
}
both {
  a = f32[1,1] parameter(0)
  b = f32[1,1] parameter(1)
  inner = f32[1,1] map(a, b), to_apply=scale
  pair = (f32[1,1], f32[1,1]) tuple(inner, b)
  ROOT nest = ((f32[1,1], f32[1,1]), f32[1,1]) tuple(pair, a)
}
ENTRY main {
  g = f32[1,1] parameter(0)
  w = f32[1,1] parameter(1)
  s = f32[1,1] parameter(2)
  lr = f32[] parameter(3)
  rate = f32[1,1] broadcast(lr)
  made = ((f32[1,1], f32[1,1]), f32[1,1]) fusion(g, rate), calls=both
  pair = (f32[1,1], f32[1,1]) get-tuple-element(made), index=0
  step = f32[1,1] get-tuple-element(pair), index=0
  gradient = f32[1,1] get-tuple-element(made), index=1
  new = f32[1,1] subtract(w, step)
  ROOT result = (f32[1,1], f32[1,1]) tuple(new, gradient)
}
"""


@dataclass
class _Writer:
    """Appends random instructions to a computation; knows the type of each value."""

    draw: st.DrawFn
    computation: hlo_pb2.HloComputationProto
    called: list[tuple[hlo_pb2.HloComputationProto, list[int], list[int]]]
    next_id: list[int]
    values: dict[int, list[int]] = field(default_factory=lambda: {F32: [], PRED: [], S32: [], S64: []})

    def add(self, opcode: str, kind: int | list[int], operands: list[int], **fields: object) -> int:
        """Appends an instruction; `kind` is its type, or the types of a tuple's elements."""
        self.next_id[0] += 1
        identity = self.next_id[0]
        made = self.computation.instructions.add(
            name=f"{opcode}.{identity}", opcode=opcode, id=identity, operand_ids=operands, **fields
        )
        if isinstance(kind, list):
            made.shape.element_type = xla_data_pb2.TUPLE
            for part in kind:
                made.shape.tuple_shapes.add(element_type=part, dimensions=[1, 1])
        else:
            made.shape.element_type = kind
            made.shape.dimensions.extend([1, 1] if self.draw(st.booleans()) else [])
        return identity

    def pick(self, kind: int) -> int:
        """One of the values of a type, or a new one."""
        known = self.values[kind]
        if known and self.draw(st.integers(0, 9)):
            return self.draw(st.sampled_from(known))
        if kind == PRED and self.draw(st.booleans()):
            return self.keep(kind, self.compare())
        constant = self.add("constant", kind, [])
        getattr(self.computation.instructions[-1].literal, LITERAL_FIELDS[kind]).append(self.draw(_CONSTANTS[kind]))
        return self.keep(kind, constant)

    def keep(self, kind: int, value: int) -> int:
        self.values[kind].append(value)
        return value

    def compare(self) -> int:
        kind = self.draw(st.sampled_from([F32, F32, F32, S32, S64, PRED]))
        kind = kind if self.values[kind] else F32
        direction = self.draw(st.sampled_from(DIRECTIONS))
        return self.add("compare", PRED, [self.pick(kind), self.pick(kind)], comparison_direction=direction)

    def signless_zero(self, opcode: str, operands: list[int]) -> int:
        """maximum, minimum or clamp, plus 0.0: which zero these give is not defined."""
        chosen = self.add(opcode, F32, operands)
        zero = self.add("constant", F32, [])
        self.computation.instructions[-1].literal.f32s.append(0.0)
        return self.add("add", F32, [chosen, zero])

    def step(self) -> None:
        """One random instruction whose operands are earlier values."""
        kind = self.draw(
            st.sampled_from(
                ["unary", "binary", "binary", "choice", "logic", "integer", "convert", "move", "tuple", "call"]
            )
        )
        draw, pick = self.draw, self.pick
        if kind == "unary":
            self.keep(F32, self.add(draw(st.sampled_from(EXACT_UNARY)), F32, [pick(F32)]))
        elif kind == "binary":
            opcode, operands = draw(st.sampled_from(EXACT_BINARY)), [pick(F32), pick(F32)]
            extreme = opcode in ("maximum", "minimum")
            self.keep(F32, self.signless_zero(opcode, operands) if extreme else self.add(opcode, F32, operands))
        elif kind == "choice":
            if draw(st.booleans()):
                self.keep(F32, self.signless_zero("clamp", [pick(F32), pick(F32), pick(F32)]))
            else:
                chosen = draw(st.sampled_from([F32, F32, S32, PRED]))
                self.keep(chosen, self.add("select", chosen, [pick(PRED), pick(chosen), pick(chosen)]))
        elif kind == "logic":
            opcode = draw(st.sampled_from(["and", "or", "xor", "not", "is-finite", "compare"]))
            if opcode == "compare":
                self.keep(PRED, self.compare())
            elif opcode == "is-finite":
                self.keep(PRED, self.add(opcode, PRED, [pick(F32)]))
            else:
                self.keep(PRED, self.add(opcode, PRED, [pick(PRED) for _ in range(1 if opcode == "not" else 2)]))
        elif kind == "integer":
            unary = draw(st.booleans())
            opcode = draw(st.sampled_from(INTEGER_UNARY if unary else INTEGER_BINARY))
            self.keep(S32, self.add(opcode, S32, [pick(S32) for _ in range(1 if unary else 2)]))
        elif kind == "convert":
            # Not from s64 to f32: numbers that float64 cannot hold either would be rounded twice by the reference.
            source, result = draw(
                st.sampled_from([(F32, S32), (F32, S64), (F32, PRED), (S32, F32), (S32, PRED), (S32, S64), (S64, S32),
                                 (S64, PRED), (PRED, F32), (PRED, S32), (F32, F32)])
            )  # fmt: skip
            self.keep(result, self.add("convert", result, [pick(source)]))
        elif kind == "move":
            moved = draw(st.sampled_from([F32, PRED, S32]))
            self.keep(
                moved,
                self.add(draw(st.sampled_from(["reshape", "broadcast", "copy", "bitcast"])), moved, [pick(moved)]),
            )
        elif kind == "tuple":
            kinds = draw(st.lists(st.sampled_from([F32, PRED, S32]), min_size=1, max_size=3))
            made = self.add("tuple", kinds, [pick(k) for k in kinds])
            self.take(made, kinds)
        elif self.called:
            body, takes, gives = draw(st.sampled_from(self.called))
            opcode = draw(st.sampled_from(["call", "fusion", "map"]))
            made = self.add(opcode, gives, [pick(k) for k in takes], called_computation_ids=[body.id])
            self.take(made, gives)

    def take(self, made: int, kinds: list[int]) -> None:
        index = self.draw(st.integers(0, len(kinds) - 1))
        self.keep(kinds[index], self.add("get-tuple-element", kinds[index], [made], tuple_index=index))


@st.composite
def programs(draw: st.DrawFn, approximate: bool = False) -> hlo_pb2.HloModuleProto:
    """A program with up to 5 slots, with or without a scalar.

    Args:
        draw: hypothesis's.
        approximate: whether each output is an approximate operation on values that are exact; else all are exact.
    """
    module = hlo_pb2.HloModuleProto(name="random")
    called: list[tuple[hlo_pb2.HloComputationProto, list[int], list[int]]] = []
    next_id = [0]
    for number in range(draw(st.integers(0, 2))):
        body = module.computations.add(name=f"body{number}", id=number + 1)
        takes = draw(st.lists(st.sampled_from([F32, F32, PRED, S32]), min_size=1, max_size=3))
        writer = _Writer(draw, body, list(called), next_id)
        _parameters(writer, takes)
        for _ in range(draw(st.integers(1, 5))):
            writer.step()
        gives = draw(st.lists(st.sampled_from([F32, F32, PRED, S32]), min_size=1, max_size=2))
        body.root_id = writer.add("tuple", gives, [writer.pick(kind) for kind in gives])
        for _ in range(draw(st.integers(0, 1))):
            writer.step()
        called.append((body, takes, gives))
    slots = draw(st.integers(0, 5))
    entry = module.computations.add(name="entry", id=99)
    module.entry_computation_id = 99
    writer = _Writer(draw, entry, called, next_id)
    _parameters(writer, [F32] * (2 + slots + draw(st.integers(0, 1))))
    for _ in range(draw(st.integers(3, 25))):
        writer.step()
    results = []
    for _ in range(1 + slots):
        value = writer.pick(F32)
        if approximate:
            opcode = draw(st.sampled_from(APPROXIMATE))
            value = writer.add(opcode, F32, [value, writer.pick(F32)][: 2 if opcode == "power" else 1])
        results.append(value)
    entry.root_id = writer.add("tuple", [F32] * len(results), results)
    for _ in range(draw(st.integers(0, 2))):
        writer.step()  # the root need not be the last instruction
    return module


def _parameters(writer: _Writer, kinds: list[int]) -> None:
    for number, kind in enumerate(kinds):
        writer.keep(kind, writer.add("parameter", kind, [], parameter_number=number))
