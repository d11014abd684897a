"""Converting models from other formats to ours and back."""
