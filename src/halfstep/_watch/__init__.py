"""A training that is looked at while it runs: a page in a terminal, lines elsewhere."""
