"""One run, every format: the same tokens train, with the same logprobs, rewards and groups, whatever a trainer calls them."""

import json

import pytest
from msgspec.structs import replace

from rollyard.store.exports.lines import read_sample, sample_line
from rollyard.train.adapters import openrlhf, skyrl, slime, tinker, trl, verl
from rollyard.train.adapters.areal import tensors
from rollyard.train.formats import FORMATS, write_rows
from rollyard.trajectory.samples import samples
from tests.train.rollouts import branchy, linear, unscored
from tests.train.test_adapters_golden import token_rows

ROLLOUTS = [linear(), branchy(), replace(linear(), id="ro-other", group_id="g2"), unscored()]
ROWS = [row for rollout in ROLLOUTS for row in samples(rollout).rows]
OF_RUN = [rollout.reward for rollout in ROLLOUTS[:3]]
WITHOUT_REWARD = {
    "nemo_gym": "the agent server's answer has it",
    "openenv": "the session's verdict has it",
    "prime_rl": "advantages are made of it",
    "tinker": "advantages are made of it",
}
BY_ROW = {  # a reward for each row
    "areal": lambda made: [row["rewards"][0] for row in made],
    "atropos": lambda made: made["scores"],
    "openrlhf": lambda made: [row["reward"] for rows in made for row in rows],
    "rllm": lambda made: [one["reward"] for episode in made for one in episode["trajectories"]],
    "samples": lambda made: [row["reward"] for row in made],
    "slime": lambda made: [row["reward"] for rows in made for row in rows],
    "trl": lambda made: [row["metrics"]["reward"] for row in made],
    "verl": lambda made: [row["reward_score"] for row in made],
}
BY_ROLLOUT = {  # a reward for each rollout
    "agent_lightning": lambda made: [triplets[-1]["reward"] for triplets in made],
    "art": lambda made: [one["reward"] for one in made],
    "attempts": lambda made: [one["reward"] for one in made if one["reward"] is not None],
    "skyrl": lambda made: [
        sum(row) for row, last in zip(made["rewards"], made["is_last_step"], strict=True) if last
    ],
    "verifiers": lambda made: [one["rewards"]["reward"]["score"] for one in made],
}  # fmt: skip
GROUPS = {  # what names the group: of each row, or of each rollout
    "art": lambda made: [one["metadata"]["group_id"] for one in made],
    "attempts": lambda made: [one["group_id"] for one in made if one["reward"] is not None],
    "rllm": lambda made: [one["metadata"]["group_id"] for one in made],
    "samples": lambda made: [row["group_id"] for row in made],
    "skyrl": lambda made: [name["instance_id"] for name in made["trajectory_ids"]],
    "slime": lambda made: [row["group_index"] for rows in made for row in rows],
    "trl": lambda made: [row["group_id"] for row in made],
    "verifiers": lambda made: [one["info"]["group_id"] for one in made],
    "verl": lambda made: [row["extra_fields"]["group_id"] for row in made],
}
UNGROUPED = {  # the caller, or the trainer's own queue, holds a group together
    *("agent_lightning", "areal", "atropos", "nemo_gym", "openenv", "openrlhf", "prime_rl", "tinker"),
}


def trained(ids, mask, logprobs):
    return [(id, logprob) for id, logprob, bit in zip(ids, logprobs, mask, strict=True) if bit]


def of_format(name):
    made = json.loads(json.dumps(write_rows(name, ROLLOUTS)))
    if name == "samples":
        return made, [(row["input_ids"], row["loss_mask"], row["logprobs"]) for row in made]
    return made, token_rows("trl_async" if name == "trl" else name, made)


def test_every_format_is_compared():
    assert set(FORMATS) == set(BY_ROW) | set(BY_ROLLOUT) | set(WITHOUT_REWARD) == set(GROUPS) | UNGROUPED


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"attempts"}))
def test_the_same_tokens_train_in_every_format(name):
    _, rows = of_format(name)
    wanted = [pair for row in ROWS for pair in trained(row.ids, row.mask, row.logprobs)]
    assert sorted(pair for row in rows for pair in trained(*row)) == sorted(wanted)
    if name in BY_ROW and name != "rllm" or name in ("prime_rl", "skyrl"):
        assert [len(ids) for ids, *_ in rows] == [len(row.ids) for row in ROWS]
        assert [sum(map(int, mask)) for _, mask, _ in rows] == [row.trained for row in ROWS]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(WITHOUT_REWARD)))
def test_the_same_rewards_and_groups_are_in_every_format(name):
    made, _ = of_format(name) if name != "attempts" else (write_rows(name, ROLLOUTS), None)
    if name in BY_ROW:
        assert BY_ROW[name](made) == [row.reward for row in ROWS]
    else:
        assert BY_ROLLOUT[name](made) == OF_RUN
    if name in GROUPS:
        found = GROUPS[name](made)
        names = [r.group_id for r in ROLLOUTS[:3]] if len(found) == 3 else [row.group_id for row in ROWS]
        numbers = {group: n for n, group in enumerate(dict.fromkeys(found))}
        assert [f"g{numbers[group] + 1}" for group in found] == names


def test_a_plug_in_makes_of_served_rows_what_the_server_makes_of_rollouts():
    """Plug-ins get rows as lines and write them themselves: the fields are those of the format."""
    served = [[read_sample(sample_line(row)) for row in samples(rollout).rows] for rollout in ROLLOUTS]
    flat = [row for rows in served for row in rows]
    assert [verl.output(row) for row in flat] == verl.outputs(ROLLOUTS)
    assert [tensors(row) for row in flat] == FORMATS["areal"](ROLLOUTS)
    assert tinker.rows_data(flat) == tinker.data(ROLLOUTS)
    said = {rollout.id: rollout.task.instruction for rollout in ROLLOUTS}
    assert [
        [openrlhf.row_execution(row, prompt=said[row.rollout_id], label=None) for row in rows]
        for rows in served
        if rows
    ] == (FORMATS["openrlhf"](ROLLOUTS))
    with pytest.warns(UserWarning, match="rollout_func takes one"):
        assert trl.main_rows(served) == trl.rollout_rows(ROLLOUTS)
    names = [{"instance_id": r.group_id, "repetition_id": r.attempt} for r in ROLLOUTS[:3]]
    assert skyrl.rows_output(list(zip(names, served[:3], strict=True))) == skyrl.generator_output(ROLLOUTS)
    grouped = slime.rollout_groups(ROLLOUTS)
    made = [
        slime.row_sample(row, prompt=said[row.rollout_id], group=one["group_index"], index=one["index"], rollout=n)
        for n, (rows, wanted) in enumerate(zip(served[:3], grouped, strict=True))
        for row, one in zip(rows, wanted, strict=True)
    ]
    assert made == [one for rows in grouped for one in rows]
