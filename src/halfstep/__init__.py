"""Automatic mixed precision for PyTorch that is safe, visible and editable."""

__version__ = "0.1.0.dev0"
