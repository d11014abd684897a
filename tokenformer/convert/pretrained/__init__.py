"""Pretrained Transformers to TokenFormers."""
