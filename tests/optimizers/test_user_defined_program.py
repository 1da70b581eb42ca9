"""User-defined optimizers: recorded programs, training end to end, slots, the scalar, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format

import tpuemb_torch as tpuemb
from tests.config import examples
from tests.golden import GOLDEN, golden
from tests.hlo_text import parse
from tests.optimizers.random_programs import NESTED
from tpuemb_torch.optimizers import Slot, UserDefinedProgram, create_rule, hlo_translation, slots_of
from tpuemb_torch.report import program_formula

TEXTS = (
    sorted(f.name.removesuffix(".hlo.txt") for f in GOLDEN.glob("configs/user_defined_hlo/*.hlo.txt")) if GOLDEN else []
)

#: The programs of the recorded configurations, as optimizers of the proto.
BUILT_IN = {
    "pb2_udp_adagrad": "adagrad {}",
    "pb2_udp_adagrad_clip": """adagrad {} gradient_clipping_limits { lower { value: -0.5 } upper { value: 0.5 } }
        clipping_limits { lower { value: -1 } upper { value: 1 } }""",
    "pb2_udp_adam": "adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-7 }",
}


def rule_of(text: str) -> UserDefinedProgram:
    return UserDefinedProgram(parse(text).SerializeToString())


@pytest.mark.parametrize("name", TEXTS or ["missing"])
def test_recorded_values(name: str) -> None:
    rule = rule_of(golden(f"configs/user_defined_hlo/{name}.hlo.txt").read_text())
    with np.load(golden(f"configs/user_defined_hlo/{name}.npz")) as file:
        arrays = dict(file)
    slots = [arrays[f"slot{i}"] for i in range(len(rule.slots))]
    inputs = (arrays["weights"], arrays["gradient"], arrays["learning_rate"], *slots)
    expected = [arrays["new_weights"], *(arrays[f"new_slot{i}"] for i in range(len(slots)))]
    single = rule.update(*map(torch.from_numpy, inputs))
    double = rule.reference(*(x.astype(np.float64) for x in inputs))
    for s, d, e in zip(single, double, expected, strict=True):
        np.testing.assert_allclose(s.numpy(), e, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(d, e, rtol=1e-5, atol=1e-7)


def train(embedding: tpuemb.TPUEmbedding, slots: dict[str, str], rates: list[list[float]]) -> dict[str, Any]:
    """Some steps with ids that occur twice and a row with a zero gradient; slots renamed by `slots`."""
    rng = np.random.default_rng(0)
    (table,) = embedding.config.tables
    start = torch.tensor(rng.normal(size=(table.vocabulary_size, table.dimension)), dtype=torch.float32)
    embedding.load_parameters(
        {table.name: {"parameters": start, **{name: start.abs() + 0.1 for name in slots.values()}}}
    )
    for rate in rates:
        ids = torch.tensor(rng.integers(0, 12, embedding.config.features[0].input_shape[0]))
        embedding.enqueue([ids])
        (activations,) = embedding.recv_activations()
        gradient = torch.tensor(rng.normal(size=activations.shape), dtype=torch.float32)
        gradient[ids == ids[0]] = 0.0
        embedding.send_gradients([gradient], rate)
    state = embedding.retrieve_parameters()[table.name]
    return {own: state[name].numpy() for own, name in {"parameters": "parameters", **slots}.items()}


@pytest.mark.parametrize("kernel", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_training_equals_the_built_in_optimizer(name: str, dynamic: bool, kernel: str) -> None:
    proto = tpuemb.load_config(golden(f"configs/valid/{name}.pb")).to_proto()
    parameters = proto.table_descriptor[0].optimization_parameters
    if dynamic:
        parameters.learning_rate.dynamic.tag = 0
    ours = tpuemb.TPUEmbedding(tpuemb.load_config(proto), kernel=kernel)
    parameters.ClearField("user_defined_program")
    text_format.Merge(BUILT_IN[name], parameters)
    built_in = tpuemb.TPUEmbedding(tpuemb.load_config(proto), kernel=kernel)

    rates = [[0.3], [0.1], [0.0], [0.2]] if dynamic else [[]] * 4
    names = [slot.name for slot in slots_of(built_in.config.tables[0].optimizer)]
    actual = train(ours, {f"Slot_{i}": f"Slot_{i}" for i in range(len(names))}, rates)
    expected = train(built_in, {f"Slot_{i}": slot for i, slot in enumerate(names)}, rates)
    assert actual.keys() == expected.keys()
    for slot, values in expected.items():
        np.testing.assert_allclose(actual[slot], values, rtol=1e-5, atol=1e-7, err_msg=slot)


def test_slots_are_those_of_the_program_and_start_at_zero() -> None:
    config = tpuemb.load_config(examples.with_program(examples.program(num_slots=3)))
    optimizer = config.tables[0].optimizer
    assert slots_of(optimizer) == tuple(Slot(f"Slot_{i}", 0.0) for i in range(3)) == create_rule(optimizer).slots
    state = tpuemb.TPUEmbedding(config).retrieve_parameters()["t"]
    assert list(state) == ["parameters", "Slot_0", "Slot_1", "Slot_2"]
    assert all((state[name] == 0).all() for name in list(state)[1:])
    assert UserDefinedProgram.slots == ()  # the class knows no program


def test_two_programs_in_one_config_are_two_kernel_groups() -> None:
    proto = examples.with_program(examples.program(num_slots=1))
    other = proto.table_descriptor.add()
    other.CopyFrom(proto.table_descriptor[0])
    other.name = "u"
    other.optimization_parameters.user_defined_program.program.CopyFrom(examples.program(num_slots=0, with_rate=False))
    proto.feature_descriptor.add(table_id=1, input_shape=[4])
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(proto))
    before = embedding.retrieve_parameters()
    assert {t: list(s) for t, s in before.items()} == {"t": ["parameters", "Slot_0"], "u": ["parameters"]}
    embedding.enqueue([torch.arange(4), torch.arange(4)])
    embedding.send_gradients([torch.ones_like(a) for a in embedding.recv_activations()])
    after = embedding.retrieve_parameters()
    torch.testing.assert_close(after["t"]["parameters"][:4], before["t"]["parameters"][:4] - 0.1)  # the rate 0.1
    torch.testing.assert_close(after["u"]["parameters"][:4], before["u"]["parameters"][:4] - 1.0)  # takes no rate
    for table in ("t", "u"):
        assert torch.equal(after[table]["parameters"][4:], before[table]["parameters"][4:])


def test_a_rate_that_the_program_does_not_take_still_scales_weight_decay() -> None:
    proto = examples.with_program(examples.program(with_rate=False))
    parameters = proto.table_descriptor[0].optimization_parameters
    parameters.weight_decay_factor = 0.5
    parameters.multiply_weight_decay_factor_by_learning_rate = True
    embedding = tpuemb.TPUEmbedding(tpuemb.load_config(proto))
    embedding.load_parameters({"t": {"parameters": torch.ones(10, 8)}})
    embedding.enqueue([torch.zeros(4, dtype=torch.int64)])
    embedding.recv_activations()
    embedding.send_gradients([torch.full((4, 8), 0.25)])
    torch.testing.assert_close(
        embedding.retrieve_parameters()["t"]["parameters"][0], torch.full((8,), 1 - 0.5 * 0.1 - 4 * 0.25)
    )


def test_outputs_that_do_not_depend_on_the_row() -> None:
    rule = rule_of("""
    HloModule m
    ENTRY e {
      g = f32[1,1] parameter(0)
      w = f32[1,1] parameter(1)
      s = f32[1,1] parameter(2)
      t = f32[1,1] parameter(3)
      lr = f32[] parameter(4)
      one = f32[1,1] constant(1.5)
      ROOT r = (f32[1,1], f32[1,1], f32[1,1]) tuple(one, lr, s)
    }""")
    w = torch.zeros(3, 2)
    s = torch.rand(3, 2)
    for lr in (torch.tensor(0.1), torch.tensor([[0.1], [0.2], [0.3]])):
        one, rate, same = rule.update(w, w, lr, s, w)
        assert torch.equal(one, torch.full((3, 2), 1.5))
        assert torch.equal(rate, lr.expand(3, 2))
        assert torch.equal(same, s) and same.data_ptr() != s.data_ptr()
        reference = rule.reference(w.numpy(), w.numpy(), lr.numpy(), s.numpy(), w.numpy())
        assert [x.shape for x in reference] == [(3, 2)] * 3


def test_rules_copy_and_layers_pickle() -> None:
    rule = create_rule(tpuemb.load_config(examples.with_program(examples.program())).tables[0].optimizer)
    for other in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        (w,) = other.update(torch.ones(2, 2), torch.ones(2, 2), torch.tensor(0.25))
        assert torch.equal(w, torch.full((2, 2), 0.75))


def test_nested_tuples_and_calls() -> None:
    rule = rule_of(NESTED)
    g, w = torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 1.0]])
    new, slot = rule.update(w, g, torch.tensor(0.5), torch.zeros(1, 2))
    assert new.tolist() == [[0.0, 1.5]] and slot.tolist() == g.tolist()
    reference = rule.reference(w.numpy(), g.numpy(), 0.5, np.zeros((1, 2)))
    assert reference[0].tolist() == [[0.0, 1.5]] and reference[1].tolist() == g.tolist()


# What is refused, by the name of the instruction.

FRAME = """
HloModule m
twice {{
  x = f32[1,1] parameter(0)
  ROOT xx = f32[1,1] add(x, x)
}}
ENTRY e {{
  g = f32[1,1] parameter(0)
  w = f32[1,1] parameter(1)
  one = s32[] constant(1)
  {line}
  ROOT r = (f32[1,1]) tuple(w)
}}
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x = f64[1,1] convert(g)", r"'x' \(convert\) is f64; an optimizer may use the types pred, s32, s64, f32"),
        ("x = f32[1,1] add(g, one)", r"'x' \(add\) has the types \(f32, s32\) -> f32; expected operands and result"),
        ("x = s32[] sqrt(one)", r"'x' \(sqrt\) .* of one type, f32$"),
        ("x = f32[1,1] and(g, w)", r"'x' \(and\) .* of one type, pred or s32 or s64$"),
        ("x = f32[1,1] compare(g, w), direction=LT", r"'x' \(compare\) .*-> f32; expected .* pred"),
        ("x = pred[1,1] compare(g, one), direction=LT", r"'x' \(compare\) has the types \(f32, s32\)"),
        (
            "x = pred[1,1] compare(g, w), direction=ABOVE",
            r"'x' \(compare\) has the direction 'ABOVE'; use one of EQ, NE, GE, GT, LE, LT",
        ),
        ("x = f32[1,1] select(g, g, w)", r"'x' \(select\) has the types \(f32, f32, f32\) -> f32; expected pred"),
        ("x = f32[1,1] is-finite(g)", r"'x' \(is-finite\) .* expected f32, and pred"),
        ("x = s32[1,1] copy(g)", r"'x' \(copy\) has the types \(f32\) -> s32; expected the type of its operand"),
        ("x = s32[1,1] bitcast(g)", r"'x' \(bitcast\)"),
        ("x = f32[1,1] call(one), to_apply=twice", r"'x' \(call\) .*; expected those of 'twice': \(f32\) -> f32"),
        ("x = s32[1,1] map(g), to_apply=twice", r"'x' \(map\) has the types \(f32\) -> s32"),
        ("x = (f32[1,1], s32[1,1]) tuple(g, w)", r"'x' \(tuple\) .* expected a tuple of its operands"),
        ("x = f32[1,1] get-tuple-element(g), index=0", r"'x' \(get-tuple-element\) takes element 0 of f32"),
        ("x = (f32[1,1]) convert(g)", r"'x' \(convert\) .* expected single elements"),
    ],
)
def test_types_that_do_not_agree_are_refused_by_name(line: str, words: str) -> None:
    program = parse(FRAME.format(line=line)).SerializeToString()
    with pytest.raises(ValueError, match=rf"^program\.computations\[1\]\.instructions\[3\]: instruction {words}"):
        hlo_translation.translate(program)
    assert re.search(words, program_formula(program)[0])


