"""Every private name of PyTorch that halfstep uses, grouped by PyTorch's parts.

If a new PyTorch version moves one of them, only this folder changes. docs/versions.md lists what
was tested with which version, and the differences.
"""
