"""Connections between the processes of one job, which prove to each other that they belong to it."""