def test_constants_of_another_kind_or_size_are_refused() -> None:
    module = parse(FRAME.format(line="x = f32[] constant(2)"))
    module.computations[1].instructions[3].literal.f32s.append(3.0)
    with pytest.raises(ValueError, match=r"'x' \(constant\) holds 2 values of type f32"):
        hlo_translation.translate(module.SerializeToString())
    module.computations[1].instructions[3].literal.f32s[:] = []
    module.computations[1].instructions[3].literal.s32s.append(3)
    with pytest.raises(ValueError, match=r"'x' \(constant\) holds 0 values of type f32"):
        hlo_translation.translate(module.SerializeToString())


def test_total_order_is_refused() -> None:
    module = parse(FRAME.format(line="x = pred[1,1] compare(g, w), direction=LT"))
    module.computations[1].instructions[3].comparison_type = "TOTALORDER"
    with pytest.raises(ValueError, match=r"'x' \(compare\) compares in TOTALORDER"):
        hlo_translation.translate(module.SerializeToString())


def test_a_broken_structure_is_refused_too() -> None:
    module = parse(FRAME.format(line="x = f32[1,1] add(g, w)"))
    module.computations[1].instructions[3].opcode = "reduce"
    with pytest.raises(ValueError, match=r"'x' \(reduce\) is not an element-wise operation"):
        hlo_translation.translate(module.SerializeToString())
    optimizer = tpuemb.load_config(examples.with_optimizer("adagrad {}")).tables[0].optimizer
    with pytest.raises(ValueError, match="user_defined_program without a program"):
        UserDefinedProgram.of(optimizer)


@pytest.mark.parametrize(
    ("calls", "levels", "words"),
    [(2, 40, r"'f12' has \d+ instructions .* limit is 10000"), (1, 60, "'f51' calls 51 deep")],
)
def test_programs_that_explode_are_refused(calls: int, levels: int, words: str) -> None:
    lines = ["HloModule m", "f0 {", "x = f32[] parameter(0)", "ROOT y = f32[] add(x, x)", "}"]
    for level in range(1, levels):
        body = [f"c{i} = f32[] call({'x' if i == 0 else f'c{i - 1}'}), to_apply=f{level - 1}" for i in range(calls)]
        lines += [f"f{level} {{", "x = f32[] parameter(0)", *body[:-1], f"ROOT {body[-1]}", "}"]
    lines += ["ENTRY e {", "g = f32[] parameter(0)", "w = f32[] parameter(1)"]
    lines += [f"ROOT y = f32[] call(w), to_apply=f{levels - 1}", "}"]
    with pytest.raises(ValueError, match=words):
        hlo_translation.translate(parse("\n".join(lines)).SerializeToString())
