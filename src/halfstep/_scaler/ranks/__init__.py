"""Several ranks: who decides a step together, and how they come to one answer."""
