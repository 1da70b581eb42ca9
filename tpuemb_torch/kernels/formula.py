"""The C++ of an update rule: its traced formula, operation by operation, on blocks of eight elements.

The formula is written once, in torch (`UpdateRule.update` inside `apply_step`).  Here it is traced to ATen operations,
each of which becomes one line of `step.cpp`.  Every operation rounds as ATen's own on the CPU does: add, multiply,
divide and square root are IEEE and not contracted, the rest are the same Sleef functions; so compiled and eager steps
agree to the last bit.  Numbers are not part of the text but arguments, hence one library serves all rates and
hyper-parameters of a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tpuemb_torch.optimizers import StepNumbers, UpdateRule, apply_step


class UntranslatableError(Exception):
    """A formula has an operation that is not in the table; the message names it."""


@dataclass(frozen=True)
class Formula:
    """A translated formula.

    Attributes:
        lines: C++ statements from `state0`, ..., `gradient`, `number0`, ... and `constant[i]` to `result0`, ...
        constants: values of `constant`, float32.
        states: number of weights and slots.
        numbers: number of step numbers.
    """

    lines: str
    constants: tuple[float, ...]
    states: int
    numbers: int


#: ATen operation -> C++ of its tensor operands `{0}`, `{1}`, ...
_OPERATIONS = {
    "add.Tensor": "{0} + {1}",
    "sub.Tensor": "{0} - {1}",
    "mul.Tensor": "{0} * {1}",
    "div.Tensor": "{0} / {1}",
    "rsub.Scalar": "{1} - {0}",
    "neg.default": "-{0}",
    "abs.default": "absolute({0})",
    "sqrt.default": "root({0})",
    "rsqrt.default": "one / root({0})",
    "reciprocal.default": "one / {0}",
    "sign.default": "sign({0})",
    "exp.default": "exponential({0})",
    "log.default": "logarithm({0})",
    "tanh.default": "hyperbolic_tangent({0})",
    "sigmoid.default": "one / (one + exponential(zero - {0}))",
    "pow.Tensor_Tensor": "power({0}, {1})",
    "maximum.default": "maximum({0}, {1})",
    "minimum.default": "minimum({0}, {1})",
    "clamp.Tensor": "minimum(maximum({0}, {1}), {2})",
    "clamp_min.Tensor": "maximum({0}, {1})",
    "clamp_max.Tensor": "minimum({0}, {1})",
    # With bounds that are scalars, ATen's operands are the other way round: the tensor's NaN passes.
    "clamp.default": "at_most(at_least({0}, {1}), {2})",
    "clamp_min.default": "at_least({0}, {1})",
    "clamp_max.default": "at_most({0}, {1})",
    "where.self": "({0} ? {1} : {2})",
    "isnan.default": "({0} != {0})",
    "logical_and.default": "({0} & {1})",
    "logical_or.default": "({0} | {1})",
    "logical_not.default": "~{0}",
    "bitwise_and.Tensor": "({0} & {1})",
    "bitwise_or.Tensor": "({0} | {1})",
    "bitwise_not.default": "~{0}",
    **{
        f"{name}.{operand}": f"({{0}} {sign} {{1}})"
        for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
        for operand in ("Tensor", "Scalar")
    },
}
#: Operations that only change shape or ownership.
_SAME = {
    "expand.default",
    "clone.default",
    "alias.default",
    "detach.default",
    "view.default",
    "lift_fresh_copy.default",
}
#: pow with one of these exponents is another operation in ATen.
_POWERS = {
    0.5: "root({0})",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    -0.5: "one / root({0})",
    -1.0: "one / {0}",
    -2.0: "one / ({0} * {0})",
}
#: Of bool results and operands; everything else must be float32.
_ON_MASKS = {"logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not"}


def translate(rule: UpdateRule, numbers: StepNumbers) -> Formula:
    """Translates a rule with the stages around it.

    Args:
        rule: the update rule.
        numbers: which of them are None decides the stages.

    Raises:
        UntranslatableError: for an operation that is not in the table.
    """
    present = [value is not None for value in numbers]
    states = 1 + len(rule.slots)

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        old, gradient, given = values[:states], values[states], iter(values[states + 1 :])
        all_numbers = StepNumbers(*(next(given) if here else None for here in present))  # type: ignore[arg-type]
        return apply_step(rule, all_numbers, old[0], gradient, *old[1:])

    example = [torch.ones(2, 3, dtype=torch.float32) for _ in range(states + 1)]
    example += [torch.ones(2, 1, dtype=torch.float32) for here in present if here]
    with torch.no_grad():
        graph = make_fx(step, tracing_mode="fake")(*example).graph
    return _Translation(states).write(graph, sum(present))


class _Translation:
    """Writes a graph as C++ statements."""

    def __init__(self, states: int) -> None:
        self.states = states
        self.names: dict[fx.Node, str] = {}
        self.constants: list[float] = []
        self.lines: list[str] = []

    def write(self, graph: fx.Graph, numbers: int) -> Formula:
        arguments = [
            *(f"state{i}" for i in range(self.states)),
            "gradient",
            *(f"number{i}" for i in range(numbers)),
        ]
        inputs = iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.names[node] = next(inputs)
            elif node.op == "call_function":
                self.names[node] = self._call(node)
            elif node.op == "output":
                results: Sequence[object] = node.args[0]  # type: ignore[assignment]
                for index, result in enumerate(results):
                    self.lines.append(f"const Block result{index} = {self._operand(result)};")
            else:
                raise UntranslatableError(f"{node.op} {node.target}")
        return Formula("\n".join(self.lines), tuple(self.constants), self.states, numbers)

    def _call(self, node: fx.Node) -> str:
        name = str(node.target).removeprefix("aten.")
        dtype = node.meta["val"].dtype
        if dtype not in (torch.float32, torch.bool) or node.kwargs.get("alpha", 1) != 1:
            raise UntranslatableError(f"{name} of {dtype}")
        if name in _SAME:
            return self._operand(node.args[0])
        if name in ("scalar_tensor.default", "full.default"):
            return self._constant(node.args[-1], dtype)
        text = self._pow(node) if name == "pow.Tensor_Scalar" else self._known(name, node)
        result = f"v{len(self.lines)}"
        self.lines.append(f"const {'Mask' if dtype == torch.bool else 'Block'} {result} = {text};")
        return result

    def _known(self, name: str, node: fx.Node) -> str:
        if name == "clamp.default":
            operand, low, high = (*node.args, None)[:3]
            text = "{0}" if low is None else "at_least({0}, {1})"
            text = text if high is None else f"at_most({text}, {{2}})"
            return text.format(self._operand(operand), self._optional(low), self._optional(high))
        if name == "clamp.Tensor":
            operand, low, high = (*node.args, None)[:3]
            text = "{0}" if low is None else "maximum({0}, {1})"
            text = text if high is None else f"minimum({text}, {{2}})"
            return text.format(self._operand(operand), self._optional(low), self._optional(high))
        if name not in _OPERATIONS:
            raise UntranslatableError(name)
        wanted = [name.split(".")[0] in _ON_MASKS] * len(node.args)
        if name == "where.self":
            wanted[0] = True
        if wanted != [_is_mask(a) for a in node.args]:
            raise UntranslatableError(f"{name} of {[str(a) for a in node.args]}")
        return _OPERATIONS[name].format(*(self._operand(a) for a in node.args))

    def _pow(self, node: fx.Node) -> str:
        base, exponent = self._operand(node.args[0]), float(node.args[1])  # type: ignore[arg-type]
        if exponent in (0.0, 1.0):
            return "one" if exponent == 0.0 else base
        if exponent in _POWERS:
            return _POWERS[exponent].format(base)
        return f"power({base}, {self._operand(exponent)})"

    def _optional(self, value: object) -> str:
        return "" if value is None else self._operand(value)

    def _operand(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        return self._constant(value, torch.float32)

    def _constant(self, value: object, dtype: torch.dtype) -> str:
        if dtype == torch.bool or not isinstance(value, int | float):
            raise UntranslatableError(f"constant {value!r} of {dtype}")
        self.constants.append(float(value))
        return f"constant[{len(self.constants) - 1}]"


def _is_mask(value: object) -> bool:
    return isinstance(value, fx.Node) and value.meta["val"].dtype == torch.bool
