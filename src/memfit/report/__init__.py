"""Output for people: the progress of a run (`progress`), the page of a step with its data (`page`).

In: results of steps; a `ReportSubject` (`subject`), which `job.reporting` puts together. Out: text,
HTML, JSON values. The tables of `memfit report` are in `cli.report_command`. Nothing here imports
torch.
"""
