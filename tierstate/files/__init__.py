"""Import and export: versions as safetensors or HDF5 files, states of other programs as versions, and
versions seen as files that are read by ranges (fsspec)."""
