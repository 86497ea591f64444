"""Time by phase, on rates that make it countable by hand, and against tables that others published."""

import math
from pathlib import Path

import pytest

from tandem.config.backend import Layout
from tandem.config.errors import ConfigError
from tandem.models.shape import Shape
from tandem.planning.batches import MicroBatch, cut_step
from tandem.planning.cost import Cost
from tandem.planning.devices import DEVICES, MATMUL, device
from tandem.planning.generating import decode, prefill, publishing
from tandem.planning.layers import head, layers_backward, layers_forward
from tandem.planning.plan import make_plan
from tandem.planning.planned_model import PlannedModel
from tandem.planning.seconds import optimizer, phases, updating
from tandem.planning.threads import of_one_process
from tests.trainers.planning import HAND, LLAMA_8B, generator, held, job, round_machine

BATCH = MicroBatch(((8, 2), (8, 2)), 4)
"""2 · (8 + 2 · 4) = 32 tokens, 16 of them predicted."""

A100 = device("a100", 64)
LLAMA2_13B = Shape("llama", 40, 5120, 13824, 40, 40, 128, 32000, 4096)
LLAMA2_70B = Shape("llama", 80, 8192, 28672, 64, 8, 128, 32000, 4096)
LLAMA3_70B = Shape("llama", 80, 8192, 28672, 64, 8, 128, 128256, 8192)


def part(cost, name):
    """Seconds of one part."""
    return dict(cost.parts).get(name, 0.0)


def test_a_forward_pass_by_hand():
    cost = layers_forward(HAND, BATCH, "float32", round_machine())

    assert part(cost, "matrix products") == pytest.approx(2 * 2 * 32 * 1200 / 1e9)
    pairs = 2 * (8 * 8 / 2 + 2 * 4 * (8 + 4))  # two prompts; completions against their prompt and themselves
    assert part(cost, "attention") == pytest.approx(2 * 4 * pairs * 10 / 1e9)
    assert part(cost, "memory bandwidth") == 0


def test_a_backward_pass_is_two_forward_ones_and_checkpointing_a_third():
    forward, backward, again = (
        layers_forward(HAND, BATCH, "float32", round_machine()),
        layers_backward(HAND, BATCH, "float32", round_machine()),
        layers_backward(HAND, BATCH, "float32", round_machine(), recompute=1.0),
    )

    products = part(forward, "matrix products")
    assert part(backward, "matrix products") == pytest.approx(2 * products)
    assert part(again, "matrix products") == pytest.approx(3 * products)
    assert part(backward, "attention") == pytest.approx(2.5 * part(forward, "attention"))


def test_the_head_computes_its_logits_twice():
    forward, backward = (
        head(HAND, BATCH, "float32", round_machine(), backward=flag, entropy=False) for flag in (False, True)
    )

    assert part(forward, "matrix products") == pytest.approx(2 * 16 * 1000 / 1e9)
    assert part(backward, "matrix products") == pytest.approx(3 * 2 * 16 * 1000 / 1e9)


def test_the_optimizer_passes_over_memory():
    cost = optimizer(held(), round_machine(stream=1e9), micro_batches=1)

    assert cost.parts == (("memory bandwidth", pytest.approx(HAND.parameters() * 64 / 1e9)),)


def test_prompts_are_computed_once_and_completions_drawn_token_by_token():
    run = job(generator=generator(sequences=4))
    machine = round_machine(stream=1e12)

    begin, prompt_tokens = prefill(run, run.generator, machine)
    draw, tokens = decode(run, run.generator, machine)

    assert (prompt_tokens, tokens) == (16, 16)
    assert part(begin, "matrix products") == pytest.approx((2 * 16 * 2 * 1200 + 2 * 2 * 1000) / 1e9)
    assert part(draw, "matrix products") == pytest.approx(4 * (2 * 4 * 2 * 1200 + 2 * 4 * 1000) / 1e9)
    keys = 4 * 4 / 2 + 8 * 4 / 2  # of half a completion each, and the prompt's once for two samples
    assert part(draw, "attention") == pytest.approx(4 * 4 * 2 * 5 * keys * 2 / 1e9)


def test_a_step_of_decoding_reads_all_weights_however_few_sequences_there_are():
    run = job(generator=generator(sequences=4))

    draw, _ = decode(run, run.generator, round_machine(packed_matmul={"float32": ((1, 1e15),)}, stream=1e9))

    assert part(draw, "matrix products") == pytest.approx(4 * (2 * 1200 + 1000) * 4 / 1e9)


