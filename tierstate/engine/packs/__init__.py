"""Packs: objects of many encoded chunks, their keys, their layout in memory, and other file formats for them."""
