"""Shared utilities: text, numbers, JSON, nested values, random states, patches, machine."""
