"""A model that speaks: prompts that fit it, and a server with OpenAI's interface."""
