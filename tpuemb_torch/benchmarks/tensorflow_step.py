"""The embedding step by TensorFlow on the CPU: a `tf.function` of raw operations, as a trainer without a TPU has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpuemb_torch.benchmarks.implementations import ACCUMULATOR, RATE, Batch, Implementation
from tpuemb_torch.benchmarks.workloads import Workload


class TensorFlow(Implementation):
    """`tf.nn.embedding_lookup_sparse`, `unsorted_segment_sum` over the distinct ids, and TensorFlow's sparse apply."""

    def __init__(self, workload: Workload, optimizer: str) -> None:
        import tensorflow as tf

        self.tf = tf
        tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
        self.adagrad = optimizer.startswith("adagrad ")
        self.tables = [tf.Variable(tf.random.uniform((rows, workload.dim), -0.1, 0.1)) for rows in workload.rows]
        self.slots = [tf.Variable(tf.fill(table.shape, ACCUMULATOR)) for table in self.tables] if self.adagrad else []
        self._look_up = tf.function(self._sums)
        self._train = tf.function(self._apply)

    def load(self, batch: Batch) -> None:
        tf = self.tf
        self._sparse, self._gradients = [], []
        for ids, offsets, gradient in batch.per_feature():
            bags = gradient.shape[0]
            bag = torch.repeat_interleave(torch.arange(bags), offsets.diff())
            place = torch.arange(ids.numel()) - offsets[:-1][bag]
            indices = torch.stack([bag, place], dim=1).numpy()
            self._sparse.append(tf.SparseTensor(indices, ids.numpy(), (bags, int(offsets.diff().max()))))
            self._gradients.append(tf.constant(gradient.numpy()))

    def forward(self) -> None:
        for value in self._look_up(self._sparse):
            value.numpy()

    def backward(self) -> None:
        self._train(self._sparse, self._gradients)

    def weights(self, table: int) -> Tensor:
        return torch.from_numpy(self.tables[table].numpy())

    def _sums(self, sparse: list[Any]) -> list[Any]:
        lookup = self.tf.nn.embedding_lookup_sparse
        return [lookup(table, ids, None, combiner="sum") for table, ids in zip(self.tables, sparse, strict=True)]

    def _apply(self, sparse: list[Any], gradients: list[Any]) -> None:
        tf = self.tf
        for index, (ids, gradient) in enumerate(zip(sparse, gradients, strict=True)):
            distinct, place = tf.unique(ids.values)
            per_id = tf.gather(gradient, ids.indices[:, 0])
            folded = tf.math.unsorted_segment_sum(per_id, place, tf.size(distinct))
            if self.adagrad:
                tf.raw_ops.ResourceSparseApplyAdagradV2(
                    var=self.tables[index].handle,
                    accum=self.slots[index].handle,
                    lr=RATE,
                    epsilon=0.0,
                    grad=folded,
                    indices=distinct,
                )
            else:
                self.tables[index].scatter_sub(tf.IndexedSlices(RATE * folded, distinct))
