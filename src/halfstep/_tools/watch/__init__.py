"""The watch of a training loop: which steps go bad, and what is replayed of them."""
