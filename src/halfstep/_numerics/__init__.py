"""Number formats, and the statistics of tensors."""
