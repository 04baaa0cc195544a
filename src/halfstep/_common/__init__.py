"""Shared utilities: text, numbers, formats, nested values, random states, patches, machine."""
