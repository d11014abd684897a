"""Helpers shared by tests. Tests import from here, never from another test or a conftest."""
