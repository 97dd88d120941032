"""Batches and how they are cut into microbatches.

In: a sample batch, a loss. Out: the rule that cuts such batches, what each part counts for, and the
proof that the loss of the whole is the weighted sum of the losses of its parts.
"""
