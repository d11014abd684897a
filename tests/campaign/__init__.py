"""A fault campaign: training runs that are killed, checkpoints that are damaged, hostile files and
signals, each trial a real process whose result is compared with an undisturbed one.

    python -m tests.campaign --kills 1000 --rank_kills 100 --corruptions 240 --hostile --signals 200

Linux only: it forks, and reads /proc. See docs/guides/robustness.md.
"""
