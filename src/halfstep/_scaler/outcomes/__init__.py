"""What became of the steps, and who is told."""
