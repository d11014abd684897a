"""Models in the formats of others, to ours and back."""
