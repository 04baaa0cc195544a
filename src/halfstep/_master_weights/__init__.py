"""Training of parameters in bfloat16 or float16 without losing updates."""
