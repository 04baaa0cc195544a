"""What a training run was, step by step, in a file."""
