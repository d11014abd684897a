"""Corpora: text as arrays of token ids, and batches as a pure function of seed and step."""
