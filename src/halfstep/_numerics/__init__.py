"""Number formats, and values of tensors."""
