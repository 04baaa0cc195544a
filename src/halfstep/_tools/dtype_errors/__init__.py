"""Explanations of errors about dtypes."""
