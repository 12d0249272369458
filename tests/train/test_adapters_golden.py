"""Every adapter's output on the same two rollouts, kept in `golden/` and reviewed here by laws that do not read the adapters.

`ROLLYARD_GOLDEN=write pytest tests/train/test_adapters_golden.py` writes the files anew.
"""

import json
import os
import warnings
from pathlib import Path

import pytest

from rollyard.core.errors import Untrainable
from rollyard.train.adapters import (
    agent_lightning,
    areal,
    art,
    atropos,
    nemo_gym,
    openenv,
    openrlhf,
    prime_rl,
    rllm,
    skyrl,
    slime,
    tinker,
    trl,
    verifiers,
    verl,
)
from rollyard.trajectory.samples import merge_counts, samples
from tests.train.rollouts import branchy, linear, unprovable, unscored

GOLDEN = Path(__file__).parent / "golden"
SAMPLED = {(10, 11), (12, 13, 14), (30, 31), (32,), (33, 34), (35,), (40, 41)}


def quiet(rollouts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trl.rollout_rows(rollouts)


def each(function):
    return lambda rollouts: [function(rollout) for rollout in rollouts if rollout.reward is not None]


ADAPTERS = {
    "agent_lightning": each(agent_lightning.triplets),
    "areal": areal.concat,
    "areal_individual": areal.individual,
    "art": lambda rollouts: art.trajectories(rollouts, choice=dict),
    "atropos": atropos.scored_data,
    "nemo_gym": nemo_gym.token_entries,
    "openenv": each(openenv.training_trace),
    "openenv_entries": each(openenv.proxy_trace),
    "openrlhf": each(openrlhf.executions),
    "prime_rl": lambda rollouts: prime_rl.training_samples(rollouts, env_name="fix"),
    "rllm": rllm.episodes,
    "skyrl": skyrl.generator_output,
    "skyrl_steps": lambda rollouts: skyrl.generator_output(rollouts, step_wise=True),
    "slime": slime.rollout_groups,
    "tinker": tinker.data,
    "trl": quiet,
    "trl_async": trl.rollout_samples,
    "verifiers": each(verifiers.trace),
    "verl": verl.outputs,
}


def plain(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_an_adapter_writes_its_golden_file(name):
    made = plain(ADAPTERS[name]([linear(), branchy(), unscored()]))
    path = GOLDEN / f"{name}.json"
    if os.environ.get("ROLLYARD_GOLDEN") == "write":
        path.write_text(json.dumps(made, indent=1) + "\n")
    assert made == json.loads(path.read_text())


@pytest.mark.parametrize("name", sorted(set(ADAPTERS) - {"openenv_entries"}))
def test_a_scored_rollout_without_provable_tokens_is_refused_with_the_reason(name):
    with pytest.raises(Untrainable, match="token ids are known for 0 of 3 messages") as refused:
        ADAPTERS[name]([linear(), unprovable()])
    assert refused.value.rollout_id == "ro-text"


def runs_of(ids, mask):
    """Maximal runs of tokens that train, cut at the borders of known answers."""
    found, run = [], []
    for id, bit in zip(ids, mask, strict=True):
        if bit:
            run.append(id)
            if tuple(run) in SAMPLED:
                found.append(tuple(run))
                run = []
        else:
            assert run == [], f"{run} trains and is no answer"
    assert run == []
    return found


def token_rows(name, made):
    """(ids, mask, logprobs) of every row in a golden file, whatever its shape."""
    match name:
        case "areal" | "areal_individual":
            return [(r["input_ids"][0], r["loss_mask"][0], r["logprobs"][0]) for r in made]
        case "atropos":
            masks = [[int(m != -100) for m in mask] for mask in made["masks"]]
            for row, ids in zip(made["masks"], made["tokens"], strict=True):
                assert all(m in (-100, t) for m, t in zip(row, ids, strict=True))
            logprobs = [[0.0 if p == 1.0 else p for p in row] for row in made["inference_logprobs"]]
            return list(zip(made["tokens"], masks, logprobs, strict=True))
        case "openenv" | "openenv_entries":
            turns = [t for r in made for t in (r["turns"] if isinstance(r, dict) else r)]
            whole = [t["prompt_token_ids"] + t["completion_token_ids"] for t in turns]
            logprobs = [[0.0] * len(t["prompt_token_ids"]) + t["per_token_logps"] for t in turns]
            return list(zip(whole, [t["loss_mask"] for t in turns], logprobs, strict=True))
        case "openrlhf":
            flat = [row for rows in made for row in rows]
            masks = [
                [int(any(a <= i < b for a, b in r["action_ranges"])) for i, _ in enumerate(r["observation_tokens"])]
                for r in flat
            ]
            return [(r["observation_tokens"], m, r["rollout_log_probs"]) for r, m in zip(flat, masks, strict=True)]
        case "prime_rl":
            return [(r["token_ids"], r["mask"], r["logprobs"]) for r in made]
        case "skyrl" | "skyrl_steps":
            parts = zip(
                made["prompt_token_ids"],
                made["response_ids"],
                made["loss_masks"],
                made["rollout_logprobs"],
                strict=True,
            )
            return [(p + r, [0] * len(p) + m, [0.0] * len(p) + q) for p, r, m, q in parts]
        case "slime":
            flat = [row for rows in made for row in rows]
            heads = [len(r["tokens"]) - r["response_length"] for r in flat]
            return [
                (r["tokens"], [0] * n + r["loss_mask"], [0.0] * n + r["rollout_log_probs"])
                for r, n in zip(flat, heads, strict=True)
            ]
        case "tinker":
            inner = [r["loss_fn_inputs"] for r in made]
            assert all(r["model_input"][1:] == i["target_tokens"][:-1] for r, i in zip(made, inner, strict=True))
            return [(i["target_tokens"], r["mask"], i["logprobs"]) for r, i in zip(made, inner, strict=True)]
        case "trl":
            parts = zip(made["prompt_ids"], made["completion_ids"], made["env_mask"], made["logprobs"], strict=True)
            return [(p + c, [0] * len(p) + m, [0.0] * len(p) + q) for p, c, m, q in parts]
        case "trl_async":
            return [(r["input_ids"], r["completion_mask"], r["old_log_probs"]) for r in made]
        case "verl":
            heads = [len(r["prompt_ids"]) for r in made]
            return [
                (r["prompt_ids"] + r["response_ids"], [0] * n + r["response_mask"], [0.0] * n + r["response_logprobs"])
                for r, n in zip(made, heads, strict=True)
            ]
        case "nemo_gym":
            pairs = [(r["prompt_token_ids"], r["generation_token_ids"], r["generation_log_probs"]) for r in made]
        case "rllm":
            steps = [s for e in made for t in e["trajectories"] for s in t["steps"]]
            pairs = [(s["prompt_ids"], s["response_ids"], s["logprobs"]) for s in steps]
        case "agent_lightning":
            flat = [t for rollout in made for t in rollout]
            pairs = [(t["prompt"]["token_ids"], t["response"]["token_ids"], t["metadata"]["logprobs"]) for t in flat]
        case "art":
            histories = [h for t in made for h in (t, *t["additional_histories"])]
            choices = [
                c["logprobs"]["content"] for h in histories for c in h["messages_and_choices"] if "logprobs" in c
            ]
            pairs = [([], [int(t["token"].split(":")[1]) for t in c], [t["logprob"] for t in c]) for c in choices]
        case "verifiers":
            nodes = [n for t in made for n in t["nodes"] if n["sampled"]]
            pairs = [([], n["token_ids"], n["logprobs"]) for n in nodes]
    return [(p + c, [0] * len(p) + [1] * len(c), [0.0] * len(p) + q) for p, c, q in pairs]


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_a_golden_file_keeps_the_laws(name):
    """As many masks and logprobs as tokens, a logprob exactly where a token trains, each answer trained once, and nothing
    trained that nobody sampled (among it the inserted token 20 and the unscored answer 50)."""
    trained = []
    for ids, mask, logprobs in token_rows(name, json.loads((GOLDEN / f"{name}.json").read_text())):
        assert len(ids) == len(mask) == len(logprobs)
        assert [p != 0.0 for p in logprobs] == [bool(bit) for bit in mask]
        trained += runs_of(ids, mask)
    wanted = SAMPLED if name != "trl" else {(10, 11), (12, 13, 14), (30, 31), (32,)}
    assert sorted(trained) == sorted(wanted)


@pytest.mark.parametrize("name", ["agent_lightning", "nemo_gym", "openenv", "rllm", "skyrl_steps", "areal_individual"])
def test_a_call_that_continues_another_begins_with_its_tokens(name):
    rows = [ids for ids, _, _ in token_rows(name, json.loads((GOLDEN / f"{name}.json").read_text()))]
    by_end = {
        tuple(row[-len(answer) :]): row for row in rows for answer in SAMPLED if tuple(row[-len(answer) :]) == answer
    }
    for child, parent in (((12, 13, 14), (10, 11)), ((32,), (30, 31)), ((33, 34), (30, 31))):
        assert by_end[child][: len(by_end[parent])] == by_end[parent]


def test_a_baseline_counts_a_rollout_once_however_many_rows_it_has():
    """Rewards 1 and 0 over two rollouts are +1 and -1; over the five rows they would be +2 and -0.5."""
    assert [row["advantage"] for row in trl.rollout_samples([linear(), branchy()])] == [1.0, -1.0, -1.0, -1.0, -1.0]
    assert [
        {a for a in row["advantages"] if a} for row in prime_rl.training_samples([linear(), branchy()], env_name="x")
    ] == [
        {1.0},
        {-1.0},
        {-1.0},
        {-1.0},
        {-1.0},
    ]
    made = skyrl.generator_output([linear(), branchy()])
    assert [sum(rewards) for rewards in made["rewards"]] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert made["is_last_step"] == [True, False, False, False, True]


def test_one_row_per_prompt_warns_of_what_it_leaves_out_and_keeps_the_place_of_an_unscored_rollout():
    with pytest.warns(UserWarning, match="ro-branchy has 4 rows and rollout_func takes one: 5 sampled tokens"):
        made = trl.rollout_rows([linear(), unscored(), branchy()], pad_id=7)
    assert made["env_reward"] == [1.0, None, 0.0]
    assert (made["completion_ids"][1], made["env_mask"][1]) == ([7], [0])
    assert trl.env_reward(**made) == [1.0, None, 0.0]


def test_an_unknown_temperature_is_refused_where_the_trainer_divides_by_it():
    from msgspec.structs import replace

    from rollyard.trajectory.trajectory import Trajectory
    from tests.train.rollouts import SYSTEM, USER, call, reply, said

    t = Trajectory("ro-linear")
    t.add(call("ro-linear", "a1", SYSTEM, USER), reply(said("x"), [1], [2], sampling=None))
    with pytest.raises(Untrainable, match="temperature"):
        prime_rl.training_samples([replace(linear(), trajectory=t)], env_name="x")


def test_a_shared_answer_is_plain_context_in_the_row_that_does_not_train_it():
    rows = samples(branchy()).rows
    assert list(rows[2].logprobs[:5]) == [0.0] * 5 and list(rows[2].versions[:5]) == [-1] * 5


def test_a_black_box_rollout_has_no_turns_and_cannot_be_trained_on():
    from msgspec.structs import replace

    unseen = replace(linear(), trajectory=None)
    assert openenv.proxy_trace(unseen) == []
    with pytest.raises(Untrainable, match="no model call was captured"):
        openenv.training_trace(unseen)


def test_adapters_with_room_for_it_say_where_a_row_hangs_in_its_tree():
    """A trainer that reads it finds the shared tokens in the parent row."""
    rollout = branchy()
    rows = [(sample["tokens"], sample["train_metadata"]) for sample in slime.rollout_groups([rollout])[0]]
    assert [place for _, place in rows] == [
        {name: one["extra_fields"][name] for name in ("row", "rows", "parent_row", "shared_tokens")}
        for one in verl.outputs([rollout])
    ]
    packed = atropos.scored_data([rollout])
    assert [one | {"rollout_id": rollout.id} for _, one in rows] == packed["overrides"]
    shared = [(tokens, place) for tokens, place in rows if place["parent_row"] is not None]
    assert shared, "some rows share a prefix"
    for tokens, place in shared:
        count = place["shared_tokens"]
        assert count and tokens[:count] == rows[place["parent_row"]][0][:count]
    counts = merge_counts(rollout.trajectory)
    saved = sum(place["shared_tokens"] for _, place in rows)
    assert (counts.rows, counts.row_tokens - counts.tree_tokens) == (len(rows), saved)
