"""The logger of memfit: everything it logs goes through `logging.getLogger("memfit")`.

In: lines of text. Out: records, shown only where the program has set logging up
(`logging.basicConfig`). Plans, saves, exchanged plans and the end of a job are of level INFO, each
step and commit of level DEBUG; what the user must know is a warning or an error of its own, and not
in the log alone.
"""

from __future__ import annotations

import logging

LOG = logging.getLogger("memfit")
# A library leaves it to the program where records go.
LOG.addHandler(logging.NullHandler())
