"""Who computes with how many threads."""

from tandem.flow.process import Process


def test_an_engine_that_generates_while_all_ranks_wait_has_the_threads_of_all():
    process = Process("cpu", 2, rank=0, world_size=4, shared_threads=8)
    assert process.generation_threads("colocate", 1) == 8
    assert process.generation_threads("decoupled", 1) == 2
    assert Process("cpu", 3).generation_threads("colocate", 1) == 3
