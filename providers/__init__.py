"""State providers: they turn the values of a training state into chunks of bytes, and chunks back into values."""
