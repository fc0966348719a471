"""Import and export: versions as safetensors, HDF5, torch or DCP files, states read from such files, and
versions seen as files that are read by ranges (fsspec)."""