def test_an_operation_of_the_engine_takes_what_was_measured_in_it():
    run = job(generator=generator())
    as_elsewhere, measured = (
        decode(run, run.generator, round_machine(operation_s=1e-6, engine_operation_s=seconds))[0] for seconds in (0.0, 5e-6)
    )

    assert part(as_elsewhere, "operations") > 0
    assert part(measured, "operations") == pytest.approx(5 * part(as_elsewhere, "operations"))
    assert part(measured, "matrix products") == part(as_elsewhere, "matrix products")


def test_fewer_places_than_samples_take_more_steps():
    wide, narrow = (
        decode(run, run.generator, round_machine(operation_s=1e-3))[0]
        for run in (job(generator=generator(sequences=4, max_running=n)) for n in (4, 2))
    )

    assert part(narrow, "operations") == pytest.approx(2 * part(wide, "operations"))


def test_publishing_hashes_at_both_ends():
    run = job(generator=generator())

    sent = 4 * HAND.parameters()
    assert part(publishing(run, run.generator, round_machine(threads=2)), "digests") == pytest.approx(1.5 * sent / 1e9)


def test_asynchronous_training_and_generation_share_the_threads_and_the_time():
    lock_step = make_plan(job(generator=generator()), round_machine())
    side_by_side = make_plan(job(generator=generator(own_process=True), asynchronous=True), round_machine())

    assert side_by_side.generate_s == pytest.approx(2 * lock_step.generate_s, rel=1e-6)
    assert side_by_side.step_s == pytest.approx(max(side_by_side.generate_s, side_by_side.train_s) + side_by_side.publish_s)
    assert lock_step.step_s == pytest.approx(sum(phase.seconds for phase in lock_step.phases))


def test_a_critic_and_a_reference_are_phases_of_their_own():
    run = job(held(), held("critic", head="scalar"), held("reference", trained=False), generator=generator(), proximal=True)

    names = [phase.name for phase in phases(run, round_machine())]
    assert names == [
        "prefill", "decode", "proximal", "values", "reference", "update: actor", "update: critic", "publish",
    ]  # fmt: skip


def test_fitted_factors_multiply_their_phase_alone():
    run = job(generator=generator())
    plain, fitted = make_plan(run, round_machine()), make_plan(run, round_machine(factors={"update": 2.0}))

    assert fitted.train_s == pytest.approx(2 * plain.train_s) and fitted.generate_s == plain.generate_s


def test_what_is_fitted_of_rows_is_for_runs_that_generate_nothing():
    rows, generated = job(held(), held("reference", trained=False)), job(generator=generator())

    def train_s(run, **factors):
        return make_plan(run, round_machine(factors=factors)).train_s

    of_rows = {"update of rows": 3.0, "score of rows": 3.0}
    assert train_s(rows, **of_rows) == pytest.approx(3 * train_s(rows)) and train_s(rows, update=2.0) == train_s(rows)
    assert train_s(generated, **of_rows) == train_s(generated)


def test_ranks_on_gpus_share_the_work_and_hide_the_exchange_behind_it():
    machine = round_machine(kind="gpu", count=2, overlaps=True, link=1e12)
    one, two = (make_plan(job(held(ranks=n), groups=4), machine) for n in (1, 2))

    assert two.train_s == pytest.approx(one.train_s / 2, rel=1e-3)
    slow = make_plan(job(held(ranks=2), groups=4), round_machine(kind="gpu", count=2, overlaps=True, link=1e3))
    assert slow.bottleneck.cost.bound == "communication"


def test_rates_between_measured_rows_lie_between_the_measured_rates():
    machine = round_machine(matmul={"float32": ((1, 1e9), (100, 1e11))})

    assert machine.rate("float32", 1) == 1e9 and machine.rate("float32", 1000) == 1e11
    assert machine.rate("float32", 10) == pytest.approx(1e10)


def test_a_process_of_one_thread_has_back_what_threads_lose_to_each_other():
    machine = round_machine(threads=4, threading=0.5)
    rates = {share: machine.using(share).matmul["float32"][0][1] for share in (1.0, 0.5, 0.25)}
    assert rates == pytest.approx({1.0: 1e9, 0.5: 0.5e9 / 0.5**0.5, 0.25: 0.25e9 / 0.5})
    assert round_machine(threads=1).using(0.5).matmul["float32"][0][1] == pytest.approx(0.5e9)


