"""Diagnosis of a step that went bad: the op, the module, the line, the cause and the cure."""
