"""The first process in a container: a shell script that reaps, keeps time, and can end everything else.

Engines have no TTL, so the container ends itself: at its end time, or when its stdin ends, which the engine closes when the
process that opened the sandbox is gone (a SIGKILL included). It is PID 1 so that `kill -9 -1`, given by it or by a program the
engine starts, reaches every other process and nothing can hide from that; its own helpers die with the rest and come back.
On SIGUSR1 it does so itself, without a fork: the way out of a fork bomb. On SIGUSR2 it looks at its end time again.
"""

from __future__ import annotations

import math

END_FILE = "/dev/shm/.rollyard-end"

SCRIPT = f"""
trap 'kill -9 -1' USR1; trap : USR2; trap 'exit 0' TERM INT HUP
exec 3<&0 </dev/null
now() {{ read -r up rest </proc/uptime; up=${{up%%.*}}; }}
nap() {{ command -v timeout >/dev/null && exec timeout "$1" tail -f /dev/null; exec sleep "$1"; }}
now; end=$((up + $1)); watch=
while :; do
  new=; [ -r {END_FILE} ] && read -r new <{END_FILE}
  case $new in *[!0-9]*|'') ;; *) end=$new ;; esac
  now; [ "$up" -ge "$end" ] && exit 0
  if [ "$2" = owner ] && [ -z "$watch" ]; then (cat <&3 >/dev/null && kill -TERM 1) & watch=$!; fi
  nap $((end - up)) & wait $!
  [ $? -gt 124 ] && watch=
done
"""

EXTEND = f"read -r up rest </proc/uptime; echo $((${{up%%.*}} + $1)) >{END_FILE}; kill -USR2 1"


def command(ttl_s: float, lifetime: str) -> list[str]:
    """PID 1's argv. Times are whole seconds, rounded up."""
    return ["/bin/sh", "-c", SCRIPT, "rollyard", str(math.ceil(ttl_s)), lifetime]
