"""Does what a schedule says, with real tensors.

In: blocks of weights, call sites, an optimizer, a schedule and a plan. Out: the step: gradients and updates as plain PyTorch makes them, with
every tensor in its home between uses. Nothing here plans or predicts.
"""
