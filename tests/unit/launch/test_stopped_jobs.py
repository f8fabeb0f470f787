"""What a job that was stopped has printed of its end."""

import pytest

from rlsys.errors import NOT_SAVED
from rlsys.launch.submission import has_trained, tells_saved

STEPS = "step 6/10  0:01 left\nstep 7/10  0:01 left\n"


@pytest.mark.parametrize(
    ("end", "is_saved"),
    [
        ("rlsys: interrupted after step 7, which is saved; go on with run.resume=auto\n", True),
        ("rlsys: interrupted before the first step\n", True),
        (f"rlsys: interrupted after step 7, {NOT_SAVED}; step 5 is; go on with run.resume=auto\n", False),
        (f"rlsys: interrupted a after step 7, which is saved, b after step 7, {NOT_SAVED}; no step is\n", False),
        ("", False),
        ("rlsys: disk full\nstep 5 is saved; go on with run.resume=auto\n", False),
    ],
)
def test_a_stopped_job_counts_as_saved_only_if_it_says_so(end: str, is_saved: bool) -> None:
    assert tells_saved(STEPS + end) == is_saved


@pytest.mark.parametrize(
    ("printed", "is_so"),
    [
        (STEPS, True),
        ("   7.3 s  start up\nsums: step  2/10  0:09 left\n", True),
        ("", False),
        ("rlsys: model.path: /nowhere does not exist\n", False),
        ("step 5 is done, and the run ends at step 5\n", False),
    ],
)
def test_a_job_has_trained_once_it_shows_a_step(printed: str, is_so: bool) -> None:
    assert has_trained(printed) == is_so
