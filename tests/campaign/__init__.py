"""A fault campaign: kills, damaged and hostile files, and signals. Each trial is a real process
whose result is compared with an uninterrupted run.

    python -m tests.campaign --kills 1000 --rank_kills 100 --corruptions 240 --hostile --signals 200

Linux only: it forks, and reads /proc. See docs/guides/robustness.md.
"""
