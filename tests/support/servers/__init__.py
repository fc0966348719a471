"""Real servers on the loopback interface, and a proxy that breaks what passes through it."""
