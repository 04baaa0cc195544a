"""Replays of a step, op by op, and the search for the op to blame."""

NO_END = (
    "the step called no backward and returned no tensor: it was judged by its ops alone; return "
    "the loss, or what the step computes"
)
ABSORBED = (
    "what the step returns is finite: inf and NaN are replaced on the way, as by nan_to_num, "
    "clamp, or a cast to integers, which makes 0 of NaN"
)
LEFT_GRADIENTS = (
    "gradients were inf or NaN before the replay, and cures were tried without them; if an earlier "
    "step has left them, call zero_grad()"
)
