"""How many threads torch computes on is a test's own matter."""

import pytest
import torch

AT_FIRST = torch.get_num_threads()


@pytest.mark.parametrize("threads", [AT_FIRST + 1, AT_FIRST + 2])
def test_a_test_that_changes_the_number_of_threads_leaves_the_next_one_what_it_had(threads):
    assert torch.get_num_threads() == AT_FIRST
    torch.set_num_threads(threads)
