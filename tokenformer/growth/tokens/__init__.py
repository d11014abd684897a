"""Growing a TokenFormer by its parameter tokens; pruning, merging and taking prefixes of them."""
