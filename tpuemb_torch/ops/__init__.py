"""TensorFlow's TPU embedding ops, by their names in snake_case, with their arguments in their order.

They work on one process-wide embedding layer, which `configure_tpu_embedding(config)` builds or `use(embedding)`
installs.  One process drives one core, as one process drives one GPU: per-core shapes are per-process shapes.
Signatures: TensorFlow 2.21's op registry (tensorflow/core/tpu/ops/tpu_embedding_ops.cc and
tensorflow/core/ops/tpu_embedding_ops.cc).
"""

from tpuemb_torch._requirements import require_torchrec

require_torchrec()

from tpuemb_torch.ops import parameters as _parameters  # noqa: E402
from tpuemb_torch.ops.activations import captured_gradients, tpu_embedding_activations  # noqa: E402
from tpuemb_torch.ops.all_parameters import (  # noqa: E402
    load_all_tpu_embedding_parameters,
    retrieve_all_tpu_embedding_parameters,
)
from tpuemb_torch.ops.deduplication import (  # noqa: E402
    DeduplicationTuple,
    compute_dedup_data_size,
    compute_dedup_data_size_v2,
    compute_dedup_data_tuple_mask,
    compute_dedup_data_tuple_mask_v2,
    merge_dedup_data,
    split_dedup_data,
)
from tpuemb_torch.ops.enqueue import (  # noqa: E402
    dynamic_enqueue_tpu_embedding_arbitrary_tensor_batch,
    dynamic_enqueue_tpu_embedding_ragged_tensor_batch,
    enqueue_tpu_embedding_arbitrary_tensor_batch,
    enqueue_tpu_embedding_batch,
    enqueue_tpu_embedding_integer_batch,
    enqueue_tpu_embedding_ragged_tensor_batch,
    enqueue_tpu_embedding_sparse_batch,
    enqueue_tpu_embedding_sparse_tensor_batch,
)
from tpuemb_torch.ops.parameters import *  # noqa: E402, F403
from tpuemb_torch.ops.steps import (  # noqa: E402
    recv_tpu_embedding_activations,
    send_tpu_embedding_gradients,
    xla_recv_tpu_embedding_activations,
    xla_recv_tpu_embedding_activations_v2,
    xla_recv_tpu_embedding_deduplication_data,
    xla_recv_tpu_embedding_deduplication_data_v2,
    xla_send_tpu_embedding_gradients,
    xla_send_tpu_embedding_gradients_v2,
)
from tpuemb_torch.ops.system import configure_tpu_embedding, is_tpu_embedding_initialized, use  # noqa: E402
from tpuemb_torch.ops.tuple_masks import serialize_tuple_mask  # noqa: E402

__all__ = [
    "DeduplicationTuple",
    "captured_gradients",
    "compute_dedup_data_size",
    "compute_dedup_data_size_v2",
    "compute_dedup_data_tuple_mask",
    "compute_dedup_data_tuple_mask_v2",
    "configure_tpu_embedding",
    "dynamic_enqueue_tpu_embedding_arbitrary_tensor_batch",
    "dynamic_enqueue_tpu_embedding_ragged_tensor_batch",
    "enqueue_tpu_embedding_arbitrary_tensor_batch",
    "enqueue_tpu_embedding_batch",
    "enqueue_tpu_embedding_integer_batch",
    "enqueue_tpu_embedding_ragged_tensor_batch",
    "enqueue_tpu_embedding_sparse_batch",
    "enqueue_tpu_embedding_sparse_tensor_batch",
    "is_tpu_embedding_initialized",
    "load_all_tpu_embedding_parameters",
    "merge_dedup_data",
    "recv_tpu_embedding_activations",
    "retrieve_all_tpu_embedding_parameters",
    "send_tpu_embedding_gradients",
    "serialize_tuple_mask",
    "split_dedup_data",
    "tpu_embedding_activations",
    "use",
    "xla_recv_tpu_embedding_activations",
    "xla_recv_tpu_embedding_activations_v2",
    "xla_recv_tpu_embedding_deduplication_data",
    "xla_recv_tpu_embedding_deduplication_data_v2",
    "xla_send_tpu_embedding_gradients",
    "xla_send_tpu_embedding_gradients_v2",
    *_parameters.__all__,
]
