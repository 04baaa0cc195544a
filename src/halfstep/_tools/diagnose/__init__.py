"""Diagnosis of a bad step: the op, the module, the line, the cause and the cure."""
