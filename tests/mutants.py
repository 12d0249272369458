"""`make mutants`: each law's code is broken on purpose, one place at a time, and the tests named beside it must notice.

A mutant is a change of one line in a copy of the tree, never in the tree itself. A mutant that survives is a law that no test
guards: add the test. A kill counts only where the same tests pass in the copy before it is changed. `python tests/mutants.py
WORD` runs those whose file or line has the word in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
OUTAGES, FILES = "tests/runs/test_outages.py", "tests/runs/test_agents_files.py"
JUDGED = f"{OUTAGES} -k test_a_refused_request"
TABLE = f"{OUTAGES} -k 'test_an_outage_has_no_reward and"


class Mutant(NamedTuple):
    file: str
    line: str
    broken: str
    tests: str


MUTANTS = (
    # whose failure it is
    Mutant(
        "runs/rollout/model_outage.py",
        "if waited >= excused_wait_s or (waited and not session.answered):",
        "if False:",
        f"{TABLE} transparent_proxy'",
    ),
    Mutant(
        "runs/rollout/model_outage.py",
        "if refused is None or (session.answered and is_agents_own(refused, model)):",
        "if refused is None or is_agents_own(refused, model):",
        "tests/runs/test_policy_health.py -k never_fitted",
    ),
    Mutant(
        "runs/rollout/model_outage.py",
        "if refused is None or (session.answered and is_agents_own(refused, model)):",
        "if refused is None:",
        JUDGED,
    ),
    Mutant(
        "runs/rollout/model_outage.py",
        "if (outage := find_outage(session, model)) is not None:",
        "if False:",
        f"{TABLE} black_box'",
    ),
    Mutant(
        "runs/rollout/model_outage.py",
        "        return session.exhausted\n",
        "        pass\n",
        "tests/runs/test_rollout.py -k end_of_its_budget",
    ),
    Mutant("runs/rollout/model_outage.py", 'refused.model not in ("", model)', "False", f"{OUTAGES} -k was_not_given"),
    Mutant(
        "runs/rollout/model_outage.py",
        "in AGENTS_OWN or refused.status == GAVE_UP:",
        "in AGENTS_OWN:",
        f"{OUTAGES} -k leaves_its_own_call",
    ),
    Mutant(
        "gate/black_box.py",
        "        self._concluded = True\n",
        "        self._concluded = True\n        return\n",
        f"{TABLE} black_box'",
    ),
    Mutant(
        "gate/black_box.py",
        "if self._seen is not None and self._seen.problem() is None:",
        "if False:",
        "tests/gate/test_black_box.py",
    ),
    Mutant("gate/answer_check.py", "if self._stream and not self._ended:", "if False:", "tests/gate/test_black_box.py"),
    Mutant(
        "gate/answer_check.py",
        "if self._error is not None:\n            return",
        "if False:\n            return",
        "tests/gate/test_black_box.py",
    ),
    Mutant(
        "gate/calls.py",
        "            status=status,\n            error=error,\n            trainable",
        "            trainable",
        "tests/gate/test_black_box.py",
    ),
    Mutant("gate/refusals.py", 'return "content_filter" if _FILTERED.search(words) else None', "return None", JUDGED),
    Mutant(
        "policy/passthrough_policy.py",
        "        if self._key is not None:\n            try:\n                scrubber",
        "        if False:\n            try:\n                scrubber",
        "tests/policy/test_passthrough.py",
    ),
    Mutant(
        "runs/rollout/route_check.py", "if not session.reached:", "if False:", f"{OUTAGES} -k 'nowhere or another_gate'"
    ),
    Mutant(
        "runs/rollout/route_check.py", "        await _check_direct(context, opened)\n", "", f"{OUTAGES} -k nowhere"
    ),
    Mutant("runs/rollout/act.py", "if asks_again and (outage", "if False and (outage", f"{TABLE} direct and 2'"),
    # what may be done with a failure
    Mutant(
        "runs/rollout/failures.py",
        'AgentParked: Rule("agent_error", retry=False',
        'AgentParked: Rule("agent_error", retry=True',
        f"{OUTAGES} -k parked",
    ),
    Mutant(
        "runs/rollout/failures.py",
        '"policy": Rule("infra_error", retry=True, grade=False',
        '"policy": Rule("infra_error", retry=True, grade=True',
        f"{TABLE} transparent_proxy'",
    ),
    Mutant(
        "runs/rollout/failures.py",
        '"policy": Rule("infra_error", retry=True',
        '"policy": Rule("infra_error", retry=False',
        f"{TABLE} transparent_proxy'",
    ),
    Mutant(
        "runs/rollout/failures.py",
        'AgentTimeout: Rule("timeout", retry=False, grade=True',
        'AgentTimeout: Rule("timeout", retry=False, grade=False',
        "tests/runs/test_reached.py",
    ),
    # the lifecycle
    Mutant(
        "runs/rollout/record.py",
        "        if not failure.grade and self._reached.reward is not None:\n            self.note(verdict=None)\n",
        "",
        f"{OUTAGES} -k verdict_of_a_step",
    ),
    Mutant(
        "runs/rollout/record.py", "retry=failure.retry and not graded", "retry=failure.retry", f"{OUTAGES} -k teardown"
    ),
    Mutant(
        "runs/rollout/conclude.py",
        "            await opened.sandbox.kill_processes()\n",
        "            pass\n",
        "tests/runs/test_rollout.py -k no_process_of_the_agent",
    ),
    Mutant(
        "runs/rollout/open_sandbox.py",
        "    await context.provision.prove_route(sandbox, listener.port)\n",
        "",
        "tests/runs/test_rollout.py -k listener_that_does_not_lead",
    ),
    # judging
    Mutant(
        "tasks/grade.py",
        "if failure is not None and not failure.grade:",
        "if False:",
        "tests/tasks/test_judging.py -k may_not_be_graded",
    ),
    Mutant(
        "tasks/grade.py",
        "        if not await is_directory(box.sandbox, box.cwd):\n",
        "        if False:\n",
        f"{FILES} -k place",
    ),
    Mutant(
        "tasks/transfer.py",
        "            elif stat.S_ISREG(mode) and mode & 0o7000:\n",
        "            elif False:\n",
        "tests/tasks/test_transfer.py",
    ),
    Mutant(
        "images/tree_pipe.py",
        "            folder.folders.clear()\n",
        "            pass\n",
        "tests/sandbox/test_local_deep_trees.py -k endless",
    ),
    Mutant(
        "runs/rollout/collect.py",
        'return os.fsencode(name).decode("utf-8", "backslashreplace")',
        "return name",
        f"{FILES} -k 'file_with_a_name or no and UTF'",
    ),
    # options: rendered or refused
    Mutant(
        "agents/render.py",
        "            if name not in agent.options:\n",
        "            if False:\n",
        "tests/agents/test_render.py",
    ),
    Mutant("agents/render.py", "        more.extend(extra.argv)\n", "", "tests/agents/test_render.py"),
    Mutant(
        "runs/rollout/modes.py", 'getattr(policy, "takes_tools", None) is False', "False", "tests/policy/test_named.py"
    ),
    # keys
    Mutant(
        "gate/keys.py",
        "if any(other != found[0] for other in found[1:]):",
        "if False:",
        "tests/gate/test_security.py tests/gate/test_sessions.py",
    ),
    Mutant(
        "gate/keys.py",
        "        self._open.pop(hashed, None)\n",
        "",
        "tests/gate/test_security.py tests/gate/test_sessions.py",
    ),
    Mutant(
        "gate/listener.py",
        "if self._session is not None and session is not self._session:",
        "if False:",
        "tests/gate/test_sessions.py -k bound_to_a_session",
    ),
    # leases and quotas
    Mutant(
        "store/leases.py",
        '{"fence": row["fence"] + 1,',
        '{"fence": row["fence"],',
        "tests/store/test_runs.py -k 'lease'",
    ),
    Mutant("store/leases.py", '    if row["fence"]:  #', "    if False:  #", "tests/store/test_runs.py -k taken_over"),
    Mutant(
        "store/leases.py",
        "if in_flight.get(policy, 0) >= most",
        "if in_flight.get(policy, 0) > most",
        "tests/store/test_runs.py",
    ),
    Mutant(
        "plane/storage/sql/instances.py",
        "owners.c.used < limit",
        "owners.c.used <= limit",
        "tests/plane/test_instances.py -k quota",
    ),
    # trajectories
    Mutant(
        "trajectory/branch.py",
        "len(node.logprobs) == len(node.ids)",
        "True",
        "tests/trajectory/test_samples.py tests/trajectory/test_trajectory.py",
    ),
    Mutant(
        "trajectory/branch.py",
        "node.sampled and node.trainable and node.ids",
        "node.sampled and node.ids",
        "tests/trajectory/test_samples.py tests/trajectory/test_trajectory.py",
    ),
    Mutant(
        "trajectory/branch.py",
        'return "discarded" if replaced else own.kind',
        "return own.kind",
        "tests/trajectory/test_samples.py tests/trajectory/test_trajectory.py",
    ),
    # branches
    Mutant(
        "policy/prefix.py",
        "if not self._beyond and not past_end:",
        "if False:",
        "tests/runs/test_branch.py -k asks_something_else",
    ),
    Mutant(
        "policy/prefix.py",
        'return _VOLATILE.sub("#", text)',
        'return ""',
        "tests/runs/test_branch.py -k asks_something_else",
    ),
    Mutant(
        "runs/rollout/act.py",
        "return None if prefix.reached or",
        "return None if True or",
        "tests/runs/test_branch.py -k ends_before",
    ),
    Mutant(
        "runs/run/worker.py",
        "last_events=events, owes=owes",
        "last_events=events",
        "tests/runs/test_tree.py -k stopped_tree",
    ),
    # what a registry and a task may make this machine do
    Mutant(
        "images/registry_client.py",
        "used = self._authorization if own else None",
        "used = self._authorization",
        "tests/images/test_pull_attacks.py -k password",
    ),
    Mutant(
        "images/registry_client.py",
        "if found != blob.digest and begun:",
        "if found == blob.digest or not begun:\n            return\n        if begun:",
        "tests/images/test_pull.py -k bytes_that_are_not",
    ),
    Mutant(
        "images/oci.py",
        "if not is_digest(str(diff_id)):",
        "if False:",
        "tests/images/test_pull_attacks.py -k by_a_digest",
    ),
    Mutant(
        "net/http_session.py",
        "if self._rules is not None:",
        "if False:",
        "tests/net/test_checked_session.py -k leads_to_this_machine",
    ),
    Mutant(
        "sandbox/local/channel.py",
        "            if not future.done():\n                future.set_exception(self._gone_error())",
        "            if True:\n                future.set_exception(self._gone_error())",
        "tests/sandbox/test_local_channel.py",
    ),
    # logs of strangers
    Mutant(
        "testing/tasks.py",
        "{folder_name(task.id)}.{agent}",
        "{task.id}.{agent}",
        "tests/tasks/test_named_datasets.py -k stay_in_their_folder",
    ),
    Mutant(
        "testing/tasks.py",
        "        if names[0] == _PRINTED:",
        "        if False:",
        "tests/tasks/test_named_datasets.py -k stay_in_their_folder",
    ),
    Mutant(
        "testing/tasks.py",
        "            if error.errno not in _BAD_NAME:",
        "            if True:",
        "tests/tasks/test_named_datasets.py -k stay_in_their_folder",
    ),
    # what an agent could read, and what scanners go by
    Mutant(
        "inside/seal_repository.sh",
        "root=$1\n",
        "exit 0\n",
        "tests/tasks/test_leaks.py -k any_route",
    ),
    Mutant(
        "inside/seal_repository.sh",
        "    rm -rf objects refs packed-refs\n",
        "    rm -rf refs packed-refs\n",
        "tests/tasks/test_leaks.py -k 'any_route and loose'",
    ),
    Mutant(
        "inside/seal_repository.sh",
        '            *) rm -rf "./$name" ;;',
        "            *) ;;",
        "tests/tasks/test_leaks.py -k 'any_route and reflog'",
    ),
    Mutant(
        "inside/seal_repository.sh",
        "    [ ! -e index ] || git update-index --clear-resolve-undo\n",
        "",
        "tests/tasks/test_leaks.py -k 'any_route and resolved'",
    ),
    Mutant(
        "inside/seal_repository.sh",
        '            grep -q "$(basename "$file")" sealed/large || rm -f "$file"\n',
        "            true\n",
        "tests/tasks/test_leaks.py -k 'any_route and large'",
    ),
    Mutant(
        "inside/seal_repository.sh",
        '        git config --local --remove-section "$section"\n',
        "        true\n",
        "tests/tasks/test_leaks.py -k 'any_route and on_this_disk'",
    ),
    Mutant(
        "inside/seal_repository.sh",
        '        *) [ ! -d "$found" ] || (seal "$found") ;;',
        '        */?*/?*/.git) ;;\n        *) [ ! -d "$found" ] || (seal "$found") ;;',
        "tests/tasks/test_leaks.py -k 'any_route'",
    ),
    Mutant(
        "inside/seal_repository.sh",
        '        */HEAD) [ ! -d "${found%/HEAD}/objects" ] || (seal "${found%/HEAD}") ;;',
        "        */HEAD) ;;",
        "tests/tasks/test_leaks.py -k 'any_route and submodule'",
    ),
    Mutant(
        "inside/seal_repository.sh",
        '    [ ! -d "$above/.git" ] || (seal "$above/.git")\n',
        "    true\n",
        "tests/tasks/test_leaks.py -k a_part_of",
    ),
    Mutant(
        "inside/leak_probe.py",
        '    if len(data) in needles["sizes"]:',
        "    if False:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        "        if len(lines) >= _FEWEST_LINES and len(data) >= sum(map(len, lines)) * _SHARE:",
        "        if False:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        "        found = look_into(path, size, needles)",
        "        pass",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        "    if found is None and (remains or is_core(data)):",
        "    if found is None and remains:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        "    if found is None and (remains or is_core(data)):",
        "    if found is None and is_core(data):",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        "    if flags == 0 and size != os.path.getsize(source) & 0xFFFFFFFF:",
        "    if False:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        "        if path != own and os.path.isdir(path) and os.listdir(path):",
        "        if False:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        '        if value in needles["values"] and len(value) > 3:',
        "        if False:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        '        elif look_at_bytes(value.encode("utf-8", "surrogateescape"), needles):',
        "        elif False:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        '        if "HEAD" in files and "objects" in folders and "refs" in folders:',
        "        if False:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        '    elif data.startswith((b"# v2 git bundle", b"# v3 git bundle")):',
        "    elif False:",
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        '    return held != "" and held == own',
        '    return held != ""',
        "tests/tasks/test_leaks.py -k could_read_is_told",
    ),
    Mutant(
        "inside/leak_probe.py",
        '    return held != "" and held == own',
        "    return False",
        "tests/tasks/test_leaks.py -k no_agent_can_read",
    ),
    Mutant(
        "inside/leak_probe.py",
        ' and module_of(path) in needles["modules"]:',
        ":",
        "tests/tasks/test_leaks.py -k no_agent_can_read",
    ),
    Mutant(
        "testing/leaks.py",
        "    return len(answer) / 2 <= len(given & answer) < len(answer)",
        "    return len(answer) / 2 <= len(given & answer)",
        "tests/tasks/test_leaks.py -k another_name",
    ),
    Mutant(
        "testing/leaks.py",
        "    return len(answer) / 2 <= len(given & answer) < len(answer)",
        "    return False",
        "tests/tasks/test_leaks.py -k another_name",
    ),
    Mutant(
        "sandbox/local/writes.py",
        "            if status.st_ctime >= since and not",
        "            if status.st_mtime >= since and not",
        "tests/sandbox/test_local_writes.py -k forged",
    ),
    Mutant(
        "sandbox/local/writes.py",
        'key=lambda path: (path.count("/"), path)',
        'key=lambda path: (-path.count("/"), path)',
        "tests/sandbox/test_local_writes.py -k nearest",
    ),
    Mutant(
        "runs/scan/tampering.py",
        "    for path in find_grader_writes(actions.rollout.writes or ()):",
        "    for path in ():",
        "tests/runs/test_scan_evidence.py -k 'host_saw or hidden_means'",
    ),
    Mutant(
        "runs/scan/tampering.py",
        "    for path, what in find_loaded_writes(actions.rollout.writes or (), actions.instruction):",
        "    for path, what in ():",
        "tests/runs/test_scan_evidence.py -k host_saw",
    ),
    Mutant(
        "runs/scan/answer_files.py",
        "_find_named(action, own, actions.instruction, answers.paths) or _find_shown(action, answers.lines, said)",
        "_find_named(action, own, actions.instruction, answers.paths)",
        "tests/runs/test_scan_evidence.py -k by_its_lines",
    ),
    Mutant(
        "runs/scan/answer_files.py",
        "if path is None or candidate in said or candidate in action.command:",
        "if path is None:",
        "tests/runs/test_scan_evidence.py -k wrote_itself",
    ),
    Mutant(
        "runs/scan/agent_actions.py",
        "        ran = [text for name, text in texts.items() if name in words]",
        "        ran = list[str]()",
        "tests/runs/test_scan_evidence.py -k hidden_means",
    ),
    Mutant(
        "runs/scan/writes.py",
        "and _library(path) not in by_packages and",
        "and",
        "tests/runs/test_scan_evidence.py -k package_managers",
    ),
    Mutant(
        "runs/rollout/collect.py",
        "        if len(patches[name]) > left:",
        "        if False:",
        "tests/runs/test_scan_evidence.py -k push_others_out",
    ),
    Mutant(
        "runs/scan/conduct.py",
        'cut_off = action is actions.tools[-1] and actions.rollout.status == "timeout" and not action.result.strip()',
        "cut_off = False",
        "tests/runs/test_scan_evidence.py -k by_its_effect",
    ),
    Mutant(
        "runs/scan/conduct.py",
        "            times = _REPEATED if period == 1 else _REPEATED - 1",
        "            times = _REPEATED",
        "tests/runs/test_scan_evidence.py -k by_its_effect",
    ),
)


def main(words: list[str]) -> int:
    chosen = [one for one in MUTANTS if all(word in f"{one.file} {one.line}" for word in words)]
    if wrong := [why for one in MUTANTS if (why := find_misfit(one)) is not None]:
        raise SystemExit("\n".join((*wrong, "bring the list up to date")))
    if not chosen:
        raise SystemExit(f"no mutant has {' and '.join(words)} in its file or line")
    survived: list[Mutant] = []
    passed: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="rollyard-mutants-") as folder:
        tree = copy_tree(Path(folder))
        for number, mutant in enumerate(chosen, 1):
            began = time.monotonic()
            if mutant.tests not in passed:
                check_tests(mutant.tests, tree)
                passed.add(mutant.tests)
            killed = is_killed(mutant, tree)
            if not killed:
                survived.append(mutant)
            state = "killed  " if killed else "SURVIVED"
            shown = " ".join(mutant.line.split())[:70]
            print(
                f"{number:3}/{len(chosen)} {state} {time.monotonic() - began:5.0f} s  {mutant.file}: {shown}",
                flush=True,
            )
    print(f"{len(chosen) - len(survived)} killed, {len(survived)} survived")
    return 1 if survived else 0


def find_misfit(mutant: Mutant) -> str | None:
    """Why a mutant cannot be made of the code as it is."""
    file = ROOT / "rollyard" / mutant.file
    if not file.is_file():
        return f"{mutant.file} is not there"
    times = file.read_text().count(mutant.line)
    return None if times == 1 else f"{mutant.file} has {times} times: {mutant.line!r}"


def copy_tree(folder: Path) -> Path:
    """The package as files to change, everything else by links."""
    for found in ROOT.iterdir():
        if found.name not in ("rollyard", ".git", ".venv"):
            (folder / found.name).symlink_to(found)
    shutil.copytree(ROOT / "rollyard", folder / "rollyard", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def check_tests(tests: str, tree: Path) -> None:
    code, said = run_tests(tests, tree)
    if code != 0:
        raise SystemExit(f"these fail with no change at all, so they can kill nothing: {tests}\n{said}")


def is_killed(mutant: Mutant, tree: Path) -> bool:
    file = tree / "rollyard" / mutant.file
    whole = file.read_text()
    file.write_text(whole.replace(mutant.line, mutant.broken))
    try:
        code, said = run_tests(mutant.tests, tree)
    finally:
        file.write_text(whole)
    if code not in (0, 1, None):
        raise SystemExit(f"{mutant.file}: pytest cannot run {mutant.tests!r}:\n{said}")
    return code != 0  # None: it hangs, which is noticed


def run_tests(tests: str, tree: Path) -> tuple[int | None, str]:
    """The exit code, None after `LIMIT_S`, and the end of what was said."""
    command = (
        f"{sys.executable} -m pytest {tests} -x -q -n 0 --timeout 300 -p no:cacheprovider --basetemp={tree}/.pytest"
    )
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(["sh", "-c", command], cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, f"not done after {LIMIT_S} s"
    return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
