"""Finding gradients, and passing over them."""
