"""What `policy check --live` does: each tier is opened in a process of its own, tested and measured."""
