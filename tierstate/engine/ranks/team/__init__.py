"""The team of ranks: how they find each other, exchange messages and a secret, and notice that one of them is dead."""
