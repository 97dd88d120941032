"""Output for people: progress, tables, pictures.

In: results and timelines. Out: text. Nothing here imports torch.
"""
