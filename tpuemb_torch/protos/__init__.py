"""TensorFlow's embedding protos and XLA's HLO protos, under this package's own proto package names.

Bytes, text and JSON are interchangeable with the originals; the descriptors are not, so both can be loaded
in one process.  The `_pb2` modules are written by `scripts/generate_protos`.
"""
