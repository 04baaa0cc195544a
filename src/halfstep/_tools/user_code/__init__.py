"""Lines of the user's code, and what its functions refer to."""
