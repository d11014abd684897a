"""Speed and memory, side by side with rivals and with what the machine can do; see README.md.

A package, not a folder of scripts: beside a script, `operator.py` would take the place of the
standard library's.
"""
