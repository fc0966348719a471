"""Where state comes from and goes back to."""
