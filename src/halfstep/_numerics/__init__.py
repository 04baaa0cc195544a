"""Number formats and tensor statistics."""
