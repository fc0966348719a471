"""Adapters to training frameworks, one module each; a module imports its framework when it is imported itself."""
