"""Without what torch says about itself while it traces: our own errors say it in the user's words."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """No warnings, no messages of torch's loggers, and not the half of a graph that export prints before it fails.

    What the model itself prints comes out, on stderr after the fact.
    """
    loggers = [logging.getLogger(n) for n in list(logging.root.manager.loggerDict) if n.startswith("torch")]
    loggers = [logger for logger in loggers if not logger.disabled]
    printed = io.StringIO()
    dropped = ""
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not dropped:
            dropped = f"{getattr(found, 'partial_fx_graph', '')}\n".strip("\n")
            found = found.__cause__ or found.__context__
        raise
    finally:
        for logger in loggers:
            logger.disabled = False
        text = printed.getvalue()
        text = text.replace(dropped, "").strip("\n") if dropped else text
        if text:
            print(text, file=sys.stderr, end="" if text.endswith("\n") else "\n")
