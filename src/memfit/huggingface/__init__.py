"""Knowledge of transformers: caches of keys and values, causal losses, layouts of files, vision
batches.

In: models, caches and files as transformers makes them, looked at through the modules that the
user's program has loaded.
Out: the same numbers with less memory. transformers itself is never imported here.
"""
