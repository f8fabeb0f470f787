"""What the reader refuses to answer; the server tells it as a status code and the text."""

from __future__ import annotations

from rlsys.errors import RlsysError


class NoSuch(RlsysError):
    """There is no such run, step, group or episode, or nothing of it was written. Says which, and what there is."""


class BadRequest(RlsysError):
    """What was asked for makes no sense. Names the parameter."""
