"""The kernel by itself: groups, chunks, initial weights, and updates against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tpuemb_torch as tpuemb
from tpuemb_torch.config import Table
from tpuemb_torch.kernels import StepSource, TableBatchedEmbedding, TablePart
from tpuemb_torch.kernels.update import CHUNK_ROWS
from tpuemb_torch.optimizers import reference_step
from tpuemb_torch.preprocessing import sort_ids


def table(name: str, rows: int, dimension: int, optimizer: str, rate: float = 0.1, extra: str = "") -> Table:
    config = tpuemb.load_config(f"""
        mode: TRAINING num_hosts: 1 num_tensor_cores: 1
        table_descriptor {{ name: "{name}" vocabulary_size: {rows} dimension: {dimension} optimization_parameters {{
            learning_rate {{ constant: {rate} }} {optimizer} {extra} }} }}
        feature_descriptor {{ name: "f" table_id: 0 input_shape: 4 }}""")
    return config.tables[0]


def kernel_of(*tables: Table, features: list[int] | None = None) -> TableBatchedEmbedding:
    parts = [TablePart.whole(t) for t in tables]
    return TableBatchedEmbedding(parts, features or list(range(len(tables))), torch.device("cpu"), 0, StepSource(0))


@pytest.mark.parametrize("dimension", [1, 3, 8, 65])
def test_more_rows_than_a_chunk_against_the_reference(dimension: int) -> None:
    """Several tables with other numbers in one group; more distinct rows than one chunk."""
    rows = CHUNK_ROWS + 100
    tables = [
        table("a", rows, dimension, "adagrad {}", 0.1),
        table(
            "b", 50, dimension, "adagrad {}", 0.3, "weight_decay_factor: 0.1 clipping_limits { upper { value: 0.2 } }"
        ),
        table("c", rows, dimension, "adagrad {}", 0.0, "gradient_clipping_limits { lower { value: -0.1 } }"),
    ]
    kernel = kernel_of(*tables)
    assert len(kernel.table_groups()) == 1
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, t.vocabulary_size, 3 * rows) for t in tables]
    batch = rows
    before = [{k: v.clone().numpy() for k, v in s.tensors.items()} for s in kernel.stored()]
    gains = rng.normal(size=9 * rows).astype(np.float32)
    offsets = torch.arange(0, 9 * rows + 1, 3)
    out = kernel(torch.from_numpy(np.concatenate(ids)), offsets, torch.from_numpy(gains))
    gradient = rng.normal(size=out.shape).astype(np.float32)
    out.backward(torch.from_numpy(gradient))
    for index, (t, old, stored) in enumerate(zip(tables, before, kernel.stored(), strict=True)):
        columns = slice(index * dimension, (index + 1) * dimension)
        weights = gains[index * 3 * rows : (index + 1) * 3 * rows]
        folded = np.zeros((t.vocabulary_size, dimension))
        contributions = weights[:, None].astype(np.float64) * np.repeat(gradient[:, columns], 3, axis=0)
        np.add.at(folded, ids[index], contributions)
        touched = np.unique(ids[index])
        expected = reference_step(
            t.optimizer,
            old["parameters"][touched],
            folded[touched],
            np.float64(np.float32(t.optimizer.learning_rate.constant)),
            old["accumulators"][touched],
        )
        # A float32 sum of up to hundreds of terms that cancel: its error is a few roundings of their absolute sum.
        absolute = np.zeros((t.vocabulary_size, dimension))
        np.add.at(absolute, ids[index], np.abs(contributions))
        slack = 8 * 2.0**-24 * absolute[touched]
        bounds = {
            "parameters": 0.3 * slack / np.sqrt(expected[1]) + 1e-6,
            "accumulators": 2 * np.abs(folded[touched]) * slack + slack**2 + 1e-6 * expected[1],
        }
        for name, values in zip(("parameters", "accumulators"), expected, strict=True):
            assert (np.abs(stored.tensors[name].numpy()[touched] - values) <= bounds[name]).all(), name
        untouched = np.setdiff1d(np.arange(t.vocabulary_size), touched)
        for name in ("parameters", "accumulators"):
            np.testing.assert_array_equal(stored.tensors[name].numpy()[untouched], old[name][untouched])
        looked_up = old["parameters"].astype(np.float64)[ids[index]] * weights[:, None]
        exact = looked_up.reshape(batch, 3, dimension).sum(1)
        np.testing.assert_allclose(out.detach().numpy()[:, columns], exact, rtol=1e-5, atol=1e-5)


def test_tables_group_by_rule_and_dimension() -> None:
    kernel = kernel_of(
        table("a", 5, 4, "adagrad {}"),
        table("b", 6, 4, "adagrad {}", 0.5),
        table("c", 7, 8, "adagrad {}"),
        table("d", 8, 8, "adam { beta1: 0.9 }"),
        table("e", 8, 8, "adam { beta1: 0.8 }"),
        features=[0, 0, 1, 2, 3, 4],
    )
    assert [len(group.parts) for group in kernel.table_groups()] == [2, 1, 1, 1]
    out = kernel(torch.tensor([0, 1, 2, 3, 4, 5]), torch.arange(7))
    weights = kernel.split_embedding_weights()
    expected = [weights[0][0], weights[0][1], weights[1][2], weights[2][3], weights[3][4], weights[4][5]]
    assert torch.equal(out, torch.cat(expected)[None])
    out.sum().backward()


def test_views_are_live() -> None:
    kernel = kernel_of(table("a", 5, 4, "adagrad {}"), table("b", 6, 4, "adagrad {}"))
    kernel.split_embedding_weights()[1].fill_(3)
    assert torch.equal(kernel(torch.tensor([0, 2]), torch.arange(3))[0, 4:], torch.full((4,), 3.0))
    assert [set(s) for s in kernel.get_optimizer_state()] == [{"accumulators"}] * 2


def test_sort_ids_is_stable_and_finds_runs() -> None:
    ids = torch.tensor([5, 1, 5, 0, 1, 5])
    for rows in (10, 2**40):
        found = sort_ids(ids, rows)
        assert found.rows.tolist() == [0, 1, 5]
        assert found.starts.tolist() == [0, 1, 3, 6]
        assert found.order.tolist() == [3, 1, 4, 0, 2, 5]
    empty = sort_ids(ids[:0], 10)
    assert empty.rows.tolist() == [] and empty.starts.tolist() == [0]


def test_initial_weights_depend_on_the_row_alone() -> None:
    whole = table("a", 3000, 16, "adagrad {}")
    kernel = kernel_of(whole)
    weights = kernel.split_embedding_weights()[0]
    part = TablePart(whole, range(7, 3000, 13), range(4, 12))
    piece = TableBatchedEmbedding([part], [0], torch.device("cpu"), 0, StepSource(0)).split_embedding_weights()[0]
    assert torch.equal(piece, weights[7::13, 4:12])
    # Truncated normal: standard deviation 1/sqrt(16) before the cut at two of them (0.88 of it after).
    assert abs(float(weights.mean())) < 0.005
    assert abs(float(weights.std()) - 0.25 * 0.8796) < 0.005
    assert float(weights.abs().max()) < 0.5
    assert len(torch.unique(weights)) > 0.99 * weights.numel()
    other_seed = TableBatchedEmbedding([TablePart.whole(whole)], [0], torch.device("cpu"), 1, StepSource(0))
    assert not torch.equal(other_seed.split_embedding_weights()[0], weights)
    other_name = kernel_of(table("b", 3000, 16, "adagrad {}"))
    correlation = np.corrcoef(other_name.split_embedding_weights()[0].flatten(), weights.flatten())[0, 1]
    assert abs(correlation) < 0.02


def test_a_rate_from_elsewhere_is_refused() -> None:
    kernel = kernel_of(table("a", 5, 4, "adagrad {}"))
    kernel.set_learning_rate(kernel.get_learning_rate())
    with pytest.raises(RuntimeError, match="set_learning_rates"):
        kernel.set_learning_rate(0.1)
    with pytest.raises(RuntimeError, match="come from their config"):
        kernel.update_hyper_parameters({"lr": 0.1})


def test_per_core_steps_without_accumulation() -> None:
    """DISABLED accumulation: the contributions of each core are a step, in core order."""
    t = table("a", 4, 2, "adagrad {}", 0.1, "gradient_accumulation_status: DISABLED")
    steps = StepSource(0, cores=2)
    kernel = TableBatchedEmbedding([TablePart.whole(t)], [0], torch.device("cpu"), 0, steps)
    start = {k: v.clone().numpy() for k, v in kernel.stored()[0].tensors.items()}
    # Two cores with two samples each; row 1 is hit twice by core 0 and once by core 1.
    out = kernel(torch.tensor([1, 1, 1, 3]), torch.arange(5))
    gradient = np.array([[1.0, 2.0], [0.5, -1.0], [3.0, 1.0], [1.0, 1.0]], np.float32)
    out.backward(torch.from_numpy(gradient))
    w, a = start["parameters"].astype(np.float64), start["accumulators"].astype(np.float64)
    for folded in ({1: gradient[0] + gradient[1]}, {1: gradient[2], 3: gradient[3]}):
        for row, g in folded.items():
            w[row], a[row] = reference_step(t.optimizer, w[row], g, np.float64(np.float32(0.1)), a[row])
    stored = kernel.stored()[0].tensors
    np.testing.assert_allclose(stored["parameters"].numpy(), w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stored["accumulators"].numpy(), a, rtol=1e-5, atol=1e-6)
