"""Prepared text corpora and image sets; batches are a pure function of seed and sample index."""
