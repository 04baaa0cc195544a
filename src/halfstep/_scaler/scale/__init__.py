"""The scale of a loss: how it moves, as plain values and on a device."""
