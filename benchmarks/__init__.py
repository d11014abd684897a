"""Speed and memory against baselines and the limits of the machine; see README.md.

A package rather than a folder of scripts: next to a script, `operator.py` would shadow the standard
library's module.
"""
