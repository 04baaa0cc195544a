"""The live view of a training: a page in a terminal, plain lines elsewhere."""
