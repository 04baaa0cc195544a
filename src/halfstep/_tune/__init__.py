"""Versions of a model beside each other: ``tune``, ``self_check`` and ``compare``."""
