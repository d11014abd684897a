"""Converting pretrained Transformers to TokenFormers."""
