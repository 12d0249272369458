"""Run by a Python that has the real e2b SDK, with the variables that `serve plane --print-env` prints and nothing else."""

import json
from datetime import UTC, datetime, timedelta

from e2b import Sandbox

seen = {}


def raised(call):
    try:
        call()
    except Exception as error:  # the kind is what the test asks for
        return [type(error).__name__, str(error)]
    return None


box = Sandbox.create(timeout=120, metadata={"team": "a"}, envs={"HOME": "/tmp", "COLOUR": "blue"})
seen["id"] = box.sandbox_id
box.files.write("/tmp/kept", "kept")
seen["url"] = box.download_url("/tmp/kept")
box.commands.run("x=0; while [ $x -lt 300000 ]; do x=$((x+1)); done; head -c 3000000 /dev/zero > /tmp/three")
metric, now = box.get_metrics()[0], datetime.now(UTC)
seen["metric"] = {name: getattr(metric, name) for name in ("cpu_count", "cpu_used_pct", "mem_used", "mem_total")}
seen["metric"] |= {name: getattr(metric, name) for name in ("disk_used", "disk_total")}
seen["metric"]["late"] = abs((now - metric.timestamp).total_seconds())
hour = timedelta(hours=1)
intervals = [
    {"start": now - hour},
    {"start": now + hour},
    {"end": now - hour},
    {"start": now - hour, "end": now + hour},
]
seen["intervals"] = [bool(box.get_metrics(**interval)) for interval in intervals]
seen["boot"] = len(box.files.read("/proc/sys/kernel/random/boot_id").strip())
seen["no_proc"] = raised(lambda: box.files.read("/proc/nothing"))[0]
env = Sandbox.create("weather@1.0", timeout=120, envs={"HOME": "/tmp"})
seen["template"] = env.get_info().template_id
seen["city"] = env.commands.run("echo $CITY").stdout.splitlines()[-1:]
seen["no_env"] = raised(lambda: Sandbox.create("nothing@1.0"))
seen["snapshot"] = snapshot = box.create_snapshot().snapshot_id
env.kill()
copy = Sandbox.create(snapshot, timeout=120, envs={"HOME": "/tmp"})
seen["copied"] = copy.files.read("/tmp/kept")
copy.kill()
first, second = box.fork(count=2, timeout=120)
seen["forked"] = [first.files.read("/tmp/kept"), first.commands.run("echo $COLOUR").stdout.splitlines()[-1:]]
seen["second"] = type(second).__name__
seen["full"] = raised(lambda: Sandbox.create(timeout=120))
first.kill()
box.pause()
seen["paused"] = [box.get_info().state.value, box.is_running(), raised(lambda: box.commands.run("true"))[0]]
kept = box.get_info().end_at
seen["resumed"] = Sandbox.connect(box.sandbox_id, timeout=60).files.read("/tmp/kept")
seen["ends"] = [(kept - box.get_info().started_at).days, (box.get_info().end_at - kept).days]
seen["listed"] = [one.sandbox_id for one in Sandbox.list().next_items()] == [box.sandbox_id]
print(json.dumps(seen))
