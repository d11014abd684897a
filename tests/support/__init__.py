"""Helpers that several tests share. Tests import from here, never from another test or a conftest."""
