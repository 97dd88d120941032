"""Output for people: so far the progress of a run (`progress`).

In: results of steps. Out: text. The tables of `memfit report` are in `cli.report_command`. Nothing
here imports torch.
"""
