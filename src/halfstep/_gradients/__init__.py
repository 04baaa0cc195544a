"""Gradients of an optimizer's parameters: found, unscaled, checked and measured.

It knows no scaler: a multiplier is a number that the caller gives.
"""
