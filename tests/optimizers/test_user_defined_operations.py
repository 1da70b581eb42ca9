"""Every operation of a user-defined optimizer, alone, on edge cases: against what XLA's compiler made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpuemb_torch.config import hlo, hlo_types
from tpuemb_torch.optimizers import hlo_reference, hlo_translation
from tpuemb_torch.protos import hlo_pb2, xla_data_pb2

RECORD = Path(__file__).parents[1] / "data" / "optimizers" / "hlo_operations.json"
CASES: list[dict[str, Any]] = json.loads(RECORD.read_text())["cases"]
DTYPES = {"f32": torch.float32, "s32": torch.int32, "s64": torch.int64, "pred": torch.bool}

#: What float32 arithmetic rounds correctly; the others may differ by their approximation.
EXACT = frozenset(
    "abs add and ceil clamp compare convert divide floor is-finite maximum minimum multiply negate not or remainder "
    "round-nearest-afz round-nearest-even select sign subtract xor".split()
)


def name(case: dict[str, Any]) -> str:
    return "-".join([case["opcode"], *case["types"][:1], case["result_type"], case.get("direction", "")]).rstrip("-")


def operands(case: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=DTYPES[kind]) for x, kind in zip(case["operands"], case["types"], strict=True)]


def operation(case: dict[str, Any]) -> Any:
    if case["opcode"] == "compare":
        return hlo_translation.COMPARISONS[case["direction"]]
    if case["opcode"] == "convert":
        return lambda x: hlo_translation._convert(x, DTYPES[case["result_type"]])
    return hlo_translation.OPERATIONS[case["opcode"]]


def check(case: dict[str, Any], result: np.ndarray, expected: np.ndarray) -> None:
    if expected.dtype != np.float32:
        np.testing.assert_array_equal(result.astype(expected.dtype), expected)
        return
    if case["opcode"] in EXACT or case["types"][0] != "f32":
        np.testing.assert_array_equal(result.astype(np.float32), expected)
        if case["opcode"] not in ("maximum", "minimum", "clamp"):  # which zero these give is not defined
            zero = expected == 0
            np.testing.assert_array_equal(np.signbit(result[zero]), np.signbit(expected[zero]))
    else:
        np.testing.assert_allclose(result, expected, rtol=5e-7)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_translation_does_what_xla_does(case: dict[str, Any]) -> None:
    expected = torch.tensor(case["result"], dtype=DTYPES[case["result_type"]])
    result = operation(case)(*operands(case))
    assert result.dtype == expected.dtype
    check(case, result.numpy(), expected.numpy())
    # A broadcast operand is 0-dim: the same as the vector of it.
    first, *rest = operands(case)
    alone = operation(case)(first[1], *rest)
    together = operation(case)(first[1].expand_as(first), *rest)
    assert alone.dtype == together.dtype
    np.testing.assert_array_equal(alone.expand_as(together).numpy(), together.numpy())


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_reference_does_what_xla_does(case: dict[str, Any]) -> None:
    step = hlo_pb2.HloInstructionProto(opcode=case["opcode"], comparison_direction=case.get("direction", ""))
    step.shape.element_type = xla_data_pb2.PrimitiveType.Value(case["result_type"].upper())
    given = [
        x.numpy().astype({"f32": np.float64, "pred": bool}.get(k, object))
        for x, k in zip(operands(case), case["types"], strict=True)
    ]
    with np.errstate(all="ignore"):
        result = hlo_reference.compute(step, given, np.float32)
    check(case, result, torch.tensor(case["result"], dtype=DTYPES[case["result_type"]]).numpy())


@pytest.mark.slow
def test_compiled_operations_do_what_xla_does() -> None:
    """All in one graph, through the real code generator."""
    functions = [operation(case) for case in CASES]
    compiled = torch.compile(lambda x: [f(*y) for f, y in zip(functions, x, strict=True)], fullgraph=True)
    for case, result in zip(CASES, compiled([operands(case) for case in CASES]), strict=True):
        check(case, result.numpy(), torch.tensor(case["result"], dtype=DTYPES[case["result_type"]]).numpy())


def test_every_operation_is_translated_and_recorded() -> None:
    """The list of opcodes that configurations may use is the only one."""
    structural = {"parameter", "constant", "tuple", "get-tuple-element", "call", "fusion", "map", *hlo_types.FORWARDING}
    assert set(hlo_translation.OPERATIONS) | structural | {"compare", "convert"} == set(hlo.OPERANDS)
    assert {case["opcode"] for case in CASES} | structural == set(hlo.OPERANDS)
    assert set(hlo_translation.COMPARISONS) == set(hlo_types.DIRECTIONS)
    assert set(hlo_types.UNIFORM) | {"compare", "convert", "select", "is-finite"} | structural == set(hlo.OPERANDS)
    assert {*hlo_reference._REAL, *hlo_reference._INTEGER} >= set(hlo_translation.OPERATIONS) - {"select"}


def test_conversions_wrap_and_saturate() -> None:
    """Spelled out: numbers are cut towards 0 and to the type's range; integers wrap."""
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e9, -3e9, -1.9, 2147483520.0])
    expected = [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), -1, 2147483520]
    assert hlo_translation._convert(x, torch.int32).tolist() == expected
    assert hlo_translation._convert(torch.tensor([2**40 + 5]), torch.int32).tolist() == [5]
    assert hlo_translation._convert(x[:1], torch.bool).tolist() == [True]
