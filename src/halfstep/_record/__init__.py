"""Records of training runs: files with every step, how they are written and read."""