def test_a_fit_with_all_threads_counts_less_with_fewer_and_not_at_all_with_one():
    machine = round_machine(threads=4, factors={"update": 4.0})
    assert [machine.using(share).factors["update"] for share in (1.0, 0.5, 0.25)] == pytest.approx([4.0, 2.0, 1.0])

    def update_s(ranks, factors):
        plan = make_plan(job(held(ranks=ranks), groups=4), round_machine(threads=2, factors=factors))
        return plan.train_s

    assert update_s(1, {"update of rows": 3.0}) == pytest.approx(3 * update_s(1, {}))
    assert update_s(2, {"update of rows": 3.0}) == pytest.approx(update_s(2, {}))


@pytest.mark.slow
def test_threads_of_one_process_are_no_faster_than_processes_of_one_thread():
    assert 0.2 < of_one_process(2) <= 1.0 and of_one_process(1) == 1.0


def test_a_machine_survives_its_file():
    machine = round_machine(identity={"cpu": "x"}, factors={"update": 1.5}, link=math.inf)

    assert type(machine).from_json(machine.to_json()) == machine
    with pytest.raises(ValueError, match="other fields"):
        type(machine).from_json({"name": "x"})


def test_costs_add_up_and_name_what_binds_them():
    cost = Cost((("attention", 1.0), ("digests", 2.0))) * 2

    assert cost.seconds == 6.0 and cost.bound == "digests"


def test_every_device_has_sources_and_dense_peaks():
    for row in DEVICES.values():
        assert row.sources and row.bfloat16_tflops / row.float32_tflops <= 30 and 0.5 <= row.matmul < 1
    with pytest.raises(ConfigError, match=r"--device h20 is not in the table; did you mean 'h200'\?"):
        device("h20")


def dense_step(shape, *, length, sequences, ranks, machine, recompute):
    """One optimizer step of supervised training on whole sequences, every token predicted. ``sequences``: of each rank.
    ``recompute``: the share of the forward pass that is done again."""
    most = length * sequences
    step = cut_step(sequences, 1, 0, length, most=most)
    model = PlannedModel(
        role="actor",
        shape=shape,
        head="lm",
        dtype="bfloat16",
        layout=Layout(data=ranks),
        trained=True,
        max_tokens=most,
        chunk_tokens=1024,
    )
    return updating(model, step, machine, recompute=recompute)


def predicted_rate(shape, length, sequences, recompute):
    """Tokens a second of one GPU of 64."""
    step = dense_step(shape, length=length, sequences=sequences, ranks=64, machine=A100, recompute=recompute)
    return length * sequences / step.seconds


@pytest.mark.parametrize(
    ("shape", "length", "sequences", "recompute", "published"),
    [
        pytest.param(LLAMA2_13B, 4096, 2, 0.0, 2162, id="Llama 2 13B, nothing recomputed (fitted)"),
        pytest.param(LLAMA2_70B, 4096, 2, 1.0, 353, id="Llama 2 70B, all recomputed"),
        pytest.param(LLAMA3_70B, 8192, 1, 1.0, 331, id="Llama 3 70B, all recomputed"),
        pytest.param(LLAMA_8B, 8192, 1, 0.5, 2973, id="Llama 3 8B, half recomputed"),
    ],
)
def test_torchtitans_tokens_a_second_on_64_a100(shape, length, sequences, recompute, published):
    """docs/performance.md of torchtitan: FSDP2, bfloat16, 64 A100 of 80 GB; tokens a second and GPU."""
    assert predicted_rate(shape, length, sequences, recompute) == pytest.approx(published, rel=0.2)


def test_torchtitans_tokens_a_second_on_8_h100():
    """benchmarks/llama3_h100_202412_torchtitan.md: FSDP2, not compiled, on the machines that it states."""
    machine = device("h100-hbm2e", 8)
    step = dense_step(LLAMA_8B, length=8192, sequences=2, ranks=8, machine=machine, recompute=0.5)

    assert 2 * 8192 / step.seconds == pytest.approx(5762, rel=0.2)


def test_the_page_shows_the_table_of_devices():
    page = (Path(__file__).resolve().parents[2] / "docs/planning.md").read_text()
    for name, row in DEVICES.items():
        best = "75 %, assumed" if row.matmul == MATMUL else f"{row.matmul * 100:.1f} %"
        read = ", ".join(f"[{i}]({source})" for i, source in enumerate(row.sources, 1))
        assert (
            f"| `{name}` | {row.memory_gb:g} GB, {row.memory_gib:g} GiB "
            f"| {row.bfloat16_tflops:g} TFLOP/s | {row.float32_tflops:g} TFLOP/s "
            f"| {row.bandwidth_gb_s:g} GB/s | {row.link_gb_s:g} GB/s | {best} | {read} |"
        ) in page
