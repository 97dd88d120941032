"""Runs on disk: commits of a whole step at every instant, saves that other libraries read.

In: a directory, the homes of a job, the user's optimizer and registered objects. Out: after any
crash, the run as it stood at the top of the loop. `Checkpointer` serves the job; `schemes` has the
two layouts of a store; `saving` and `exporting` write directories for other programs.
"""
