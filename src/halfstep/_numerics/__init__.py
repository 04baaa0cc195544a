"""What numbers look like in a format, and what there is in a tensor."""
