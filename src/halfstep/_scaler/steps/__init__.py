"""What happens to the gradients of one optimizer in one iteration."""
