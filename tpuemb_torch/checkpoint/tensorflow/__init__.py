"""TensorFlow checkpoints, read and written without TensorFlow."""

from tpuemb_torch.checkpoint.tensorflow.read import CheckpointWarning, read_tensorflow
from tpuemb_torch.checkpoint.tensorflow.write import write_tensorflow

__all__ = ["CheckpointWarning", "read_tensorflow", "write_tensorflow"]
