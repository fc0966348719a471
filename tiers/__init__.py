"""Where bytes live, and the engine that moves them."""
