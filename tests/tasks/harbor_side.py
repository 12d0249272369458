"""Runs under Harbor's own Python: `init ...` is its init command, `load PATH...` prints what it makes of task folders."""

import json
import sys

import typer


def init(arguments):
    from harbor.cli.init import init_command

    app = typer.Typer()
    app.command()(init_command)
    app(arguments)


def judging(task, step):
    """How one step (or the whole task) is judged, by Harbor's own rules of inheritance."""
    from harbor.models.task.verifier_mode import resolve_verifier_environment_definition as resolve

    config = task.config
    own = (step or config).verifier
    place = resolve(config, task.paths, step)
    policy = own.explicit_phase_policy() or config.verifier.explicit_phase_policy()
    return {
        "place": place and place.config.model_dump(mode="json"),
        "folder": place and place.directory.relative_to(task.task_dir).as_posix(),
        "bundled": place and place.bundled_tests,
        "env": {**config.verifier.env, **own.env},
        "user": own.user if own.user is not None else config.verifier.user,
        "collect": [hook.model_dump(mode="json") for hook in own.collect or config.verifier.collect],
        "network": policy and policy.model_dump(mode="json"),
        "timeout": (own if "timeout_sec" in own.model_fields_set else config.verifier).timeout_sec,
    }


def acting(task, step):
    own, whole = step.agent, task.config.agent
    return {
        "name": step.name,
        "instruction": task.step_instruction(step.name),
        "timeout": own.timeout_sec if own.timeout_sec is not None else whole.timeout_sec,
        "user": own.user if own.user is not None else whole.user,
        "min_reward": {"reward": step.min_reward} if isinstance(step.min_reward, float) else step.min_reward,
        "healthcheck": step.healthcheck and step.healthcheck.model_dump(mode="json"),
        "artifacts": [str(artifact) for artifact in step.artifacts],
        "judging": judging(task, step),
    }


def meaning(task):
    """What a folder says, with everything that is inherited or defaulted filled in."""
    config = task.config
    whole = {} if config.steps else {"agent": config.agent.model_dump(mode="json"), "judging": judging(task, None)}
    return {
        **whole,
        "package": config.task and config.task.model_dump(mode="json"),
        "metadata": config.metadata,
        "environment": config.environment.model_dump(mode="json"),
        "solution": config.solution.model_dump(mode="json"),
        "artifacts": [str(artifact) for artifact in config.artifacts],
        "source": config.source,
        "instruction": task.instruction,
        "strategy": (config.multi_step_reward_strategy or "mean") if config.steps else None,
        "steps": [acting(task, step) for step in config.steps or []],
    }


def load(paths):
    from harbor.models.task.task import Task
    from harbor.publisher.packager import Packager

    found = []
    for path in paths:
        task = Task(path)
        digest, _ = Packager.compute_content_hash(task.task_dir)
        found.append(
            {
                "name": task.name,
                "digest": f"sha256:{digest}",
                "valid": Task.is_valid_dir(path),
                "meaning": meaning(task),
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    {"init": init, "load": load}[sys.argv[1]](sys.argv[2:])
