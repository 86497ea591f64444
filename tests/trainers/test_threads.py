"""Who computes with how many threads."""

from tandem.flow.process import Process


def test_engines_that_generate_while_all_ranks_wait_share_the_threads_of_all():
    process = Process("cpu", 2, rank=0, world_size=4, shared_threads=8)
    assert process.generation_threads("colocate", 1) == 8
    assert process.generation_threads("colocate", 2) == 4 and process.generation_threads("colocate", 4) == 2
    assert process.generation_threads("decoupled", 1) == 2
    assert Process("cpu", 3).generation_threads("colocate", 1) == 3
