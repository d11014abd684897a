"""Evaluation: perplexity on prepared shards or raw text."""
