"""Errors of requests to the reader; the server sends them as a status code and a text."""

from __future__ import annotations

from rlsys.errors import RlsysError


class NoSuch(RlsysError):
    """The run, step, group or episode does not exist, or was not written. Names it, and the available ones."""


class BadRequest(RlsysError):
    """A request is invalid. Names the parameter."""


class BadQuery(BadRequest):
    """A query of `rlsys.dashboard.index.sql_query` that cannot be answered. Names the place, or the nearest column."""

    exit_code = 2
