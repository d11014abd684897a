"""Evaluation: perplexity, the paper's zero-shot benchmarks through lm-eval, image accuracy."""
