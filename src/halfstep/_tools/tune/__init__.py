"""Comparisons between versions of a model: ``tune`` and ``self_check``."""
