"""Memory by owner, from counts of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlsys.config.memory_plan import (
    ForwardBytes,
    LinearBytes,
    Memory,
    ModelSizes,
    StepBytes,
    WorkerMemory,
    blocks_memory,
    frozen_memory,
    gigabytes,
    rank_memory,
    slots_memory,
    table_of,
)

SIZES = ModelSizes(
    parameters=1000, largest_layer=300, largest_matrix=100, outside=100, untied_head=40, vocabulary=10, heads=8,
    key_value_heads=2, cached=8,
)  # fmt: skip
STEP = StepBytes(
    activations=LinearBytes(0, 50), logits=LinearBytes(0, 60), layers=LinearBytes(0, 55), embeddings=LinearBytes(10, 1)
)
FORWARD = ForwardBytes(layers=LinearBytes(0, 5), logits=LinearBytes(7, 0))


def test_a_line_goes_through_its_points():
    line = LinearBytes.through((2, 30), (4, 50))
    assert (line.at(2), line.at(4), line.at(10)) == (30, 50, 110)


def test_one_float32_rank_has_its_state_and_no_buffers():
    memory = rank_memory(SIZES, STEP, shards=1, positions=100, value_bytes=4)
    assert memory == Memory(weights=4000, gradients=4000, optimizer=8000, activations=5000, logits=1000)
    assert memory.total == 22_000


def test_the_state_is_shared_by_the_ranks_and_buffers_are_not():
    few, many = (rank_memory(SIZES, STEP, shards=n, positions=10, value_bytes=2) for n in (2, 10))
    assert (few.weights, many.weights) == (2000, 400)
    assert few.buffers == pytest.approx(many.buffers, rel=0.2)
    assert many.buffers > 0


def test_a_stabilizer_counts_with_the_optimizer():
    memory = rank_memory(SIZES, STEP, shards=2, positions=1, value_bytes=4, stabilizer_bytes=4.0)
    assert memory.optimizer == (8 + 4) * 500


def test_a_reference_that_follows_the_policy_is_a_second_set_of_weights():
    without, with_one = (
        rank_memory(SIZES, STEP, shards=2, positions=1, value_bytes=2, keeps_reference=has) for has in (False, True)
    )
    assert with_one == replace(without, weights=2 * without.weights)


def test_a_critic_leaves_an_untied_head_out():
    critic = SIZES.without_head()
    assert (critic.parameters, critic.outside, critic.untied_head) == (960, 60, 0)


def test_a_frozen_model_has_weights_and_the_larger_phase():
    memory = frozen_memory(SIZES, FORWARD, positions=10, value_bytes=2)
    assert memory == Memory(weights=2000, activations=50)
    assert frozen_memory(SIZES, FORWARD, positions=1, value_bytes=2) == Memory(weights=2000, logits=7)


def test_slots_have_room_for_the_whole_context():
    memory = slots_memory(SIZES, FORWARD, positions=10, slots=4, context=100, value_bytes=2, versions=2)
    assert (memory.weights, memory.kv_cache) == (4000, 2 * 8 * 4 * 100)


def test_blocks_take_what_is_left_and_room_for_one_sequence_at_least():
    kwargs = {"positions": 10, "slots": 1, "context": 100, "value_bytes": 2, "shards": 2}
    roomy = blocks_memory(SIZES, FORWARD, **kwargs, granted=10_000)
    assert roomy.total == 10_000
    tight = blocks_memory(SIZES, FORWARD, **kwargs, granted=1_000)
    assert tight.kv_cache == 2 * 8 * 100 // 2
    assert tight.total > 1_000
    repeated = blocks_memory(SIZES, FORWARD, **kwargs | {"shards": 8}, granted=0)
    assert repeated.kv_cache == tight.kv_cache


def test_a_table_has_a_row_for_each_worker_and_a_column_for_each_owner():
    worker = WorkerMemory(
        name="actor rank", count=2, num_gpus=1.0, memory=Memory(weights=2 * 10**9, logits=10**8), limit=10**10
    )
    on_cpu = replace(worker, name="rollout", num_gpus=0.0, limit=None, remark="a remark")
    head, actor, rollout, remark = table_of([worker, on_cpu])
    assert head.split("  ")[0] == "GB on each device"
    assert actor.split() == ["actor", "rank", "2", "2.0", "-", "-", "-", "0.1", "-", "-", "2.1", "10.0"]
    assert rollout.split()[-2:] == ["2.1", "-"]
    assert remark == "rollout: a remark"


def test_a_shortage_names_the_owners_that_take_most():
    memory = Memory(weights=2 * 10**9, logits=3 * 10**9)
    worker = WorkerMemory(name="actor rank", count=2, num_gpus=1.0, memory=memory, limit=10**9)
    assert not worker.fits
    assert worker.shortage() == "actor rank: 5.0 GB of 1.0 GB; logits 3.0 GB, weights 2.0 GB"


def test_bytes_are_written_in_a_fitting_unit():
    assert (gigabytes(8e10), gigabytes(3.5e6)) == ("80.0 GB", "3.5 MB")
