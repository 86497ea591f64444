"""What a server's client did not expect is the server's fault, never the prompt's."""

from tandem.engines.inference.fleet.members import ServerState
from tests.fleet.fleets import Unwell, ask, engine, fleet_of, generate, healthy, rows, server, until
from tests.tiny import tiny_model_folder


class Odd(Unwell):
    """An engine whose client stumbles over answers while ``stumbles``."""

    stumbles = False

    async def agenerate(self, request):
        response = await super().agenerate(request)
        return response.no_such_field if self.stumbles else response


def test_an_answer_over_which_the_client_stumbles_moves_the_request(tmp_path):
    folder, journal = tiny_model_folder(tmp_path), tmp_path / "fleet.jsonl"
    engines = [Odd(engine(folder)) for _ in range(2)]
    fleet = fleet_of([server(f"s{i}", lambda i=i: engines[i]) for i in range(2)], journal=journal)
    until(lambda: len(healthy(fleet)) == 2)
    asked = engines[0].asked
    engines[0].stumbles = True
    answers = generate(fleet, [ask(i) for i in range(8)])
    fleet.close()

    assert engines[0].asked > asked, "it had some of them"
    assert [len(answer.output_ids) for answer in answers] == [12] * 8
    trouble = [row for row in rows(journal) if row["to"] in (ServerState.SUSPECT, ServerState.FENCED)]
    assert trouble[0]["server"] == "s0" and "AttributeError" in trouble[0]["why"]
