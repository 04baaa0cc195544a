"""The part of a saved scaler that is text, taken apart and put together."""

from __future__ import annotations

import json
from typing import Any


def opened(saved: dict[str, Any]) -> dict[str, Any]:
    return saved | {"halfstep": json.loads(saved["halfstep"])}


def closed(saved: dict[str, Any]) -> dict[str, Any]:
    return saved | {"halfstep": json.dumps(saved["halfstep"], sort_keys=True)}
