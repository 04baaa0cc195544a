"""Records of training runs: files with every step, written during training and read afterwards."""
