"""TensorFlow restores what is written here, and what it writes is read here; skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.tensorflow.examples import Tables, assert_same, config_of, golden_prefix, golden_values, values
from tpuemb_torch.checkpoint import CheckpointError, read_tensorflow, write_tensorflow

tf: Any = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tensorflow.python.tpu import tpu_embedding_v2  # noqa: E402

embedding = tf.tpu.experimental.embedding
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

SHAPES = {"item": (7, 3), "query/text": (13, 4), "user": (50, 8), "t": (70, 4), "t_0": (70, 4), "x..y.S": (3, 2)}
#: Those that the object graph tells apart, the variables' names do not.
NASTY = {**SHAPES, "a": (5, 3), "a/b": (5, 3), "part_0": (6, 6), "dummy_7_t": (1, 4), "ünï": (4, 4), "a/b/c_1": (5, 3)}
OPTIMIZERS = {
    "stochastic_gradient_descent": (embedding.SGD, ()),
    "adagrad": (embedding.Adagrad, ("accumulators",)),
    "adagrad_momentum": (embedding.AdagradMomentum, ("accumulators", "momenta")),
    "adam": (embedding.Adam, ("momenta", "velocities")),
    "ftrl": (embedding.FTRL, ("accumulators", "linears")),
}
LAYERS = {"TPUEmbedding": embedding.TPUEmbedding, "ForServing": embedding.TPUEmbeddingForServing}


def layer_of(kind: str, shapes: dict[str, tuple[int, int]], algorithm: str, build: bool = True) -> Any:
    tables = [embedding.TableConfig(rows, dim, name=name) for name, (rows, dim) in shapes.items()]
    features = {f"f{i}": embedding.FeatureConfig(table, output_shape=[2]) for i, table in enumerate(tables)}
    layer = LAYERS[kind](features, OPTIMIZERS[algorithm][0]())
    if build:
        layer.build({name: [2] for name in features}) if kind == "TPUEmbedding" else layer.build()
    return layer


def randomize(layer: Any, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for slots in layer._variables.values():
        for variable in slots.values():
            variable.assign(rng.normal(size=variable.shape))


def tables_in(*layers: Any) -> Tables:
    return {
        table: {slot: torch.from_numpy(variable.numpy()) for slot, variable in slots.items()}
        for layer in layers
        for table, slots in layer._variables.items()
    }


def tables_of(algorithm: str) -> Tables:
    names = ("parameters", *OPTIMIZERS[algorithm][1])
    return {t: {slot: values(*shape, seed=7 * len(t) + len(slot)) for slot in names} for t, shape in SHAPES.items()}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_tensorflow_restores_the_object_form(tmp_path: Path, algorithm: str, kind: str) -> None:
    tables = tables_of(algorithm)
    prefix = str(tmp_path / "ckpt")
    write_tensorflow(prefix, tables)
    layer = layer_of(kind, SHAPES, algorithm)
    tf.train.Checkpoint(embedding=layer).restore(prefix).assert_consumed()
    assert_same(tables_in(layer), tables)
    layer = layer_of(kind, SHAPES, algorithm)
    tf.train.Checkpoint(embedding=layer).read(prefix).assert_existing_objects_matched()
    assert_same(tables_in(layer), tables)
    layer = layer_of("ForServing", SHAPES, algorithm, build=False)
    status = tf.train.Checkpoint(embedding=layer).restore(prefix)
    layer.build()
    status.assert_existing_objects_matched()
    assert_same(tables_in(layer), tables)
    # What TensorFlow then saves is the same again.
    saved = tf.train.Checkpoint(embedding=layer).save(str(tmp_path / "again"))
    assert_same(read_tensorflow(saved), tables)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_what_tensorflow_saves_is_read(tmp_path: Path, algorithm: str, kind: str) -> None:
    layer = layer_of(kind, NASTY, algorithm)
    randomize(layer)
    prefix = tf.train.Checkpoint(embedding=layer).write(str(tmp_path / "ckpt"))
    assert_same(read_tensorflow(prefix), tables_in(layer))
    assert_same(read_tensorflow(prefix, config_of(NASTY, algorithm)), tables_in(layer))


def test_layers_inside_a_model(tmp_path: Path) -> None:
    first, second = (
        layer_of("TPUEmbedding", {"u": (30, 4), "v": (31, 8)}, "adam"),
        layer_of("ForServing", {"w": (5, 2)}, "ftrl"),
    )
    randomize(first)
    randomize(second, 1)
    model = tf.Module()
    model.deeper, model.others, model.w = tf.Module(), [second], tf.Variable(np.ones((30, 4), np.float32))
    model.deeper.layer = first
    kernel = tf.Variable(np.ones((4, 8), np.float32))
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build([kernel])
    model.kernel, model.optimizer = kernel, optimizer
    saved = tf.train.Checkpoint(model=model, direct=first, step=tf.Variable(3)).save(str(tmp_path / "ckpt"))
    assert_same(read_tensorflow(saved), tables_in(first, second))
    assert_same(read_tensorflow(tmp_path), tables_in(first, second))
    twice = layer_of("ForServing", {"u": (30, 4)}, "adam")
    saved = tf.train.Checkpoint(a=first, b=twice).write(str(tmp_path / "twice"))
    with pytest.raises(CheckpointError, match=r"table 'u' is in 'a', 'b'"):
        read_tensorflow(saved)
    assert set(read_tensorflow(saved, config_of({"v": (31, 8)}, "adam"))) == {"v"}


def test_the_root_and_saved_models(tmp_path: Path) -> None:
    layer = layer_of("ForServing", {"r": (9, 2)}, "adagrad")
    randomize(layer)
    assert_same(read_tensorflow(tf.train.Checkpoint(layer).write(str(tmp_path / "ckpt"))), tables_in(layer))
    module = tf.Module()
    module.embedding = layer
    tf.saved_model.save(module, str(tmp_path / "model"))
    assert_same(read_tensorflow(tmp_path / "model" / "variables" / "variables"), tables_in(layer))


@pytest.mark.parametrize("hosts", [2, 5])
def test_variables_sharded_over_hosts(tmp_path: Path, hosts: int) -> None:
    make = tpu_embedding_v2.make_sharded_variable_creator(["/cpu:0"] * hosts)

    def plain(**arguments: Any) -> Any:
        return tf.Variable(arguments["initial_value"](), name=arguments["name"])

    def sharded(name: str, rows: int, dimension: int) -> Any:
        def initial(shape: Any, dtype: Any) -> Any:
            return tf.random.normal(shape, dtype=dtype)

        return make(plain, name=name, shape=(rows, dimension), dtype=tf.float32, initial_value=initial)

    layer = tf.Module()
    layer._variables = {
        name: {"parameters": sharded(name, *shape), "accumulators": sharded(f"{name}/accumulators", *shape)}
        for name, shape in {"big": (100003, 3), "small": (3, 2)}.items()
    }
    expected = {
        name: {s: torch.from_numpy(np.concatenate([v.numpy() for v in found.variables])) for s, found in slots.items()}
        for name, slots in layer._variables.items()
    }
    prefix = tf.train.Checkpoint(embedding=layer).write(str(tmp_path / "ckpt"))
    assert_same(read_tensorflow(prefix), expected)
    write_tensorflow(tmp_path / "back", expected)
    for slots in layer._variables.values():
        for found in slots.values():
            for variable in found.variables:
                variable.assign(tf.zeros_like(variable))
    tf.train.Checkpoint(embedding=layer).read(str(tmp_path / "back")).assert_existing_objects_matched()
    for name, slots in layer._variables.items():
        for slot, found in slots.items():
            assert np.array_equal(np.concatenate([v.numpy() for v in found.variables]), expected[name][slot].numpy())


@pytest.mark.parametrize("algorithm", ["adagrad", "adam"])
def test_a_stacked_checkpoint_that_serving_saved_again(tmp_path: Path, algorithm: str) -> None:
    name = f"tpuembedding_v2_stacked_2dev_{algorithm}"
    expected = golden_values(name)
    shapes = {table: tuple(found["parameters"].shape) for table, found in expected.items()}
    layer = layer_of("ForServing", shapes, algorithm, build=False)  # type: ignore[arg-type]
    checkpoint = tf.train.Checkpoint(embedding=layer)
    checkpoint.restore(str(golden_prefix(name)))
    layer.build()
    prefix = checkpoint.write(str(tmp_path / "ckpt"))
    # TensorFlow restores no slots there.
    assert_same(read_tensorflow(prefix), {t: {"parameters": found["parameters"]} for t, found in expected.items()})


@pytest.mark.parametrize("strategy", ["div", "mod"])
@pytest.mark.parametrize("hosts", [1, 3, 9])
def test_the_v1_saver_there_and_back(tmp_path: Path, hosts: int, strategy: str) -> None:
    """Variables partitioned as by `_create_partitioned_variables` of TensorFlow 2.15's tpu_embedding.py."""
    tables = tables_of("adam")
    names = {"parameters": "{}", "momenta": "{}/Adam/m", "velocities": "{}/Adam/v"}
    v1 = tf.compat.v1
    prefix = str(tmp_path / "ckpt")
    config = config_of(
        {t: (max(rows, hosts), dim) for t, (rows, dim) in SHAPES.items()}, "adam", hosts, strategy_name(strategy)
    )
    write_tensorflow(prefix, tables, "name", config=config, num_hosts=hosts, sharding_strategy=strategy)  # type: ignore[arg-type]
    with tf.Graph().as_default(), v1.Session() as session:
        partitioned = {
            (table, slot): v1.get_variable(
                name.format(table),
                shape=SHAPES[table],
                partitioner=v1.fixed_size_partitioner(min(SHAPES[table][0], hosts)),
                trainable=False,
            )
            for table in tables
            for slot, name in names.items()
        }
        saver = v1.train.Saver()
        saver.restore(session, prefix)
        for (table, slot), variable in partitioned.items():
            parts = session.run(list(variable))
            for host, part in enumerate(parts):
                rows = tables[table][slot].numpy()
                expected = rows[host :: len(parts)] if strategy == "mod" else np.array_split(rows, len(parts))[host]
                assert np.array_equal(part, expected), (table, slot, host)
        saved = saver.save(session, str(tmp_path / "again"))
    assert_same(read_tensorflow(saved, config), tables)


def strategy_name(strategy: str) -> str:
    return {"div": "DIV_DEFAULT", "mod": "MOD"}[strategy]


def test_every_tensor_is_what_tensorflow_reads(tmp_path: Path) -> None:
    tables = tables_of("ftrl")
    write_tensorflow(tmp_path / "object", tables)
    write_tensorflow(tmp_path / "name", tables, "name", num_hosts=7, sharding_strategy="mod")
    reader = tf.train.load_checkpoint(str(tmp_path / "object"))
    assert np.array_equal(
        reader.get_tensor("embedding/query.Stext.Slinears/.ATTRIBUTES/VARIABLE_VALUE"), tables["query/text"]["linears"]
    )
    reader = tf.train.load_checkpoint(str(tmp_path / "name"))
    assert set(reader.get_variable_to_shape_map()) == {f"{t}{end}" for t in tables for end in ("", "/Ftrl", "/Ftrl_1")}
    assert np.array_equal(
        reader.get_tensor("user/Ftrl_1"), np.concatenate([tables["user"]["linears"][h::7] for h in range(7)])
    )
