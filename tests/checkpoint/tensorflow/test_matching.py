"""Configs, mappings, object graphs and stacks: what goes where, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.checkpoint.tensorflow.examples import assert_same, config_of, values, write_variables
from tpuemb_torch.checkpoint import CheckpointError, read_tensorflow, write_tensorflow
from tpuemb_torch.checkpoint.tensorflow.bundle import TensorBundle
from tpuemb_torch.checkpoint.tensorflow.bundle_writer import BundleWriter
from tpuemb_torch.checkpoint.tensorflow.mapping_file import read_mapping
from tpuemb_torch.checkpoint.tensorflow.matching import find_tables
from tpuemb_torch.checkpoint.tensorflow.object_graph import LAYOUTS, OBJECT_GRAPH
from tpuemb_torch.protos import tensorflow_checkpoint_pb2 as pb

# Most configs here ask for a part of what is there.
pytestmark = pytest.mark.filterwarnings("ignore::tpuemb_torch.checkpoint.CheckpointWarning")

TABLES = {
    name: {"parameters": values(rows, 4, rows), "accumulators": values(rows, 4, rows + 1)}
    for name, rows in (("t", 30), ("t_0", 30), ("a/b", 5), ("a", 5), ("x.y", 3), ("ünï", 4))
}
SHAPES = {name: (len(found["parameters"]), 4) for name, found in TABLES.items()}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_tensorflow(tmp_path / "ckpt", TABLES)
    return tmp_path / "ckpt"


def test_a_config_chooses_and_orders_the_tables(prefix: Path) -> None:
    got = read_tensorflow(prefix, config_of({"a": (5, 4), "t": (30, 4)}))
    assert list(got) == ["a", "t"]
    assert_same(got, {name: TABLES[name] for name in ("a", "t")})
    sgd = read_tensorflow(prefix, config_of({"a": (5, 4)}, "stochastic_gradient_descent"))
    assert_same(sgd, {"a": {"parameters": TABLES["a"]["parameters"]}})
    # MOD is for name-based checkpoints; the TF2 layer knows only DIV.
    assert_same(read_tensorflow(prefix, config_of(SHAPES, num_hosts=3, strategy="MOD")), TABLES)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (config_of({"T": (30, 4)}), r"has no table 'T'; it has 't', 't_0', .*say so in a mapping"),
        (config_of({"t": (31, 4)}), r"table 't' \('embedding/t/.*'\) has shape \[30, 4\], the config \[31, 4\]"),
        (config_of({"t": (30, 5)}), r"has shape \[30, 4\], the config \[30, 5\]"),
        (config_of({"a": (6, 4)}, num_hosts=7), r"has shape \[5, 4\], the config \[6, 4\]"),
        (config_of({"a": (4, 4)}, num_hosts=4), r"has shape \[5, 4\], the config \[4, 4\]"),
        (config_of({"t": (30, 4)}, "adam"), r"\(table 't': momenta, velocities\)"),
    ],
)
def test_what_does_not_fit_a_config(prefix: Path, config: object, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read_tensorflow(prefix, config)  # type: ignore[arg-type]


def test_rows_that_only_hosts_need_are_not_missed(prefix: Path) -> None:
    assert_same(read_tensorflow(prefix, config_of({"a": (8, 4)}, num_hosts=8)), {"a": TABLES["a"]})


def test_mappings(prefix: Path, tmp_path: Path) -> None:
    key = "embedding/{}/.ATTRIBUTES/VARIABLE_VALUE"
    (tmp_path / "mapping.yaml").write_text(
        f"tables:\n  user: a/b\n  item:\n    parameters: {key.format('t')}\n"
        f"    accumulators: {key.format('t_0.Saccumulators')}\n"
    )
    mapping = read_mapping(tmp_path / "mapping.yaml")
    expected = {
        "user": TABLES["a/b"],
        "item": {"parameters": TABLES["t"]["parameters"], "accumulators": TABLES["t_0"]["accumulators"]},
    }
    assert_same(read_tensorflow(prefix, mapping=mapping), expected)
    config = config_of({"user": (5, 4), "item": (30, 4), "a": (5, 4)})
    assert_same(read_tensorflow(prefix, config, mapping=mapping), {**expected, "a": TABLES["a"]})
    for wrong, problem in (
        ({"usr": "a"}, "the mapping has table 'usr'; the config has 'user', 'item', 'a'"),
        ({"user": "b"}, "has no table 'b'"),
        ({"user": {"parameters": "nothing"}}, "has no tensor 'nothing'"),
        ({"user": {"accumulators": key.format("a")}}, "the mapping of table 'user' has no parameters"),
        ({"user": {"parameters": OBJECT_GRAPH}}, "is no table's"),
        (
            {"user": {"parameters": key.format("a"), "accumulators": key.format("t")}},
            r"shape \[5, 4\], its accumulators",
        ),
    ):
        with pytest.raises(CheckpointError, match=problem):
            read_tensorflow(prefix, config, mapping=wrong)  # type: ignore[arg-type]


def test_mappings_of_variable_names(tmp_path: Path) -> None:
    tensors = {"scope/w": values(6, 2), "scope/w/Adagrad": values(6, 2, 1)}
    prefix = write_variables(tmp_path / "ckpt", tensors, {name: [3, 3] for name in tensors})
    expected = {"t": {"parameters": tensors["scope/w"], "accumulators": tensors["scope/w/Adagrad"]}}
    assert_same(read_tensorflow(prefix, config_of({"t": (6, 2)}), mapping={"t": "scope/w"}), expected)
    by_tensor = {"t": {"parameters": "scope/w", "accumulators": "scope/w/Adagrad"}}
    assert_same(read_tensorflow(prefix, mapping=by_tensor), expected)


@pytest.mark.parametrize(
    "text", ["[", "a: b", "tables: {}", "tables: {t: 3}", "tables: {t: {parameters: 1}}", "tables: [t]"]
)
def test_broken_mapping_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"mapping file .*m\.yaml"):
        read_mapping(tmp_path / "m.yaml")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_mapping(tmp_path / "nothing.yaml")


def test_unused_and_missing_tensors_are_listed(prefix: Path) -> None:
    contents = find_tables(
        TensorBundle(prefix), config_of({name: SHAPES[name] for name in SHAPES if name != "t"}, "ftrl")
    )
    assert contents.missing == {name: ["linears"] for name in SHAPES if name != "t"}
    assert contents.unused == [
        "embedding/t.Saccumulators/.ATTRIBUTES/VARIABLE_VALUE",
        "embedding/t/.ATTRIBUTES/VARIABLE_VALUE",
        "save_counter/.ATTRIBUTES/VARIABLE_VALUE",
    ]


def test_an_object_graph_without_tables(tmp_path: Path) -> None:
    graph = pb.TrackableObjectGraph()
    graph.nodes.add().children.add(node_id=1, local_name="_variables")  # an optimizer's
    graph.nodes.add().children.add(node_id=2, local_name="0")
    graph.nodes.add()
    with BundleWriter(tmp_path / "ckpt") as writer:
        writer.add_string(OBJECT_GRAPH, graph.SerializeToString())
        writer.add("w", values(3, 2))
    with pytest.raises(CheckpointError, match=r"no TPUEmbedding is in its object graph; .* mapping .*'w'"):
        read_tensorflow(tmp_path / "ckpt")
    got = read_tensorflow(tmp_path / "ckpt", mapping={"t": {"parameters": "w"}})
    assert_same(got, {"t": {"parameters": values(3, 2)}})
    graph.nodes[0].children[0].node_id = 9
    with BundleWriter(tmp_path / "ckpt") as writer:
        writer.add_string(OBJECT_GRAPH, graph.SerializeToString())
    with pytest.raises(CheckpointError, match="object graph makes no sense"):
        read_tensorflow(tmp_path / "ckpt")


def write_stack(
    prefix: Path, tables: dict[str, Tensor], layouts: pb.SparseCoreTableLayouts | None, stack: str = "stack"
) -> None:
    """A checkpoint as SparseCore's layer writes it: each row put where TensorFlow's map_indices_in_shard says."""
    first = next(iter(layouts.tables)) if layouts else None
    cores = first.num_sparse_cores if first else 4
    per_core = first.total_rows_per_sparse_core_shard if first else 8
    stacked = torch.full((cores * per_core, 8), 777.0)
    for layout in layouts.tables if layouts else ():
        for row, value in enumerate(tables[layout.table_name]):
            core = (row % cores + layout.sparse_core_shard_rotation) % cores
            place = core * per_core + layout.sparse_core_shard_row_offset + row // cores
            assert (stacked[place] == 777).all()
            stacked[place, : len(value)] = value
    graph = pb.TrackableObjectGraph()
    root, layer, variables, slots, variable, layout_node = (graph.nodes.add() for _ in range(6))
    root.children.add(node_id=1, local_name="e")
    for node, name in ((2, "_variables"), (4, stack), (5, LAYOUTS), (2, "_stacked_table_to_tables")):
        if layouts is not None or name != LAYOUTS:
            layer.children.add(node_id=node, local_name=name)
    variables.children.add(node_id=3, local_name=stack)
    slots.children.add(node_id=4, local_name="parameters")
    variable.attributes.add(name="VARIABLE_VALUE", checkpoint_key="v")
    layout_node.attributes.add(name="VARIABLE_VALUE", checkpoint_key="l")
    with BundleWriter(prefix) as writer:
        writer.add_string(OBJECT_GRAPH, graph.SerializeToString())
        writer.add("v", stacked)
        writer.add_string("l", b"" if layouts is None else layouts.SerializeToString())


def layouts_of(
    shapes: dict[str, tuple[int, int]], cores: int, partitions: int, stack: str
) -> pb.SparseCoreTableLayouts:
    layouts, offset = pb.SparseCoreTableLayouts(), 0
    for number, (name, (rows, dimension)) in enumerate(shapes.items()):
        padded = -(-rows // (8 * cores)) * 8 * cores
        layouts.tables.add(
            table_name=name,
            stacked_table_name=stack,
            num_sparse_cores=cores,
            num_partitions=partitions,
            unsharded_shape=[rows, dimension],
            unsharded_padded_shape=[padded, 8],
            sparse_core_shard_row_offset=offset,
            sparse_core_shard_rotation=number * cores // partitions % cores,
        )
        offset += padded // cores
    for layout in layouts.tables:
        layout.total_rows_per_sparse_core_shard = offset
    return layouts


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 8)), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (4, 1), (8, 2), (6, 3), (16, 16)]),
)
def test_stacks_come_apart(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]], cores: tuple[int, int]
) -> None:
    prefix = tmp_path_factory.mktemp("stack") / "ckpt"
    named = {f"t{i}": shape for i, shape in enumerate(shapes)}
    tables = {name: values(*shape, seed=i) for i, (name, shape) in enumerate(named.items())}
    # A stack of one table has its name.
    stack = "t0" if len(shapes) == 1 else "_".join(named)
    write_stack(prefix, tables, layouts_of(named, *cores, stack), stack)
    assert_same(read_tensorflow(prefix), {name: {"parameters": value} for name, value in tables.items()})
    contents = find_tables(TensorBundle(prefix))
    for name, (rows, _) in named.items():
        part = range(rows // 3, rows - rows // 4)
        assert torch.equal(contents.tables[name]["parameters"].read(part), tables[name][part.start : part.stop])


def test_stacks_whose_layout_does_not_fit_are_refused(tmp_path: Path) -> None:
    write_stack(tmp_path / "ckpt", {}, None, "user")
    with pytest.raises(CheckpointError, match="e: the order of the rows of 'user' is not known"):
        read_tensorflow(tmp_path / "ckpt")
    for field, value, problem in (
        ("num_sparse_cores", 3, "3 SparseCores of 8 rows"),
        ("num_sparse_cores", 0, "no SparseCores"),
        ("sparse_core_shard_row_offset", 7, "rows 7 to 9 .*do not lie within"),
        ("sparse_core_shard_rotation", 4, "with rotation 4"),
    ):
        layouts = layouts_of({"t": (5, 3)}, 4, 1, "s")
        write_stack(tmp_path / "ckpt", {"t": values(5, 3)}, layouts, "s")
        tensors = {"v": TensorBundle(tmp_path / "ckpt").read("v")}
        graph = TensorBundle(tmp_path / "ckpt").strings(OBJECT_GRAPH)[0]
        setattr(layouts.tables[0], field, value)
        with BundleWriter(tmp_path / "ckpt") as writer:
            writer.add_string(OBJECT_GRAPH, graph)
            writer.add("v", tensors["v"])
            writer.add_string("l", layouts.SerializeToString())
        with pytest.raises(CheckpointError, match=rf"table 't' of stack 's'.*{problem}"):
            read_tensorflow(tmp_path / "ckpt")
