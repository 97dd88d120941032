"""What a person sees: progress, tables, pictures.

In: results and timelines. Out: text. Nothing here imports torch.
"""
