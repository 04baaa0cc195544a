"""Ops that presets name and that not every version of PyTorch has: what tests must do without."""

from torch.torch_version import TorchVersion
from torch.version import __version__

CAME_WITH = {"linalg_matrix_sqrth": "2.14", "linalg_polar": "2.14"}
LEFT_WITH = {"cholesky": "2.14", "qr": "2.14"}

VERSION = TorchVersion(__version__)


def has_op(name: str) -> bool:
    """Return whether this version has ``torch.ops.aten.<name>``, if any of those tested has."""
    came, left = CAME_WITH.get(name), LEFT_WITH.get(name)
    return (came is None or came <= VERSION) and (left is None or left > VERSION)
