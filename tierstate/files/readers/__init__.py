"""Readers of other programs' files: safetensors, HDF5, torch, DCP, DeepSpeed and Megatron, as states read lazily."""
