"""Name-based checkpoints: which variable is which, and where names alone do not say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.tensorflow.examples import assert_same, config_of, values, write_variables
from tpuemb_torch.checkpoint import CheckpointError, CheckpointWarning, read_tensorflow, write_tensorflow

# Most configs here ask for a part of what is there.
pytestmark = pytest.mark.filterwarnings("ignore::tpuemb_torch.checkpoint.CheckpointWarning")


def table(rows: int, dimension: int, *slots: str, seed: int = 0) -> dict[str, Tensor]:
    return {name: values(rows, dimension, seed + i) for i, name in enumerate(["parameters", *slots])}


def test_parts_of_hosts_are_put_together_in_their_order(tmp_path: Path) -> None:
    t = table(25, 3, "accumulators")
    tensors = {}
    for i, (a, b) in enumerate([(0, 3), (3, 6), (6, 8), *((n, n + 2) for n in range(8, 24, 2)), (24, 25)]):
        tensors[f"scope/t/part_{i}"] = t["parameters"][a:b]
        tensors[f"scope/t/Adagrad/part_{i}"] = t["accumulators"][a:b]
    prefix = write_variables(tmp_path / "ckpt", tensors)  # part_10 sorts before part_2
    assert_same(read_tensorflow(prefix), {"scope/t": t})
    del tensors["scope/t/Adagrad/part_4"]
    with pytest.raises(CheckpointError, match=r"'scope/t/Adagrad' has parts .*, but no 'scope/t/Adagrad/part_4'"):
        read_tensorflow(write_variables(tmp_path / "ckpt", tensors))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("rows", "hosts"), [(17, 4), (100, 7), (3, 3)])
def test_rows_of_mod_shards_go_back_to_their_ids(tmp_path: Path, rows: int, hosts: int, separate: bool) -> None:
    t = table(rows, 5, "momenta", "velocities")
    names = {"parameters": "t", "momenta": "t/Adam/m", "velocities": "t/Adam/v"}
    shards = {names[slot]: [value[host::hosts] for host in range(hosts)] for slot, value in t.items()}
    if separate:
        tensors = {f"{n}/part_{i}": shard for n, found in shards.items() for i, shard in enumerate(found)}
        prefix = write_variables(tmp_path / "ckpt", tensors)
    else:
        parts = {name: [len(shard) for shard in found] for name, found in shards.items()}
        prefix = write_variables(tmp_path / "ckpt", {name: torch.cat(found) for name, found in shards.items()}, parts)
    config = config_of({"t": (rows, 5)}, "adam", hosts, "MOD")
    assert_same(read_tensorflow(prefix, config), {"t": t})
    written = write_tensorflow(tmp_path / "back", {"t": t}, "name", num_hosts=hosts, sharding_strategy="mod")
    if not separate:
        assert [file.read_bytes() for file in written] == [
            Path(f"{prefix}{file.name.removeprefix('back')}").read_bytes() for file in written
        ]


def test_parts_that_no_mod_sharding_makes_are_refused(tmp_path: Path) -> None:
    prefix = write_variables(tmp_path / "ckpt", {"t": values(10, 2)}, {"t": [4, 6]})
    assert_same(read_tensorflow(prefix), {"t": {"parameters": values(10, 2)}})
    config = config_of({"t": (10, 2)}, "stochastic_gradient_descent", 2, "MOD")
    with pytest.raises(CheckpointError, match=r"MOD, but the parts of 't' have \[4, 6\] rows"):
        read_tensorflow(prefix, config)


def test_padding_of_small_tables_is_left_out(tmp_path: Path) -> None:
    t, other = table(2, 3, "accumulators"), table(9, 3, "accumulators", seed=5)
    tensors = {"s/t": t["parameters"], "s/t/Adagrad": t["accumulators"]}
    tensors |= {f"s/dummy_{i}_t{end}": values(1, 3) for i in (2, 3) for end in ("", "/Adagrad")}
    # Tables that only look like padding: of another width, a row too many, a host that has rows.
    real = {"dummy_4_u": values(1, 2), "s/dummy_4_t": values(2, 3), "s/dummy_1_t": values(1, 3)}
    tensors |= {"u": other["parameters"], "u/Adagrad": other["accumulators"], **real}
    prefix = write_variables(tmp_path / "ckpt", tensors)
    assert_same(read_tensorflow(prefix), {"s/t": t, "u": other, **{n: {"parameters": v} for n, v in real.items()}})
    # TensorFlow's config has a row for each of the 4 hosts.
    config = config_of({"s/t": (4, 3), "s/dummy_3_t": (1, 3)}, "adagrad", 4)
    assert_same(
        read_tensorflow(prefix, config),
        {"s/t": t, "s/dummy_3_t": {"parameters": values(1, 3), "accumulators": values(1, 3)}},
    )


def hosts(name: str, value: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    return {f"{name}_{i}": part for i, part in enumerate(value.split(sizes))}


def test_variables_of_one_host_each(tmp_path: Path) -> None:
    t = table(14, 2, "accumulators")
    sizes = [5, 5, 4]
    tensors = hosts("t", t["parameters"], sizes) | hosts("t/accumulators", t["accumulators"], sizes)
    prefix = write_variables(tmp_path / "ckpt", tensors)
    assert_same(read_tensorflow(prefix), {"t": t})
    for strategy in ("DIV_DEFAULT", "MOD"):  # the TF2 layer knows only DIV
        assert_same(read_tensorflow(prefix, config_of({"t": (14, 2)}, num_hosts=3, strategy=strategy)), {"t": t})


def test_tables_named_like_the_parts_of_hosts(tmp_path: Path) -> None:
    tensors = hosts("t", values(14, 2), [5, 5, 4])
    prefix = write_variables(tmp_path / "ckpt", tensors)
    with pytest.raises(CheckpointError, match=r"'t_0' may be a table or the first host's rows of 't'"):
        read_tensorflow(prefix)
    sgd = "stochastic_gradient_descent"
    tables = {name: {"parameters": value} for name, value in tensors.items()}
    assert_same(read_tensorflow(prefix, config_of({"t_0": (5, 2), "t_1": (5, 2), "t_2": (4, 2)}, sgd)), tables)
    assert_same(read_tensorflow(prefix, config_of({"t": (14, 2)}, sgd)), {"t": {"parameters": values(14, 2)}})
    with pytest.raises(CheckpointError, match="no table 't'"):
        read_tensorflow(prefix, config_of({"t": (14, 2), "t_1": (5, 2)}, sgd))
    # Slots, widths or rows that parts would not have say that they are tables.
    for more in ({"t_1/Adagrad": values(5, 2)}, {"t_3": values(3, 3)}, {"t_3": values(9, 2)}):
        got = read_tensorflow(write_variables(tmp_path / "more", tensors | more))
        assert {"t_0", "t_1", "t_2"} <= set(got)


def test_tables_that_begin_like_others(tmp_path: Path) -> None:
    tables = {
        "user": table(5, 3, "accumulators", "linears"),
        "user/query": table(5, 3, "accumulators", "linears", seed=9),
        "user/weights": table(5, 3, "accumulators", "linears", seed=19),
        "user.query": table(4, 3, "accumulators", "linears", seed=29),
        "user_1": table(4, 3, "accumulators", "linears", seed=39),
    }
    write_tensorflow(tmp_path / "ckpt", tables, "name")
    assert_same(read_tensorflow(tmp_path / "ckpt"), tables)
    shapes = {name: tuple(found["parameters"].shape) for name, found in tables.items()}
    assert_same(read_tensorflow(tmp_path / "ckpt", config_of(shapes, "ftrl")), tables)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "slots",
    [("accumulators", "updates"), ("ms", "mom", "mg"), ("accumulators", "weights", "benefits"), ("vs", "linears")],
)
def test_algorithms_without_names_of_their_own(tmp_path: Path, slots: tuple[str, ...]) -> None:
    tables = {"a": table(5, 3, *slots), "b": table(5, 3), "b/weights": table(5, 3, seed=4)}
    write_tensorflow(tmp_path / "ckpt", tables, "name")
    assert_same(read_tensorflow(tmp_path / "ckpt"), tables)


def test_words_that_may_be_slots_or_tables(tmp_path: Path) -> None:
    tables = {"a": table(5, 3, "accumulators", "updates"), "a/weights": table(5, 3, seed=4)}
    write_tensorflow(tmp_path / "ckpt", tables, "name")
    with pytest.raises(
        CheckpointError, match=r"'a/accumulators' may be a slot of 'a' or a table, as may be \['a/updates"
    ):
        read_tensorflow(tmp_path / "ckpt")
    assert set(read_tensorflow(tmp_path / "ckpt", config_of({"a": (5, 3)}, "adadelta"))["a"]) == set(tables["a"])


def test_slots_are_named_by_the_configs_optimizers(tmp_path: Path) -> None:
    tables = {"t": table(4, 2, "accumulators")}
    config = config_of({"t": (4, 2)}, "proximal_adagrad")
    write_tensorflow(tmp_path / "ckpt", tables, "name", config=config)
    assert_same(read_tensorflow(tmp_path / "ckpt", config), tables)
    with pytest.raises(CheckpointError, match=r"slots of the config's optimizers \(table 't': accumulators\)"):
        read_tensorflow(tmp_path / "ckpt", config_of({"t": (4, 2)}, "adagrad"))


def test_a_table_is_no_slot_of_another(tmp_path: Path) -> None:
    tensors = {"t": values(4, 2), "t/Adagrad": values(4, 2, 1)}
    prefix = write_variables(tmp_path / "ckpt", tensors)
    sgd = config_of({"t": (4, 2), "t/Adagrad": (4, 2)}, "stochastic_gradient_descent")
    assert_same(read_tensorflow(prefix, sgd), {name: {"parameters": value} for name, value in tensors.items()})
    with pytest.raises(CheckpointError, match="table 't': accumulators; table 't/Adagrad': accumulators"):
        read_tensorflow(prefix, config_of({"t": (4, 2), "t/Adagrad": (4, 2)}))
    more = write_variables(tmp_path / "more", {**tensors, "t/Adagrad/Adagrad": values(4, 2)})
    with pytest.raises(CheckpointError, match="'t/Adagrad' may be a slot of 't' or a table with slots of its own"):
        read_tensorflow(more)


def test_two_variables_for_one_slot_are_refused(tmp_path: Path) -> None:
    tensors = {"t": values(4, 2), "t/Adagrad": values(4, 2), "t/Ftrl": values(4, 2), "t/Ftrl_1": values(4, 2)}
    prefix = write_variables(tmp_path / "ckpt", tensors)
    with pytest.raises(CheckpointError, match="may be accumulators of 't', which another variable is as well"):
        read_tensorflow(prefix)
    with pytest.warns(CheckpointWarning, match="'t/Ftrl', 't/Ftrl_1', which the config has no place for"):
        got = read_tensorflow(prefix, config_of({"t": (4, 2)}, "adagrad"))
    assert set(got["t"]) == {"parameters", "accumulators"}
    both = write_variables(
        tmp_path / "both", {"t": values(4, 2), "t/Adagrad": values(4, 2), "t/accumulators": values(4, 2)}
    )
    with pytest.raises(CheckpointError, match="accumulators of 't' may be any of 't/Adagrad', 't/accumulators'"):
        read_tensorflow(both, config_of({"t": (4, 2)}))


def test_the_rest_of_a_model_is_left_alone(tmp_path: Path) -> None:
    t = table(4, 2, "accumulators")
    rest = {f"dense/kernel{end}": values(4, 2) for end in ("", "/Adam", "/Adam_1")}
    rest |= {"dense/bias": torch.ones(2), "global_step": torch.tensor(7)}
    prefix = write_variables(tmp_path / "ckpt", {"t": t["parameters"], "t/Adagrad": t["accumulators"], **rest})
    assert_same(read_tensorflow(prefix), {"t": t})
    empty = write_variables(tmp_path / "empty", rest)
    with pytest.raises(CheckpointError, match="has no tables; its tensors are 'dense/bias'"):
        read_tensorflow(empty)
