"""Text generation and the OpenAI-compatible server."""
