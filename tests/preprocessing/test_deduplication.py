"""Deduplication data: what it says of the activations, and how it travels."""

from __future__ import annotations

import pickle

import pytest
import torch

import tpuemb_torch as tpuemb

CONFIG = """
mode: TRAINING num_hosts: 1 num_tensor_cores: 1
table_descriptor { name: "a" vocabulary_size: 9 dimension: 3 optimization_parameters {
    learning_rate { constant: 1 } stochastic_gradient_descent {} } }
table_descriptor { name: "b" vocabulary_size: 9 dimension: 3 optimization_parameters {
    learning_rate { constant: 1 } stochastic_gradient_descent {} } }
feature_descriptor { name: "x" table_id: 0 input_shape: 4 }
feature_descriptor { name: "y" table_id: 1 input_shape: 4 }
"""
LENGTHS = torch.tensor([2, 0, 3, 1, 1, 1, 0, 2])  # Of the bags of x, then of y.
IDS = torch.tensor([1, 1, 8, 0, 8, 3, 1, 8, 2, 2])


def embedding_and_data() -> tuple[tpuemb.TPUEmbedding, tpuemb.DeduplicationData]:
    embedding = tpuemb.TPUEmbedding(CONFIG, ["mean", "sqrtn"])
    splits = [torch.cat([torch.zeros(1, dtype=torch.int64), part.cumsum(0)]) for part in LENGTHS.split(4)]
    embedding.enqueue({"x": tpuemb.Ragged(splits[0], IDS[:6]), "y": tpuemb.Ragged(splits[1], IDS[6:])})
    return embedding, embedding.recv_deduplication_data()


def test_it_makes_the_activations_of_distinct_rows() -> None:
    embedding, data = embedding_and_data()
    ((indices, weights),), (rows,) = data.cores, data.rows
    assert (indices.dtype, weights.dtype) == (torch.uint32, torch.float32)
    assert sorted(map(tuple, rows.tolist())) == [(0, 0), (0, 1), (0, 3), (0, 8), (1, 1), (1, 2), (1, 8)]
    tables = [slots["parameters"] for slots in embedding.retrieve_parameters().values()]
    distinct = torch.stack([tables[table][row] for table, row in rows.tolist()])
    bag = torch.repeat_interleave(torch.arange(8), LENGTHS)
    assert torch.equal(data.lengths[0], LENGTHS)
    expected = torch.zeros(8, 3).index_add(0, bag, distinct[indices.long()] * weights[:, None])
    torch.testing.assert_close(torch.cat(embedding.recv_activations(data)), expected)


def test_it_travels() -> None:
    embedding, data = embedding_and_data()
    travelled = pickle.loads(pickle.dumps(data)).to("cpu")
    if torch.cuda.is_available():
        assert data.pin_memory().cores[0][0].is_pinned()
        travelled = travelled.pin_memory().to("cuda", non_blocking=True).to("cpu")
    assert travelled.batch == data.batch
    everything = [(*d.cores[0], *d.rows, *d.lengths) for d in (travelled, data)]
    for a, b in zip(*everything, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert {tensor.device.type for tensor in (*data.to("meta").cores[0], *data.to("meta").rows)} == {"meta"}
    activations = embedding.recv_activations(travelled)
    embedding.send_gradients([torch.ones_like(a) for a in activations], (), travelled)


def test_another_batch_refuses_it() -> None:
    embedding, data = embedding_and_data()
    embedding.recv_activations(data)
    embedding.enqueue([torch.arange(4), torch.arange(4)])
    with pytest.raises(ValueError, match=rf"of batch {data.batch} given to the recv of batch {data.batch + 1}"):
        embedding.recv_activations(data)
