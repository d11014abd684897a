"""Evaluation: perplexity of any text, the standard benchmarks, the paper's figures beside them."""
