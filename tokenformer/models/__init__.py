"""Hugging Face models built of layers, their configurations, presets and accounting."""
