"""Every table and figure of the paper as a command, on one shared runner.

    python -m experiments                       # list the exhibits with their state and cost
    python -m experiments run theta_ablation    # run one; interrupt it and start again to resume
    python -m experiments run --scale smoke     # a few steps of every run, to see that all work

Read `job` (what is computed once and recorded), `runner` (how jobs are computed), `language` (the
job that trains a language model), `exhibit` (what a table or figure provides), then any folder.
"""
