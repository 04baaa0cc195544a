"""Comparisons between versions of a model: ``tune``, ``self_check`` and ``compare``."""
