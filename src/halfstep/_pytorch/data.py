"""Data loaders."""

from __future__ import annotations

from typing import Any

import torch.utils.data.dataloader

# The class whose ``__next__`` returns the batches of every DataLoader.
LOADER_ITERATOR: Any = torch.utils.data.dataloader._BaseDataLoaderIter
