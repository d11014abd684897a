"""Training: options, the loop, its progress display and the picture of its loss."""
