"""Each framework's own checkpointing beside ours in it: the same training, the same points of saving."""
