"""Import and export: versions as safetensors, HDF5, torch or DCP files, and states read from such files."""
