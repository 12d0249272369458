"""`python -m bench [NAME ...]`: run the benchmarks one after the other, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

BENCHES = ("sandbox", "relay", "wire", "tokens", "store", "gate", "envs", "rollouts", "page", "plane")


def main() -> int:
    wanted = sys.argv[1:] or BENCHES
    if unknown := set(wanted) - set(BENCHES):
        print(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nover budget or broken: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
