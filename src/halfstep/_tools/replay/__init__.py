"""Replays of a step, op by op, and the search for the op to blame."""
