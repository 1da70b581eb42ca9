"""The plug into TorchRec; every private name of TorchRec that the package relies on is in this folder.

The plan keeps TorchRec's compute kernel "fused"; the classes here put `TableBatchedEmbedding` where TorchRec would
build FBGEMM's.
"""

from tpuemb_torch.sharding.torchrec.collection import ShardedTPUEmbeddingBagCollection
from tpuemb_torch.sharding.torchrec.sharder import TPUEmbeddingSharder

__all__ = ["ShardedTPUEmbeddingBagCollection", "TPUEmbeddingSharder"]
