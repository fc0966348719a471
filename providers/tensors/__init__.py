"""Tensors and arrays: their bytes in row-major order, dtypes, lossy encodings, and host memory for new tensors."""
