"""Growth: pure functions from a model and a plan to a larger model and a report."""
