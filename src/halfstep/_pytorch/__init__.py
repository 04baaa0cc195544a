"""Every private name of PyTorch that halfstep uses, by the parts of PyTorch.

When a new PyTorch moves one of these, this is the only folder to change. docs/versions.md says what
was run with which version, and what differs.
"""
