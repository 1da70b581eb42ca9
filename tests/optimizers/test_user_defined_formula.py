"""The formula of a user-defined optimizer, as `tpuemb inspect` prints it."""

from __future__ import annotations

import pytest

import tpuemb_torch as tpuemb
from tests.golden import golden
from tests.hlo_text import parse
from tests.optimizers.random_programs import NESTED
from tpuemb_torch.report import program_formula


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("pb2_udp_adagrad", ["Slot_0' = Slot_0 + g*g", "w' = w - lr*g/sqrt(Slot_0')"]),
        (
            "pb2_udp_adagrad_clip",
            [
                "t1 = max(min(g, 0.5), -0.5)",
                "Slot_0' = Slot_0 + t1*t1",
                "w' = max(min(w - lr*t1*rsqrt(Slot_0'), 1), -1)",
            ],
        ),
        (
            "pb2_udp_adam",
            [
                "Slot_0' = 0.9*Slot_0 + 0.1*g",
                "Slot_1' = 0.999*Slot_1 + 0.001*g*g",
                "w' = w - lr*Slot_0'/(sqrt(Slot_1') + 1e-07)",
            ],
        ),
    ],
)
def test_formulas_of_recorded_programs(name: str, lines: list[str]) -> None:
    program = tpuemb.load_config(golden(f"configs/valid/{name}.pb")).tables[0].optimizer.program
    assert program is not None
    assert program_formula(program) == lines


@pytest.mark.parametrize(
    ("lines", "formula"),
    [
        (["a = f32[] add(g, w)", "x = f32[] multiply(a, g)"], "(g + w)*g"),
        (["a = f32[] multiply(g, w)", "x = f32[] add(a, g)"], "g*w + g"),
        (["a = f32[] subtract(g, w)", "x = f32[] subtract(g, a)"], "g - (g - w)"),
        (["a = f32[] multiply(g, w)", "x = f32[] divide(g, a)"], "g/(g*w)"),
        (["a = f32[] divide(g, w)", "x = f32[] divide(a, w)"], "g/w/w"),
        (["a = f32[] negate(g)", "x = f32[] multiply(a, w)"], "-g*w"),
        (["a = f32[] multiply(g, w)", "x = f32[] negate(a)"], "-(g*w)"),
        (["a = f32[] constant(-0.1)", "x = f32[] subtract(g, a)"], "g - -0.1"),
        (["a = f32[] remainder(g, w)", "x = f32[] power(a, w)"], "pow(g % w, w)"),
        (["a = pred[] compare(g, w), direction=GE", "b = pred[] not(a)", "x = f32[] select(b, g, w)"],
         "select(not g >= w, g, w)"),
        (["a = pred[] is-finite(g)", "b = pred[] compare(g, w), direction=NE", "c = pred[] and(a, b)",
          "x = f32[] convert(c)"], "f32(is_finite(g) and g != w)"),
        (["a = s32[] convert(g)", "b = s32[] constant(2)", "c = s32[] remainder(a, b)", "x = f32[] convert(c)"],
         "f32(s32(g) % 2)"),
        (["a = f32[] exponential-minus-one(g)", "x = f32[] round-nearest-afz(a)"], "round_half_away(expm1(g))"),
        (["a = f32[] broadcast(g)", "b = f32[] reshape(a)", "x = f32[] copy(b)"], "g"),
        (["x = f32[] constant(0.1)"], "0.1"),
    ],
)  # fmt: skip
def test_formulas(lines: list[str], formula: str) -> None:
    text = "\n".join(["HloModule m", "ENTRY e {", "g = f32[] parameter(0)", "w = f32[] parameter(1)", *lines])
    text += "\nROOT r = (f32[]) tuple(x)\n}"
    assert program_formula(parse(text).SerializeToString()) == [f"w' = {formula}"]


def test_values_used_twice_and_long_ones_have_names() -> None:
    assert program_formula(parse(NESTED).SerializeToString()) == ["w' = w - g*lr", "Slot_0' = g"]
    lines = [f"x{i + 1} = f32[] add(x{i}, g)" for i in range(60)]
    text = "\n".join(
        [
            "HloModule m",
            "ENTRY e {",
            "g = f32[] parameter(0)",
            "x0 = f32[] parameter(1)",
            "s = f32[] parameter(2)",
            *lines,
        ]
    )
    text += "\ny = f32[] sqrt(x60)\nz = f32[] multiply(y, y)\nROOT r = (f32[], f32[]) tuple(z, z)\n}"
    formula = program_formula(parse(text).SerializeToString())
    assert max(map(len, formula)) < 120
    assert formula[0].startswith("t1 = w + g + g")
    assert formula[-2:] == ["w' = t3*t3", "Slot_0' = w'"]
    assert sum(line.count(" + g") for line in formula) == 60
