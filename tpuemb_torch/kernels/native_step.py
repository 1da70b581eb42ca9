"""The fused update as one C++ call: sums gradients and steps rows in one pass over memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tpuemb_torch.kernels.formula import Formula, translate
from tpuemb_torch.kernels.native import floats, integers, load_library, source_of
from tpuemb_torch.optimizers import StepNumbers, UpdateRule
from tpuemb_torch.preprocessing import SortedIds


class _Arguments(ctypes.Structure):
    """`Step` of step.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in "rows starts order bag gains gradient row_starts numbers".split()),
        *((name, ctypes.c_void_p) for name in "constants states".split()),
        *((name, ctypes.c_int64) for name in "distinct buffer_rows dim tables sweep threads".split()),
    )


class NativeStep:
    """The update of one group, compiled for this CPU.

    The text that is compiled depends on the formula alone; rates, limits, hyper-parameters, sizes and dimensions are
    arguments.

    Args:
        rule: the update rule.
        example: numbers of a step, to see which stages there are.

    Raises:
        UntranslatableError: for a formula with an operation that there is no C++ for.
        BuildError: without a C++ compiler that works.
    """

    def __init__(self, rule: UpdateRule, example: StepNumbers) -> None:
        formula = translate(rule, example)
        library = load_library(_source(formula), f"the {rule.algorithm} step")
        self._function = library.tpuemb_step
        self._function.argtypes = [ctypes.c_void_p]
        self._function.restype = None
        self._constants = torch.tensor([*formula.constants, 0.0], dtype=torch.float32)
        self._sweeps = rule.sweeps_all_rows

    def __call__(
        self,
        numbers: StepNumbers,
        row_starts: Tensor,
        state: Sequence[Tensor],
        ids: SortedIds,
        bag: Tensor,
        gains: Tensor | None,
        gradient: Tensor,
    ) -> None:
        """Steps the rows in place.

        Args:
            numbers: float32 `[tables]` each.
            row_starts: int64 `[tables + 1]`, first row of each table in the group's buffer.
            state: weights and slots, contiguous float32 `[rows, dim]` each.
            ids: the sorted ids.
            bag: int64 `[n]`, row of `gradient` that each id of the lookup's bag received.
            gains: float32 `[n]` in the order of the lookup, or None for 1.0 each.
            gradient: float32 `[bags, dim]`.
        """
        rows, dim = state[0].shape
        table = torch.stack([value for value in numbers if value is not None]).contiguous()
        # Contiguous copies must live until the call is over.
        held = [
            *(integers(t) for t in (ids.rows, ids.starts, ids.order, bag)),
            *(None if t is None else floats(t) for t in (gains, gradient)),
            integers(row_starts),
            *(floats(t) for t in (table, self._constants)),
        ]
        if not all(values.is_contiguous() for values in state):
            raise ValueError("weights and slots must be contiguous: they are stepped in place")
        states = (ctypes.c_void_p * len(state))(*(floats(values).data_ptr() for values in state))
        arguments = _Arguments(
            *(None if t is None else t.data_ptr() for t in held),
            ctypes.addressof(states),
            ids.rows.numel(),
            rows,
            dim,
            table.shape[1],
            self._sweeps,
            torch.get_num_threads(),
        )
        self._function(ctypes.byref(arguments))


def _source(formula: Formula) -> str:
    template = source_of("step.cpp")
    loads = [f"const Block state{i} = load(at[{i}]);" for i in range(formula.states)]
    loads += ["const Block gradient = load(gradient_at);"]
    loads += [f"const Block number{i} = number[{i}];" for i in range(formula.numbers)]
    stores = [f"store(at[{i}], result{i});" for i in range(formula.states)]
    body = "\n".join([*loads, formula.lines, *stores])
    counts = {"STATES": formula.states, "NUMBERS": formula.numbers, "CONSTANTS": len(formula.constants)}
    defines = "".join(f"#define {name} {count}\n" for name, count in counts.items())
    return defines + template.replace("/*FORMULA*/", body.replace("\n", "\n  "))
