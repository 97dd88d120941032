"""Built-in training runs: an ordinary model, optimizer, schedule, loss and real text, all
unmodified torch objects.

In: a recipe's name. Out: a `Recipe`, whose parts are exactly what a user of PyTorch would write by
hand, so that the same objects train in a plain loop and under memfit. Text is the Python standard
library of the running interpreter; the byte-pair vocabulary was trained on it and lies in `data/`.
Nothing is downloaded. Needs the extra `memfit[transformers]`.
"""
