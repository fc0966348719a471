"""A state as a tree of leaves: walked and flattened for a save, compared, tied and rebuilt for a restore."""
