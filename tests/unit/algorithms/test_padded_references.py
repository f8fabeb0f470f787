"""Every loss and advantage equals the padded form that one writes first."""

from __future__ import annotations

import pytest

from tests.padded_losses import SAME, cases, difference, tokens

BOTH = tokens(num_samples=32, mean_length=32)
CASES = cases(BOTH)


@pytest.mark.parametrize("case", CASES)
def test_a_result_equals_that_of_its_padded_reference(case: str) -> None:
    run_ours, run_reference = CASES[case]
    assert difference(run_ours(), run_reference(), BOTH.mask_BT) < SAME
