"""What a checkpoint holds of the rollouts comes back token for token; what was in flight does not."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_groups import play

from rose_hpc.errors import EnvironmentFault, RunFailed
from rose_hpc.rollout.groups import Group, new_group
from rose_hpc.rollout.saved_rollouts import RolloutFiles, SavedRollouts, restored, saved_group
from rose_hpc.rollout.trajectories import State

OWN = ("token_ids", "loss_mask", "rollout_logprobs", "policy_versions", "reward", "success", "failure", "state", "turns", "sampled_tokens")


def there_and_back(group: Group) -> Group:
    raw = msgspec.msgpack.encode(SavedRollouts(9, [saved_group(group)], []))
    (saved,) = msgspec.msgpack.decode(raw, type=SavedRollouts).running
    return restored(saved, run_seed=3, groups=2, size=len(group.trajectories))


def test_a_group_comes_back_and_what_was_in_flight_is_new():
    group = new_group(5, 3, 2, 4)
    play(group, 0, 1.0, versions=(2, 3), turns=3)
    play(group, 2, None, turns=2)
    in_flight = group.trajectories[1]
    in_flight.open([1])
    in_flight.start_turn("engine-0", in_flight.next_request_id())
    group.turns.append(replace(group.turns[0], trajectory=1))
    back = there_and_back(group)
    assert (back.serial, back.seed, back.end_s) == (5, group.seed, {0: 100.0, 2: 102.0})
    for index in (0, 2):
        assert [getattr(back.trajectories[index], n) for n in OWN] == [getattr(group.trajectories[index], n) for n in OWN]
    assert [back.trajectories[i].state for i in (1, 3)] == [State.CREATED] * 2 and back.trajectories[1].token_ids == []
    assert back.turns == [t for t in group.turns if t.trajectory != 1] and len(back.turns) == 5


def test_a_trajectory_that_failed_before_its_first_token_comes_back_failed():
    group = new_group(0, 3, 2, 2)
    group.trajectories[0].fail("its environment hung")
    group.end_s[0] = 7.0
    back = there_and_back(group)
    assert (back.trajectories[0].failure, back.trajectories[0].token_ids) == ("its environment hung", [])


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9), st.one_of(st.none(), st.floats(-5, 5))), min_size=2, max_size=5))
def test_any_ended_group_comes_back_equal(episodes):
    group = new_group(1, 3, 2, len(episodes))
    for index, (turns, version, reward) in enumerate(episodes):
        play(group, index, reward, versions=(version, version + 1), turns=turns)
    back = there_and_back(group)
    assert [[getattr(t, n) for n in OWN] for t in back.trajectories] == [[getattr(t, n) for n in OWN] for t in group.trajectories]
    assert back.turns == group.turns and back.is_over


def test_files_of_the_newest_steps_are_kept_and_what_is_loaded_is_what_was_saved(tmp_path):
    files = RolloutFiles(tmp_path / "rollouts", kept=2)
    for step in (10, 20, 30):
        files.save(step, SavedRollouts(step, [], []))
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["step-000020.msgpack", "step-000030.msgpack"]
    assert files.load(20).next_serial == 20
    files.save(20, SavedRollouts(21, [], []))  # resumed from 10's successor: 30 is of the attempt before, and will be written again
    assert files.load(20).next_serial == 21


def test_a_file_that_is_missing_or_cut_short_is_explained(tmp_path):
    files = RolloutFiles(tmp_path, kept=2)
    with pytest.raises(RunFailed, match="checkpoint at step 3 cannot be read") as missing:
        files.load(3)
    assert "remove checkpoints/step-000003" in str(missing.value)
    files.save(3, SavedRollouts(4, [], []))
    path = tmp_path / "step-000003.msgpack"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunFailed, match="cannot be read"):
        files.load(3)


def test_a_folder_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot save the rollouts"):
        RolloutFiles(tmp_path / "file" / "rollouts", kept=2).save(1, SavedRollouts(4, [], []))


def test_rollouts_of_another_format_are_refused(tmp_path):
    files = RolloutFiles(tmp_path, 2)
    files.save(1, SavedRollouts(3, [], [], format="rose_hpc.rollouts/2"))
    with pytest.raises(RunFailed, match="rollouts/2"):
        files.load(1)
